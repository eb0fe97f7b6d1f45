"""What is written down about a slot adds up, and says so when it does not."""

import dataclasses

import pytest

from fakes import small_limits
from service.engine.slots import Occupant, SlotPhase, SlotTable
from service.engine.types import FinishReason, Request, SlotRounds

LIMITS = small_limits()
PAGES = tuple(range(1, 17))


def occupied(max_tokens: int = 8) -> tuple[SlotTable, Occupant]:
    table = SlotTable(LIMITS)
    occupant = table.admit(1, 7, Request("a", (5, 6, 7), max_tokens), PAGES)
    return table, occupant


def running() -> tuple[SlotTable, Occupant]:
    table, occupant = occupied()
    occupant.prefilled, occupant.running = 2, True
    occupant.record(SlotRounds([[8], [9, 10]], [0, 2], [0, 1], FinishReason.NONE))
    table.check_integrity()
    return table, occupant


def test_a_slot_is_free_then_prefilling_then_running_then_free():
    table, occupant = occupied()
    assert [table.phase(slot) for slot in (0, 1)] == [SlotPhase.FREE, SlotPhase.PREFILLING]
    assert (table.first_free(), table.find(7), table.find(8)) == (0, 1, None)
    assert table.running() == []
    occupant.prefilled, occupant.running = occupant.prefill_length, True
    assert table.phase(1) is SlotPhase.RUNNING
    assert table.running() == [(1, occupant)]
    assert table.release(1) is occupant
    assert table.count(SlotPhase.FREE) == LIMITS.slots
    table.check_integrity()


def test_a_held_slot_is_not_given_away_and_a_free_one_not_released():
    table, occupant = occupied()
    with pytest.raises(ValueError, match="slot 1 is prefilling"):
        table.admit(1, 8, occupant.request, ())
    with pytest.raises(ValueError, match="slot 0 is free"):
        table.release(0)


def test_recording_counts_only_rounds_that_emitted():
    _, occupant = occupied()
    chunk = occupant.record(SlotRounds([[8, 9, 10], []], [2, 2], [2, 0], FinishReason.NONE))
    assert chunk.token_ids == (8, 9, 10)
    assert chunk.drafted == (True, True, False)
    assert (occupant.emitted, occupant.position) == (3, 6)
    last = occupant.record(SlotRounds([[11], [12, 13]], [1, 2], [0, 2], FinishReason.STOP))
    assert last.finish is FinishReason.STOP
    assert last.drafted == (False, True, True)  # the stop id was a draft, so nothing follows it
    stats = last.speculation
    assert (stats.rounds, stats.drafted, stats.accepted) == (3, 5, 4)
    assert stats.acceptance_histogram == (1, 0, 2)


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        (SlotRounds([[8, 9]], [1], [2], FinishReason.NONE), "accepted 2 of 1 draft tokens"),
        (SlotRounds([[8]], [2], [2], FinishReason.NONE), "emitted 1"),
        (SlotRounds([[8, 9, 10]], [2], [2], FinishReason.NONE), "0 \\+ 3 tokens emitted > max_tok"),
    ],
)
def test_recording_refuses_what_cannot_be(rounds: SlotRounds, text: str):
    _, occupant = occupied(max_tokens=2)
    with pytest.raises(ValueError, match=text):
        occupant.record(rounds)
    assert occupant.emitted == 0


def _wrong_stats(occupant: Occupant, **changes: object) -> None:
    occupant.speculation = dataclasses.replace(occupant.speculation, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda o: setattr(o, "prefilled", 3), "prefilled 3 > 2 to prefill"),
        (lambda o: setattr(o, "prefilled", 1), "running with prefilled 1 != 2"),
        (lambda o: setattr(o, "emitted", 8), "emitted 8 >= max_tokens 8"),
        (lambda o: setattr(o, "emitted", 4), "emitted 4 != rounds 2 \\+ accepted 1"),
        (lambda o: setattr(o, "page_ids", (1, 2)), "may write 20 positions > 8 covered"),
        (lambda o: _wrong_stats(o, rounds=3), "histogram counts 2 != rounds 3"),
        (lambda o: _wrong_stats(o, accepted=2), "histogram 1 != accepted 2"),
    ],
)
def test_integrity_names_both_sides(spoil, text: str):
    table, occupant = running()
    spoil(occupant)
    with pytest.raises(RuntimeError, match=f"slot 1, request 'a': {text}"):
        table.check_integrity()


def test_integrity_finds_a_page_in_two_slots():
    table, occupant = running()
    table.admit(2, 8, occupant.request, (*range(20, 35), 3))
    with pytest.raises(RuntimeError, match="page 3 is held by slot 1 and slot 2"):
        table.check_integrity()

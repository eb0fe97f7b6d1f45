"""Estimates of waiting: nothing before enough was seen, then in proportion to what was seen."""

import pytest

from service.engine.estimates import HOLD_WEIGHT, MIN_HOLDS, RECENT_CHUNKS, Estimates


def seen(*holds: float, slots: int = 2) -> Estimates:
    """Estimates after requests that held their slots for so many seconds."""
    estimates = Estimates(slots, prefill_chunk=8)
    for ticket, hold in enumerate(holds):
        estimates.admitted([ticket], 100.0)
        estimates.ended(ticket, 100.0 + hold)
    return estimates


def test_nothing_is_known_before_enough_requests_have_ended():
    few = seen(*[4.0] * (MIN_HOLDS - 1))
    assert few.wait_s(0, free_slots=0) is None
    assert few.first_token_s(0, 0, prompt_tokens=100) is None
    assert few.wait_s(0, free_slots=1) == 0.0  # but that a free slot is free
    assert seen(*[4.0] * MIN_HOLDS).wait_s(0, free_slots=0) == pytest.approx(2.0)


def test_the_wait_grows_with_the_position_and_shrinks_with_the_slots():
    holds = [3.0, 5.0, 2.0, 6.0]
    for slots in (1, 2, 4):
        estimates = seen(*holds, slots=slots)
        waits = [estimates.wait_s(position, 0) for position in range(3)]
        assert waits == pytest.approx([4.0 / slots, 8.0 / slots, 12.0 / slots])
    assert [seen(*holds).wait_s(position, 2) for position in range(4)] == [0.0, 0.0, 2.0, 4.0]


def test_later_holds_count_more_than_earlier_ones():
    estimates = seen(*[10.0] * 50)
    for ticket in range(100, 100 + round(3 / HOLD_WEIGHT)):
        estimates.admitted([ticket], 0.0)
        estimates.ended(ticket, 1.0)
    assert estimates.wait_s(1, 0) == pytest.approx(1.0 + 9 * (1 - HOLD_WEIGHT) ** 24)


def test_only_requests_that_held_a_slot_count():
    estimates = seen(*[4.0] * MIN_HOLDS)
    estimates.ended(77, 1e6)  # it was waiting when it was aborted
    estimates.admitted([78], 0.0)
    estimates.forget_held()
    estimates.ended(78, 1e6)
    assert estimates.wait_s(0, 0) == pytest.approx(2.0)


def test_the_first_token_comes_after_the_full_chunks_of_the_prompt():
    estimates = seen(*[4.0] * MIN_HOLDS)
    assert estimates.first_token_s(0, 1, prompt_tokens=1000) == 0.0  # no chunk was seen yet
    estimates.prefilled(3, seconds=0.001)  # not a full one
    estimates.prefilled(8, seconds=0.5)
    seconds = [estimates.first_token_s(0, 1, tokens) for tokens in (1, 8, 9, 16, 17, 81)]
    assert seconds == pytest.approx([0.0, 0.0, 0.5, 0.5, 1.0, 5.0])
    assert estimates.first_token_s(0, 0, prompt_tokens=81) == pytest.approx(2.0 + 5.0)


def test_a_stall_in_prefill_does_not_count_and_a_lasting_change_does():
    estimates = seen()
    estimates.prefilled(8, seconds=0.5)
    for _ in range(RECENT_CHUNKS - 1):
        estimates.prefilled(8, seconds=30.0)
    assert estimates.first_token_s(0, 1, prompt_tokens=9) == 0.5
    estimates.prefilled(8, seconds=2.0)
    assert estimates.first_token_s(0, 1, prompt_tokens=9) == 2.0

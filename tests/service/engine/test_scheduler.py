"""The policy: everybody in turn, bounded, nobody starves, nothing is held twice."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeExecutor, small_limits
from service.engine.scheduler import Plan, Scheduler
from service.engine.types import Limits, Priority, Request, SamplingParams
from service.engine.waiting import Refusal

LIMITS = small_limits()
SLACK = 2 * LIMITS.tokens_per_call + LIMITS.draft_length


def make(limits: Limits = LIMITS, requests: int = 100, tokens: int = 10_000) -> Scheduler:
    return Scheduler(limits, max_waiting_requests=requests, max_waiting_tokens=tokens)


def request(prompt: int, max_tokens: int = 4, name: str = "r", **fields: object) -> Request:
    return Request(name, tuple(range(prompt)), max_tokens, **fields)  # type: ignore[arg-type]


class Device:
    """Runs plans like the engine's loop: the results of a call come after the next dispatch."""

    def __init__(self, scheduler: Scheduler, limits: Limits = LIMITS) -> None:
        self.scheduler, self.executor = scheduler, FakeExecutor(limits)
        self.in_flight = None

    def run(self, plan: Plan) -> list[int]:
        """Dispatches a plan, records the call before; returns the tickets that ended in that."""
        executor, chunk, call = self.executor, plan.prefill, None
        if chunk is not None:
            executor.prefill(
                chunk.slot, chunk.page_ids, chunk.start, chunk.tokens, chunk.next_token
            )
        for slot, occupant in plan.inserts:
            executor.insert(slot, occupant.request, occupant.draft_cap)
        if plan.decoding:
            handle = executor.decode(plan.page_tables, plan.draft_length)
            call = (handle, plan.decoding)
        previous, self.in_flight = self.in_flight, call
        deliveries = []
        if previous is not None:
            deliveries = self.scheduler.record(previous[1], previous[0].fetch())
        if call is None:
            executor.wait()
        return [delivery.ticket for delivery in deliveries if delivery.chunk.finish]


def test_waiting_is_bounded_by_requests():
    scheduler = make(requests=2)
    assert [scheduler.submit(i, request(4)) for i in range(2)] == [None, None]
    assert scheduler.submit(2, request(4)) == Refusal("requests", 3, 2, queue_full=True)
    assert scheduler.load().waiting == 2
    scheduler.plan()  # both take slots
    assert scheduler.submit(3, request(4)) is None


def test_waiting_is_bounded_by_tokens_but_an_empty_queue_takes_any_prompt_that_fits():
    scheduler = make(tokens=10)
    assert scheduler.submit(0, request(20)) is None
    assert scheduler.submit(1, request(4)) == Refusal("tokens", 24, 10, queue_full=True)
    scheduler.plan()
    assert [scheduler.submit(i, request(5)) for i in (2, 3)] == [None, None]
    assert scheduler.load().waiting_tokens == 10
    assert scheduler.submit(4, request(1)) == Refusal("tokens", 11, 10, queue_full=True)


SMALL_POOL = small_limits(pages=1 + 9)  # 36 positions; 14 of them are slack


@pytest.mark.parametrize(
    ("limits", "asked", "refusal"),
    [
        (LIMITS, request(64), ("prompt_ids", 64, 63)),
        (LIMITS, request(4, end_ids=(1, 2), stop_ids=(3, 4, 5)), ("stop_ids", 3, 2)),
        (SMALL_POOL, request(4, 19), ("max_tokens", 19, 18)),
        (SMALL_POOL, request(22, 1), ("prompt_ids", 22, 21)),
    ],
)
def test_what_can_never_fit_is_refused_and_what_just_fits_is_not(
    limits: Limits, asked: Request, refusal: tuple[str, int, int]
):
    scheduler = make(limits)
    assert scheduler.submit(0, asked) == Refusal(*refusal, queue_full=False)
    assert scheduler.load().waiting == 0
    field, _, limit = refusal
    fits = limit if field == "max_tokens" else tuple(range(limit))
    assert scheduler.submit(1, dataclasses.replace(asked, **{field: fits})) is None  # type: ignore[arg-type]
    assert scheduler.plan().prefill is not None


def test_too_many_biased_tokens_are_refused():
    bias = tuple((token, 1.0) for token in range(LIMITS.max_logit_bias + 1))
    refusal = make().submit(0, request(4, sampling=SamplingParams(logit_bias=bias)))
    assert refusal == Refusal("logit_bias", 65, 64, queue_full=False)


def test_max_tokens_beyond_the_context_is_not_too_large():
    assert make().submit(0, request(4, 1_000_000)) is None


def test_the_head_waits_for_pages_and_nobody_overtakes_it():
    scheduler = make(small_limits(pages=1 + 20))
    for ticket, asked in enumerate([request(10, 20), request(30, 20), request(2, 1)]):
        scheduler.submit(ticket, asked)
    scheduler.plan()
    load = scheduler.load()
    assert (load.prefilling, load.waiting) == (1, 2)  # the third would fit, and waits its turn
    assert load.pages_used == -(-(10 + 20 + SLACK) // LIMITS.page_size)
    scheduler.abort(0)
    scheduler.plan()
    assert scheduler.load().waiting == 1


def test_a_higher_class_goes_first_but_does_not_overtake_who_waits_for_pages():
    scheduler = make(small_limits(pages=1 + 20))
    scheduler.submit(0, request(10, 20))
    scheduler.plan()
    assert scheduler.free_slots == 3
    scheduler.submit(1, request(30, 20))
    scheduler.submit(2, request(2, 1, priority=Priority.HIGH))
    assert scheduler.arrival_position(Priority.NORMAL) == 2
    assert scheduler.plan().admitted == (2,)
    assert scheduler.free_slots == 0  # there are two, and too few pages
    scheduler.submit(3, request(2, 1, priority=Priority.HIGH))
    assert scheduler.plan().admitted == ()
    assert [scheduler.position(ticket) for ticket in (1, 2, 3)] == [0, None, 1]
    scheduler.abort(0)
    scheduler.abort(2)
    assert scheduler.plan().admitted == (1,)


def test_a_chosen_request_that_expires_lets_the_others_go_on():
    scheduler = make(small_limits(pages=1 + 20))
    scheduler.submit(0, request(10, 20))
    scheduler.submit(1, request(30, 20, first_token_deadline=5.0))
    scheduler.submit(2, request(2, 1))
    assert scheduler.plan().admitted == (0,)
    assert scheduler.drop_expired(5.0) == [1]
    assert scheduler.plan().admitted == (2,)
    assert scheduler.drop_expired(1e9) == []


def test_one_chunk_per_plan_and_slots_take_turns():
    scheduler = make()
    for ticket, length in enumerate((41, 9, 1, 17)):
        scheduler.submit(ticket, request(length))
    plans = [scheduler.plan() for _ in range(8)]
    chunks = [(plan.prefill.slot, plan.prefill.start) for plan in plans if plan.prefill]
    assert chunks == [(0, 0), (1, 0), (3, 0), (0, 8), (3, 8), (0, 16), (0, 24), (0, 32)]
    inserted = [[slot for slot, _ in plan.inserts] for plan in plans]
    assert inserted == [[2], [1], [], [], [3], [], [], [0]]
    last = plans[-1].prefill
    assert last is not None
    assert (last.tokens, last.next_token) == (tuple(range(32, 40)), 40)


def test_only_running_slots_have_page_tables():
    scheduler = make()
    scheduler.submit(0, request(20))
    scheduler.submit(1, request(1))
    plan = scheduler.plan()
    assert [bool(table) for table in plan.page_tables] == [False, True, False, False]
    assert [slot for slot, _ in plan.decoding] == [1]


def test_abort_in_each_phase():
    scheduler = make(small_limits(slots=2))
    for ticket, length in enumerate((1, 40, 5)):
        scheduler.submit(ticket, request(length))
    scheduler.plan()
    assert scheduler.abort(2) is None  # waiting
    assert scheduler.abort(1) is None  # prefilling: the device knows of no request yet
    assert scheduler.abort(0) == 0  # running
    assert scheduler.abort(0) is None  # gone
    assert not scheduler.has_work
    assert scheduler.load().pages_used == scheduler.load().waiting_tokens == 0
    scheduler.check_integrity()


def test_results_of_a_slot_that_changed_hands_are_dropped():
    scheduler = make(small_limits(slots=1))
    device = Device(scheduler)
    same = request(1, 50)
    scheduler.submit(0, same)
    plan = scheduler.plan()
    results = device.executor
    results.insert(0, same, 0)
    rounds = results.decode([*plan.page_tables, (), (), ()], plan.draft_length).fetch()
    scheduler.abort(0)
    scheduler.submit(1, same)
    scheduler.plan()
    assert scheduler.record(plan.decoding, rounds) == []
    assert [
        delivery.ticket for delivery in scheduler.record(scheduler.plan().decoding, rounds)
    ] == [1]


def test_draft_caps_follow_the_default_unless_the_request_names_one():
    scheduler = make()
    scheduler.set_draft_cap_default(1)
    for ticket, cap in enumerate((None, 0, 2, 99)):
        scheduler.submit(ticket, request(1, max_draft_tokens=cap))
    plan = scheduler.plan()
    assert [occupant.draft_cap for _, occupant in plan.inserts] == [1, 0, 2, 2]
    assert plan.draft_caps == ()
    scheduler.set_draft_cap_default(2)
    assert scheduler.plan().draft_caps == ((0, 2),)
    assert scheduler.plan().draft_caps == ()
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"draft cap is {wrong}"):
            scheduler.set_draft_cap_default(wrong)


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_a_queue_without_room_is_refused(bounds: tuple[int, int]):
    with pytest.raises(ValueError, match="must be at least 1"):
        make(requests=bounds[0], tokens=bounds[1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda s: setattr(s._waiting, "_tokens", 9), "4 prompt tokens wait != 1 and 9 counted"),
        (lambda s: s._prefill_turns.clear(), r"prefill turns \[\] != prefilling slots \[0\]"),
        (lambda s: s._pages.allocate(1), "pages in slots != "),
        (lambda s: s._pages._free.pop(), "free pages .* != 48 usable pages"),
    ],
)
def test_integrity_names_both_sides(spoil, text: str):
    scheduler = make(small_limits(slots=1))
    scheduler.submit(0, request(20))
    scheduler.plan()
    scheduler.submit(1, request(4))
    scheduler.check_integrity()
    spoil(scheduler)
    with pytest.raises(RuntimeError, match=text):
        scheduler.check_integrity()


STEP = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 63), st.integers(1, 70)),
    st.tuples(st.just("abort"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("plan"), st.integers(1, 3), st.just(0)),
)


@given(
    steps=st.lists(STEP, max_size=40),
    slots=st.integers(1, 4),
    pages=st.integers(4, 40),
    requests=st.integers(1, 6),
    tokens=st.integers(1, 150),
)
@settings(max_examples=80)
def test_any_history_keeps_the_promises(
    steps: list[tuple[str, int, int]], slots: int, pages: int, requests: int, tokens: int
):
    limits = small_limits(slots=slots, pages=pages)
    scheduler = make(limits, requests, tokens)
    device = Device(scheduler, limits)
    queue: list[int] = []  # tickets in the order that they must be admitted in
    open_: dict[int, int] = {}  # ticket: prompt length
    last_turn: dict[int, int] = {}  # slot: chunks since its last

    def turn() -> None:
        waiting = len(queue)
        plan = scheduler.plan()
        admitted = waiting - scheduler.load().waiting
        del queue[:admitted]
        assert all(scheduler.is_waiting(ticket) for ticket in queue)
        if plan.prefill is not None:
            start, count = plan.prefill.start, len(plan.prefill.tokens)
            assert start % limits.prefill_chunk == 0 < count <= limits.prefill_chunk
            for slot in last_turn:
                last_turn[slot] += 1
            last_turn[plan.prefill.slot] = 0
            if any(slot == plan.prefill.slot for slot, _ in plan.inserts):
                del last_turn[plan.prefill.slot]
            assert all(turns < slots for turns in last_turn.values()), "a slot missed its turn"
        scheduler.check_integrity()
        for ticket in device.run(plan):
            del open_[ticket]
        scheduler.check_integrity()

    for ticket, (kind, first, second) in enumerate(steps):
        if kind == "submit":
            refusal = scheduler.submit(ticket, request(first, second))
            if refusal is None:
                queue.append(ticket)
                open_[ticket] = first
        elif kind == "abort":
            slot = scheduler.abort(first)
            if slot is not None:
                device.executor.release(slot)
            queue[:] = [ticket for ticket in queue if ticket != first]
            open_.pop(first, None)
            last_turn = {
                slot: turns for slot, turns in last_turn.items() if slot in scheduler._prefill_turns
            }
        else:
            for _ in range(first):
                turn()
        load = scheduler.load()
        assert load.waiting == len(queue) <= requests
        longest = max((open_[ticket] for ticket in queue), default=0)
        assert load.waiting_tokens <= max(tokens, longest)
        assert load.pages_used <= load.pages
    # Everybody left gets to the end: a turn prefills a chunk or decodes at least a token each.
    for _ in range(sum(8 + 64 for _ in open_) + 1):
        if not open_:
            break
        turn()
    assert not open_
    assert not scheduler.has_work
    assert scheduler.load().pages_used == 0

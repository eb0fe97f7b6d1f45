"""The loop turn by turn, without its thread: any interleaving keeps the executor's contract."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeExecutor, expected_reply, small_limits
from service.engine.draft_policy import DraftPolicy
from service.engine.errors import (
    DeadlineError,
    EngineUnavailableError,
    QueueFullError,
    RequestTooLargeError,
)
from service.engine.loop import EngineLoop, EngineState
from service.engine.scheduler import Delivery, Scheduler
from service.engine.types import FinishReason, Limits, Priority, QueueStatus, Request


class Replies:
    """What was delivered, by ticket."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.expired: list[tuple[int, float]] = []
        self.calls = 0

    def __call__(self, deliveries: Sequence[Delivery]) -> None:
        self.calls += 1
        for ticket, chunk in ((d.ticket, d.chunk) for d in deliveries):
            assert ticket not in self.finish, "tokens after the end"
            self.tokens.setdefault(ticket, []).extend(chunk.token_ids)
            if chunk.finish is not FinishReason.NONE:
                self.finish[ticket] = chunk.finish

    def expire(self, tickets: Sequence[int], expired_at: float) -> None:
        assert not self.tokens.keys() & set(tickets), "it had a slot"
        self.expired += ((ticket, expired_at) for ticket in tickets)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(
    executor: FakeExecutor,
    replies: Replies,
    waiting: int = 100,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> EngineLoop:
    scheduler = Scheduler(
        executor.limits, max_waiting_requests=waiting, max_waiting_tokens=1000, **options
    )

    def fail(error: BaseException) -> None:
        raise error

    loop = EngineLoop(
        executor,
        scheduler,
        admit=lambda tickets, at: None,
        expire=replies.expire,
        deliver=replies,
        fail=fail,
        retry_after_s=2.5,
        clock=clock,
    )
    loop.open()
    return loop


def run_until_idle(loop: EngineLoop) -> None:
    for _ in range(2000):
        if not loop.has_work:
            return
        loop.step()
    raise AssertionError("the loop never comes to rest")


def test_the_next_call_is_dispatched_before_the_previous_one_is_fetched():
    executor = FakeExecutor()
    loop = make(executor, Replies())
    loop.submit(Request("a", (1, 2, 3), 9))
    run_until_idle(loop)
    order = [entry[0] for entry in executor.log]
    assert order[:6] == ["prefill", "insert", "decode", "decode", "fetch", "decode"]
    assert order.count("decode") == order.count("fetch")


def test_a_prompt_without_company_is_prefilled_one_chunk_at_a_time():
    executor = FakeExecutor()
    loop = make(executor, Replies())
    loop.submit(Request("a", tuple(range(30)), 1))
    loop.step()
    assert [entry[0] for entry in executor.log] == ["prefill", "wait"]
    run_until_idle(loop)
    assert [entry[2:] for entry in executor.calls("prefill")] == [(0, 8), (8, 8), (16, 8), (24, 5)]


def test_at_most_one_chunk_between_decode_calls():
    executor = FakeExecutor()
    loop = make(executor, Replies())
    loop.submit(Request("running", (1,), 60))
    loop.step()
    loop.submit(Request("long", tuple(range(50)), 4))
    loop.submit(Request("short", (7, 8), 4))
    run_until_idle(loop)
    order = [entry[0] for entry in executor.log if entry[0] in ("prefill", "decode")]
    assert ("prefill", "prefill") not in list(itertools.pairwise(order))
    inserts = [entry[2] for entry in executor.calls("insert")]
    assert inserts == ["running", "short", "long"]


def test_a_huge_prompt_neither_delays_a_flow_of_short_ones_nor_starves_in_it():
    limits = small_limits(max_context=512, pages=1 + 4 * 128)
    executor, replies = FakeExecutor(limits, accepts=(0,)), Replies()
    loop = make(executor, replies)
    running = loop.submit(Request("running", (1,), 500))
    huge = loop.submit(Request("huge", tuple(range(400)), 1))  # 50 chunks
    submitted: dict[int, int] = {}  # short request: turn
    for turn in range(3 * 50 + 2):
        if loop.load().running + loop.load().prefilling < limits.slots:
            submitted[loop.submit(Request(f"short{turn}", (5, 6), 1))] = turn
        before = len(replies.tokens.get(running, ()))
        loop.step()
        assert turn == 0 or len(replies.tokens[running]) > before, "a turn without a token"
        for ticket in submitted.keys() & replies.tokens.keys():
            # A turn for each other slot's chunk, its own, one to fetch what the call emitted.
            assert turn - submitted.pop(ticket) <= limits.slots + 1
    assert len(executor.calls("insert")) > 50
    assert huge in replies.finish


def test_a_call_in_flight_gives_nothing_to_the_next_occupant_of_a_slot():
    executor = FakeExecutor(small_limits(slots=1))
    replies = Replies()
    loop = make(executor, replies)
    same = Request("same", (1,), 20)
    first = loop.submit(same)
    loop.step()  # call 1 in flight
    loop.step()  # call 2 in flight, call 1 delivered
    loop.abort(first)
    second = loop.submit(same)
    loop.step()  # released, inserted again, call 3 in flight; call 2 belongs to nobody
    assert second not in replies.tokens
    run_until_idle(loop)
    assert tuple(replies.tokens[second]) == expected_reply(same, executor.limits)[0]
    assert first not in replies.finish


def test_an_abort_between_dispatch_and_fetch_frees_the_slot_for_the_next_call():
    executor = FakeExecutor(small_limits(slots=1))
    replies = Replies()
    loop = make(executor, replies)
    ticket = loop.submit(Request("a", (1,), 20))
    loop.step()
    loop.abort(ticket)
    loop.step()
    assert executor.calls("release") == [("release", 0)]
    assert loop.load().running == 0
    run_until_idle(loop)
    assert replies.tokens == {}


def test_one_delivery_per_decode_call():
    executor = FakeExecutor()
    replies = Replies()
    loop = make(executor, replies)
    for name in "abcd":
        loop.submit(Request(name, (1,), 12))
    run_until_idle(loop)
    assert len(replies.finish) == 4
    assert replies.calls == len(executor.calls("decode")) - 1  # the last call was empty


def test_refusals_carry_their_facts():
    loop = make(FakeExecutor(small_limits(slots=1)), Replies(), waiting=1)
    loop.submit(Request("running", (1,), 20))
    loop.step()
    loop.submit(Request("a", (1,), 1))
    with pytest.raises(QueueFullError) as full:
        loop.submit(Request("b", (1,), 1))
    facts = full.value
    assert (facts.kind, facts.limit, facts.actual, facts.retry_after_s) == ("requests", 1, 2, 2.5)
    with pytest.raises(RequestTooLargeError, match=r"prompt_ids is 64, and .* at most 63") as large:
        loop.submit(Request("c", (1,) * 64, 1))
    assert (large.value.field, large.value.value, large.value.limit) == ("prompt_ids", 64, 63)
    loop.refuse_new()
    with pytest.raises(EngineUnavailableError, match="stopping"):
        loop.submit(Request("d", (1,), 1))
    with pytest.raises(EngineUnavailableError, match="stopping"):
        loop.start()


def test_a_stopped_loop_waits_for_the_device_and_ends():
    executor = FakeExecutor()
    loop = make(executor, Replies())
    ticket = loop.submit(Request("a", (1,), 50))
    loop.step()
    loop.abort(ticket)
    loop.stop()
    assert not loop.step()
    assert [entry[0] for entry in executor.log[-2:]] == ["release", "wait"]
    assert loop.state is EngineState.STOPPED
    assert loop.load().running == 0


STEP = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("cap"), st.integers(0, 3), st.just(0)),
)


@given(
    steps=st.lists(STEP, max_size=40),
    slots=st.integers(1, 4),
    draft_length=st.integers(0, 3),
    rounds=st.integers(1, 3),
    accepts=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    adaptive=st.booleans(),
    single_program=st.booleans(),
)
@settings(max_examples=150)
def test_any_interleaving_gives_each_request_its_own_tokens(
    steps: list[tuple[str, int, int]],
    slots: int,
    draft_length: int,
    rounds: int,
    accepts: list[int],
    adaptive: bool,
    single_program: bool,
):
    limits: Limits = small_limits(
        slots=slots, draft_length=draft_length, rounds_per_call=rounds, pages=1 + 20
    )
    executor, replies = FakeExecutor(limits, accepts=accepts), Replies()
    policy = DraftPolicy(draft_length) if adaptive else None
    loop = make(executor, replies, draft_policy=policy, single_program=single_program)
    requests: dict[int, Request] = {}
    aborted: set[int] = set()
    for index, (kind, first, second) in enumerate(steps):
        if kind == "submit":
            prompt = tuple((100 * index + i) % limits.vocab_size for i in range(first))
            stop_ids = ((prompt[-1] + 7) % limits.vocab_size,) if index % 3 == 0 else ()
            cap = None if index % 4 else index % 5
            asked = Request(f"r{index}", prompt, second, stop_ids=stop_ids, max_draft_tokens=cap)
            requests[loop.submit(asked)] = asked
        elif kind == "abort":
            for ticket in {first} & requests.keys():
                loop.abort(ticket)
                aborted.add(ticket)
        elif kind == "cap":
            loop.set_draft_cap_default(min(first, draft_length))
        else:
            for _ in range(first):
                if loop.has_work:
                    loop.step()
                loop.check_integrity()
    run_until_idle(loop)
    for ticket, asked in requests.items():
        reply, finish = expected_reply(asked, limits)
        got = tuple(replies.tokens.get(ticket, ()))
        if ticket in aborted:
            assert reply[: len(got)] == got
        else:
            assert (got, replies.finish[ticket]) == (reply, finish)
    assert loop.load().pages_used == 0
    assert not single_program or set(executor.draft_lengths) <= {draft_length}


def test_the_program_is_that_of_the_largest_draft_cap():
    executor = FakeExecutor()
    loop = make(executor, Replies())
    loop.submit(Request("off", (1,), 60, max_draft_tokens=0))
    loop.step()
    one = loop.submit(Request("one", (1,), 60, max_draft_tokens=1))
    loop.step()
    loop.submit(Request("free", (1,), 60))
    loop.step()
    loop.set_draft_cap_default(0)
    loop.step()
    loop.abort(one)
    loop.step()
    assert executor.draft_lengths == [0, 1, 2, 1, 0]
    run_until_idle(loop)


def test_choices_are_taken_together_or_not_at_all():
    executor, replies = FakeExecutor(small_limits(slots=1)), Replies()
    loop = make(executor, replies, waiting=3)
    choice = Request("a", (1, 2), 4)
    with pytest.raises(RequestTooLargeError, match=r"choices is 4, and .* at most 3"):
        loop.submit_all((choice,) * 4)
    with pytest.raises(RequestTooLargeError, match="prompt_ids is 64"):
        loop.submit_all((choice, Request("a", (1,) * 64, 4)))
    tickets = loop.submit_all((choice,) * 2)
    with pytest.raises(QueueFullError, match="4 requests would exceed 3"):
        loop.submit_all((choice,) * 2)
    assert loop.load().waiting == 2
    run_until_idle(loop)
    assert [tuple(replies.tokens[ticket]) for ticket in tickets] == [(3, 4, 5, 6)] * 2


def test_a_deadline_passes_while_nothing_happens_but_turns():
    """Nobody submits, aborts or ends: the running slot alone makes the loop look at the clock."""
    clock, replies = Clock(), Replies()
    loop = make(FakeExecutor(small_limits(slots=1)), replies, clock=clock)
    loop.submit(Request("running", (1,), 60))
    loop.step()
    late = loop.submit(Request("late", (1,), 4, first_token_deadline=1005.0))
    patient = loop.submit(Request("patient", (1,), 4))
    for _ in range(3):
        loop.step()
        clock.now += 1
    assert replies.expired == []
    clock.now = 1005.0
    assert loop.has_work  # so the thread does not sleep
    loop.step()
    assert replies.expired == [(late, 1005.0)]
    assert loop.load().waiting == 1
    assert loop.queue_status(late) is None
    run_until_idle(loop)
    assert late not in replies.tokens
    assert patient in replies.finish


def test_a_request_with_a_slot_is_left_alone():
    clock, replies = Clock(), Replies()
    loop = make(FakeExecutor(small_limits(slots=1)), replies, clock=clock)
    prefilling = loop.submit(Request("a", tuple(range(40)), 4, first_token_deadline=1001.0))
    loop.step()
    clock.now = 2000.0
    run_until_idle(loop)
    assert replies.expired == []
    assert replies.finish[prefilling] is FinishReason.MAX_TOKENS


def test_a_request_that_expires_as_a_slot_falls_free_does_not_get_it():
    clock, replies = Clock(), Replies()
    loop = make(FakeExecutor(small_limits(slots=1)), replies, clock=clock)
    late = loop.submit(Request("late", (1,), 4, first_token_deadline=1001.0))
    clock.now = 1001.0
    loop.step()
    assert replies.expired == [(late, 1001.0)]
    assert not loop.has_work


def ended(loop: EngineLoop, clock: Clock, hold_s: float, count: int = 4) -> None:
    """Lets so many requests hold the one slot for so many seconds, one after the other."""
    for number in range(count):
        loop.submit(Request(f"before{number}", (1,), 1))
        loop.step()
        clock.now += hold_s
        run_until_idle(loop)


def test_what_cannot_begin_in_time_is_refused_at_once_and_what_can_is_not():
    clock, replies = Clock(), Replies()
    loop = make(FakeExecutor(small_limits(slots=1)), replies, clock=clock)
    ended(loop, clock, hold_s=3.0)
    loop.submit(Request("running", (1,), 60))
    loop.step()
    hurried = Request("b", (1,), 4, first_token_deadline=clock.now + 2.9)
    with pytest.raises(
        DeadlineError, match=r"within 2\.90 s; it is expected in 3\.00 s"
    ) as refused:
        loop.submit(hurried)
    assert refused.value.estimated_wait_s == pytest.approx(3.0)
    assert refused.value.deadline_s == pytest.approx(2.9)
    assert refused.value.waited_s is None
    with pytest.raises(DeadlineError):
        loop.submit_all((hurried, hurried))
    assert loop.load().waiting == 0
    loop.submit(Request("c", (1,), 4, first_token_deadline=clock.now + 3.1))
    assert loop.load().waiting == 1
    with pytest.raises(DeadlineError) as refused:  # it would be the second
        loop.submit(Request("d", (1,), 4, first_token_deadline=clock.now + 3.1))
    assert refused.value.estimated_wait_s == pytest.approx(6.0)
    loop.submit(Request("e", (1,), 4, priority=Priority.HIGH, first_token_deadline=clock.now + 3.1))
    run_until_idle(loop)


def test_an_aborted_request_held_its_slot_as_long_as_it_did():
    clock = Clock()
    loop = make(FakeExecutor(small_limits(slots=1)), Replies(), clock=clock)
    for _ in range(4):
        ticket = loop.submit(Request("aborted", (1,), 60))
        loop.step()
        clock.now += 2.0
        loop.abort(ticket)
        run_until_idle(loop)
    loop.submit(Request("running", (1,), 60))
    loop.step()
    assert loop.estimated_wait_s(Priority.NORMAL) == 2.0


def test_the_estimate_for_the_first_token_counts_the_prompt():
    class Device(FakeExecutor):
        def wait(self) -> None:
            super().wait()
            clock.now += 0.5

    clock = Clock()
    loop = make(Device(small_limits(slots=1)), Replies(), clock=clock)
    loop.submit(Request("before", tuple(range(12)), 1))  # a full chunk, and one of 3 tokens
    run_until_idle(loop)
    with pytest.raises(DeadlineError, match=r"it is expected in 2\.00 s"):
        loop.submit(Request("a", tuple(range(33)), 1, first_token_deadline=clock.now + 1.9))
    loop.submit(Request("b", tuple(range(33)), 1, first_token_deadline=clock.now + 2.1))


def test_what_is_not_known_is_no_reason_to_refuse():
    clock = Clock()
    loop = make(FakeExecutor(small_limits(slots=1)), Replies(), clock=clock)
    ended(loop, clock, hold_s=3.0, count=3)
    loop.submit(Request("running", (1,), 60))
    loop.step()
    loop.submit(Request("a", (1,), 4, first_token_deadline=clock.now + 0.001))
    with pytest.raises(DeadlineError, match=r"has waited 0\.00 s") as passed:
        loop.submit(Request("b", (1,), 4, first_token_deadline=clock.now))
    assert (passed.value.estimated_wait_s, passed.value.waited_s) == (None, 0.0)


def test_what_can_never_be_served_is_told_before_what_is_late():
    clock = Clock()
    loop = make(FakeExecutor(), Replies(), clock=clock)
    with pytest.raises(RequestTooLargeError):
        loop.submit(Request("a", (1,) * 64, 1, first_token_deadline=clock.now - 1))


def test_statuses_and_hints_come_from_the_same_estimate():
    clock = Clock()
    loop = make(FakeExecutor(small_limits(slots=1)), Replies(), waiting=3, clock=clock)
    assert loop.estimated_wait_s(Priority.NORMAL) == 0.0
    ended(loop, clock, hold_s=4.0)
    running = loop.submit(Request("running", (1,), 60))
    loop.step()
    assert loop.queue_status(running) is None
    low = loop.submit(Request("low", (1,), 4, priority=Priority.LOW))
    first, second = loop.submit_all((Request("choices", (1,), 4),) * 2)
    assert [loop.queue_status(ticket) for ticket in (first, second, low)] == [
        QueueStatus(0, 4.0),
        QueueStatus(1, 8.0),
        QueueStatus(2, 12.0),
    ]
    assert [loop.estimated_wait_s(priority) for priority in Priority] == [16.0, 12.0, 4.0]
    for choices, retry_after_s in ((1, 4.0), (2, 8.0)):
        with pytest.raises(QueueFullError) as full:
            loop.submit_all((Request("more", (1,), 4),) * choices)
        assert full.value.retry_after_s == pytest.approx(retry_after_s)


@pytest.mark.parametrize(("hold_s", "retry_after_s"), [(0.001, 0.1), (1000.0, 30.0)])
def test_the_retry_hint_is_neither_at_once_nor_never(hold_s: float, retry_after_s: float):
    clock = Clock()
    loop = make(FakeExecutor(small_limits(slots=1)), Replies(), waiting=1, clock=clock)
    ended(loop, clock, hold_s)
    for name in ("running", "waiting"):
        loop.submit(Request(name, (1,), 60))
        loop.step()
    with pytest.raises(QueueFullError) as full:
        loop.submit(Request("more", (1,), 4))
    assert full.value.retry_after_s == retry_after_s

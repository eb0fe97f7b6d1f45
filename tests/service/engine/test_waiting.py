"""The waiting queue alone: order within and between classes, calls of several choices, deadlines."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.types import Priority, Request
from service.engine.waiting import MAX_PASSES, WaitingQueue

LOW, NORMAL, HIGH = Priority


def make(requests: int = 1000, tokens: int = 100_000) -> WaitingQueue:
    return WaitingQueue(requests, tokens)


def request(priority: Priority = NORMAL, deadline: float | None = None) -> Request:
    return Request("r", (1, 2), 4, priority=priority, first_token_deadline=deadline)


def fill(queue: WaitingQueue, *priorities: Priority) -> None:
    """Appends a call of one request for each priority; their tickets are 0, 1, 2, ..."""
    for ticket, priority in enumerate(priorities):
        queue.append([(ticket, request(priority))])


def serve(queue: WaitingQueue, count: int = 1000) -> list[int]:
    """Serves so many requests, or all; returns their tickets."""
    served: list[int] = []
    while len(served) < count and (chosen := queue.choose()):
        queue.take()
        served.append(chosen[0])
    return served


def test_a_higher_class_goes_first_and_within_a_class_the_first_to_come():
    queue = make()
    fill(queue, LOW, NORMAL, HIGH, LOW, NORMAL, HIGH)
    assert serve(queue) == [2, 5, 1, 4, 0, 3]
    assert (len(queue), queue.tokens) == (0, 0)


def test_after_four_of_higher_classes_a_lower_one_is_served():
    queue = make()
    fill(queue, LOW, LOW, *[NORMAL] * 10)
    assert serve(queue) == [2, 3, 4, 5, 0, 6, 7, 8, 9, 1, 10, 11]


def test_three_classes_under_a_flow_of_all():
    queue = make()
    fill(queue, *[HIGH] * 13, *[NORMAL] * 4, *[LOW] * 4)
    served = [("HNL"[(ticket > 12) + (ticket > 16)]) for ticket in serve(queue)]
    assert "".join(served) == "HHHHLNHHHLHNHHLHHNHLN"


def test_passes_are_forgotten_when_nobody_of_a_class_waits():
    queue = make()
    fill(queue, LOW, *[HIGH] * 4)
    assert serve(queue, 4) == [1, 2, 3, 4]
    assert queue.remove(0)
    queue.append([(5, request(LOW))])
    queue.append([(6, request(HIGH))])
    assert serve(queue) == [6, 5]


def test_what_was_chosen_stays_next_until_it_is_gone():
    queue = make()
    fill(queue, LOW, LOW)
    assert not queue.is_held_up
    assert queue.choose() == (0, request(LOW))
    assert queue.is_held_up
    queue.append([(2, request(HIGH))])
    assert queue.choose() == (0, request(LOW))
    assert [queue.position(ticket) for ticket in (0, 1, 2)] == [0, 2, 1]
    queue.remove(0)
    assert not queue.is_held_up
    assert serve(queue) == [2, 1]


def test_choices_of_a_call_stay_together_and_count_once():
    queue = make()
    queue.append([(0, request(LOW))])
    for first in range(1, 13, 2):
        queue.append([(first, request()), (first + 1, request())])
    assert serve(queue, 1) == [1]
    queue.append([(13, request(HIGH))])
    order = [2, 13, 3, 4, 5, 6, 0, 7, 8, 9, 10, 11, 12]
    assert [queue.position(ticket) for ticket in order] == list(range(13))
    assert serve(queue) == order


def test_bounds_are_those_of_all_classes_together():
    queue = make(requests=3, tokens=5)
    assert queue.refusal([request()] * 3) is None  # an empty queue takes any prompts
    queue.append([(0, request(LOW))])
    queue.append([(1, request(HIGH))])
    refusal = queue.refusal([request(HIGH)] * 2)
    assert refusal is not None
    assert (refusal.field, refusal.value, refusal.limit) == ("requests", 4, 3)
    refusal = queue.refusal([request(HIGH)])
    assert refusal is not None
    assert (refusal.field, refusal.value, refusal.limit) == ("tokens", 6, 5)


def test_a_deadline_takes_a_call_out_and_changes_no_order():
    queue = make()
    for ticket, deadline in enumerate((None, 30.0, 10.0, 20.0, 40.0)):
        queue.append([(ticket, request(deadline=deadline))])
    assert queue.drop_expired(9.9) == []
    assert queue.drop_expired(20.0) == [2, 3]
    assert queue.drop_expired(29.9) == []
    assert [queue.position(ticket) for ticket in range(5)] == [0, 1, None, None, 2]
    assert queue.drop_expired(30.0) == [1]
    queue.append([(5, request(deadline=35.0))])
    assert queue.drop_expired(41.0) == [4, 5]
    assert queue.drop_expired(1e9) == []
    assert serve(queue) == [0]


def test_a_call_that_has_begun_is_not_dropped():
    queue = make()
    for first in (0, 2):
        queue.append([(first + i, request(deadline=10.0)) for i in range(2)])
    assert serve(queue, 1) == [0]
    assert queue.drop_expired(11.0) == [2, 3]
    assert serve(queue) == [1]


def test_the_chosen_call_can_expire():
    queue = make()
    queue.append([(0, request(deadline=10.0))])
    queue.append([(1, request())])
    assert queue.choose() is not None
    assert queue.drop_expired(10.0) == [0]
    assert serve(queue) == [1]


@pytest.mark.parametrize("spoil", ["_tokens", "_choices"])
def test_integrity_names_both_sides(spoil: str):
    queue = make()
    fill(queue, LOW, HIGH)
    queue.check_integrity()
    setattr(queue, spoil, {"_tokens": 9, "_choices": {}}[spoil])
    with pytest.raises(RuntimeError, match=r"2 requests and 4 prompt tokens wait != "):
        queue.check_integrity()


@dataclasses.dataclass
class Call:
    """A call as the property below remembers it."""

    priority: Priority
    tickets: list[int]
    deadline: float


PRIORITY = st.sampled_from(Priority)
STEP = st.one_of(
    st.tuples(st.just("append"), PRIORITY, st.integers(1, 3)),
    st.tuples(st.just("append"), PRIORITY, st.integers(1, 3)),
    st.tuples(st.just("serve"), st.just(NORMAL), st.integers(1, 4)),
    st.tuples(st.just("choose"), st.just(NORMAL), st.just(0)),
    st.tuples(st.just("remove"), st.just(NORMAL), st.integers(0, 40)),
    st.tuples(st.just("expire"), st.just(NORMAL), st.integers(0, 40)),
)


@given(steps=st.lists(STEP, max_size=120))
@settings(max_examples=300)
def test_any_history_is_fair(steps: list[tuple[str, Priority, int]]):
    queue = make()
    calls: list[Call] = []  # that wait, in the order of arrival
    begun: Call | None = None
    passes = dict.fromkeys(Priority, 0)  # calls of higher classes that went before a class
    ticket = 0

    def check_served(served: int, chosen_before: bool) -> None:
        nonlocal begun
        call = next(call for call in calls if served in call.tickets)
        assert begun in (None, call), "another call came between the choices of one"
        assert call.tickets.pop(0) == served
        if begun is None:
            own = [other for other in calls if other.priority is call.priority]
            assert own[0] is call, "not the first of its class"
            if not chosen_before and call.priority < max(c.priority for c in calls):
                assert passes[call.priority] == MAX_PASSES, "it was not its turn"
            passes[call.priority] = 0
            for lower in {c.priority for c in calls if c.priority < call.priority}:
                passes[lower] += 1
                assert passes[lower] <= MAX_PASSES, f"{lower.name} starves"
        begun = call if call.tickets else None
        calls[:] = [call for call in calls if call.tickets]

    for kind, priority, number in steps:
        if kind == "append":
            tickets = list(range(ticket, ticket + number))
            ticket += number
            deadline = float(ticket % 40)
            position = queue.arrival_position(priority)
            queue.append([(t, request(priority, deadline)) for t in tickets])
            assert queue.position(tickets[0]) == position
            calls.append(Call(priority, tickets, deadline))
        elif kind == "choose":
            queue.choose()
        elif kind == "serve":
            order = sorted(
                (t for call in calls for t in call.tickets), key=lambda t: queue.position(t) or 0
            )
            chosen_before = queue.is_held_up
            served = serve(queue, number)
            assert served == order[: len(served)], "served in another order than was told"
            for index, one in enumerate(served):
                check_served(one, chosen_before and index == 0)
        elif kind == "expire":
            late = [c for c in calls if c.deadline <= number and c is not begun]
            assert sorted(queue.drop_expired(number)) == sorted(t for c in late for t in c.tickets)
            calls[:] = [call for call in calls if call not in late]
        else:
            waits = any(number in call.tickets for call in calls)
            assert queue.remove(number) is waits
            for call in calls:
                call.tickets[:] = [t for t in call.tickets if t != number]
            calls[:] = [call for call in calls if call.tickets]
            begun = begun if begun in calls else None
        for priority in Priority:
            if not any(call.priority is priority for call in calls):
                passes[priority] = 0
        queue.check_integrity()
        waiting = [t for call in calls for t in call.tickets]
        assert len(queue) == len(waiting)
        assert sorted(queue.position(t) for t in waiting) == list(range(len(waiting)))  # type: ignore[type-var]
    rest = sorted(waiting if steps else [], key=lambda t: queue.position(t) or 0)
    assert serve(queue) == rest

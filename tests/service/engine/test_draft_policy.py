"""The draft length follows what pays: acceptance, cost and load; it can rise again; it is calm."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeExecutor, expected_reply, small_limits
from service.engine.draft_policy import (
    FIRST_GUESS,
    FIRST_TRIAL_INTERVAL,
    TRIAL_CALLS,
    TRIAL_INTERVAL,
    DraftPolicy,
    RoundCosts,
)
from service.engine.loop import EngineLoop
from service.engine.scheduler import Scheduler
from service.engine.types import NOTHING_CONSTRAINED, FinishReason, Request, SlotRounds

U = 3
Cost = Callable[[int, int], float]


def cheap(length: int, running: int) -> float:
    return 1 + 0.1 * length


def fair(length: int, running: int) -> float:
    return 1 + 0.5 * length


def dear(length: int, running: int) -> float:
    return 1 + 1.2 * length


def loaded(length: int, running: int) -> float:
    """One row is as good as free; many are not."""
    return 1 + 0.1 * length * running


class Device:
    """Slots that accept the first `accepts[slot]` drafts of every round, in calls of two rounds."""

    def __init__(self, policy: DraftPolicy, accepts: Sequence[int], cost: Cost) -> None:
        self.policy, self.accepts, self.cost = policy, list(accepts), cost
        self.named: list[int | None] = [None] * len(accepts)
        self.history: list[list[int]] = []

    def run(self, calls: int, ceiling: int = U) -> list[list[int]]:
        """Returns the caps of each call."""
        for _ in range(calls):
            running = list(enumerate(self.named))
            caps = self.policy.caps(running, ceiling)
            for slot, cap in enumerate(caps):
                accepted = min(self.accepts[slot], cap)
                tokens = [[0] * (accepted + 1)] * 2
                rounds = SlotRounds(tokens, [cap] * 2, [accepted] * 2, FinishReason.NONE)
                self.policy.observe(slot, rounds)
            self.policy.observe_call(max(caps), len(caps), 2 * self.cost(max(caps), len(caps)))
            self.history.append(caps)
        return self.history[-calls:]


def usual(caps: list[list[int]], slot: int = 0) -> int:
    """What a slot gets in most calls."""
    lengths = [call[slot] for call in caps]
    return max(set(lengths), key=lengths.count)


@pytest.mark.parametrize(
    ("accepts", "cost", "length"),
    [
        ([3], cheap, 3),
        ([0], cheap, 0),
        ([1], cheap, 1),
        ([3], fair, 3),  # 4 / 2.5 beats 3 / 2
        ([1], fair, 1),
        ([3], dear, 0),
        ([0] * 8, cheap, 0),
        ([3] * 8, cheap, 3),
        ([2] * 2, loaded, 2),
        ([2] * 16, loaded, 0),  # 3 / 4.2 does not pay
    ],
)
def test_it_finds_the_length_of_most_tokens_per_cost(accepts, cost, length):
    device = Device(DraftPolicy(U), accepts, cost)
    device.run(300)
    caps = device.run(10 * TRIAL_INTERVAL)
    assert {usual(caps, slot) for slot in range(len(accepts))} == {length}
    # Trials are few.
    others = sum(call != [length] * len(accepts) for call in caps)
    assert others <= 10 * TRIAL_CALLS


def test_new_requests_start_with_drafts_and_later_ones_as_earlier_ones_ended():
    policy = DraftPolicy(U)
    assert policy.caps([(0, None)], U) == [U]
    for _ in range(12):
        Device(policy, [0], cheap).run(60)
        policy.forget(0)
    assert policy.caps([(99, None)], U) == [0]
    for _ in range(12):
        Device(policy, [3], cheap).run(60)
        policy.forget(0)
    assert policy.caps([(98, None)], U) == [U]


def test_it_falls_under_load_and_rises_again():
    policy = DraftPolicy(U)
    many, few = Device(policy, [2] * 16, loaded), Device(policy, [2] * 2, loaded)
    few.run(200)
    assert usual(few.run(100)) == 2
    many.run(200)
    assert usual(many.run(100)) == 0
    few.run(200)
    assert usual(few.run(100)) == 2


@pytest.mark.parametrize("cost", [cheap, fair])
def test_it_rises_again_when_drafts_are_accepted_again(cost):
    device = Device(DraftPolicy(U), [0], cost)
    device.run(300)
    assert usual(device.run(100)) == 0
    device.accepts = [3]
    risen = device.run(8 * TRIAL_INTERVAL)
    assert usual(risen[-50:]) == 3


def test_it_learns_that_no_drafts_would_be_cheaper_although_it_pays_by_the_first_guess():
    device = Device(DraftPolicy(1), [0], lambda length, running: 1 + 2 * length)
    device.accepts = [1]  # 2 tokens for 3
    assert usual(device.run(100, ceiling=1)[50:]) == 0


def test_named_caps_are_returned_unchanged_and_count():
    device = Device(DraftPolicy(U), [0, 0, 3], cheap)
    device.named = [2, 0, None]
    caps = device.run(200)
    assert all(call[:2] == [2, 0] for call in caps)
    device.named = [2, 0, 3]
    assert device.run(1) == [[2, 0, 3]]
    # Beside a request that makes the program draft, one's own drafts cost nothing more.
    beside = Device(DraftPolicy(U), [1, 1], dear)
    beside.named = [3, None]
    assert all(call[1] >= 1 for call in beside.run(200)[50:])


def test_a_slot_whose_drafts_never_survive_is_spared_in_company():
    device = Device(DraftPolicy(U), [3, 3, 3, 0], cheap)
    device.run(200)
    caps = device.run(200)
    assert [usual(caps, slot) for slot in range(4)] == [3, 3, 3, 0]
    device.accepts[3] = 3
    device.run(400)
    assert usual(device.run(100), 3) == 3


@pytest.mark.parametrize("ceiling", range(U + 1))
def test_the_ceiling_holds_in_trials_too(ceiling):
    device = Device(DraftPolicy(U), [3, 0], cheap)
    assert max(map(max, device.run(200, ceiling))) == ceiling
    device.run(5, U)
    assert max(map(max, device.run(200, ceiling))) == ceiling


def test_near_ties_do_not_make_it_restless():
    """Acceptance hovers around break-even; the length changes rarely, trials apart."""
    device = Device(DraftPolicy(1), [0], lambda length, running: 1 + 0.5 * length)
    pattern = itertools.cycle([1, 0])
    usual_lengths = []
    for _ in range(400):
        device.accepts = [next(pattern)]
        device.run(1, ceiling=1)
        usual_lengths.append(device.policy._length)
    changes = sum(a != b for a, b in itertools.pairwise(usual_lengths))
    assert changes <= 4


def test_a_round_cut_short_by_the_end_counts_nothing_against_its_drafts():
    policy = DraftPolicy(U)
    policy.caps([(0, None)], U)
    for _ in range(200):
        policy.observe(0, SlotRounds([[1], []], [3, 0], [1, 0], FinishReason.STOP))
    assert policy._slots[0].acceptance[1:] == [FIRST_GUESS] * (U - 1)


def test_costs_are_measured_or_scaled_from_the_nearest_that_is():
    costs = RoundCosts([1.0, 2.0, 4.0])
    assert [costs.of(n, 5) for n in range(3)] == [1, 2, 4]
    costs.add(1, 4, 10.0)
    assert [costs.of(n, 7) for n in range(3)] == [5, 10, 20]
    assert costs.of(1, 8) == 2
    costs.add(0, 4, 8.0)
    assert [costs.of(n, 4) for n in range(3)] == [8, 10, 20]
    costs.add(0, 4, 1e9)  # a stall
    assert costs.of(0, 4) < 10


@given(
    observations=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, U), st.integers(0, U)), max_size=60
    )
)
def test_the_same_observations_give_the_same_caps(observations):
    def caps() -> list[list[int]]:
        policy, found = DraftPolicy(U), []
        for running, ceiling, accepted in observations:
            found.append(policy.caps([(n, None) for n in range(running)], ceiling))
            assert all(0 <= cap <= ceiling for cap in found[-1])
            for slot, cap in enumerate(found[-1]):
                agreed = min(accepted, cap)
                rounds = SlotRounds([[0] * (agreed + 1)], [cap], [agreed], FinishReason.NONE)
                policy.observe(slot, rounds)
            policy.observe_call(max(found[-1]), running, 1 + accepted / 7)
        return found

    assert caps() == caps()


def test_an_executor_without_drafts():
    policy = DraftPolicy(0)
    assert policy.caps([(0, None), (1, 0)], 0) == [0, 0]
    policy.observe_call(0, 2, 1.0)


class TimedExecutor(FakeExecutor):
    """A device on whose clock a call takes what its draft length costs."""

    def __init__(self, cost: Cost, **settings) -> None:
        super().__init__(small_limits(max_context=2048, pages=1 + 2 * 512), **settings)
        self.cost, self.now = cost, 0.0

    def decode(self, page_tables, draft_length, allowed=NOTHING_CONSTRAINED, held=()):
        handle = super().decode(page_tables, draft_length, allowed, held)
        take, running = handle.take, sum(map(bool, page_tables))

        def timed():
            self.now += self.cost(draft_length, running)
            return take()

        handle.take = timed
        return handle


@pytest.mark.parametrize(
    ("accepts", "cost", "length"),
    [((2,), cheap, 2), ((0,), cheap, 0), ((1,), cheap, 1), ((1,), dear, 0)],
)
@pytest.mark.parametrize("single_program", [False, True])
def test_in_the_loop(accepts, cost, length, single_program):
    executor = TimedExecutor(cost, accepts=accepts)
    scheduler = Scheduler(
        executor.limits,
        max_waiting_requests=9,
        max_waiting_tokens=99,
        draft_policy=DraftPolicy(2),
        single_program=single_program,
    )
    tokens: list[int] = []

    def deliver(deliveries) -> None:
        for delivery in deliveries:
            tokens.extend(delivery.chunk.token_ids)

    def fail(error: BaseException) -> None:
        raise error

    loop = EngineLoop(
        executor,
        scheduler,
        admit=lambda tickets, at: None,
        expire=lambda tickets, at: None,
        deliver=deliver,
        fail=fail,
        retry_after_s=1,
        clock=lambda: executor.now,
    )
    loop.open()
    request = Request("r", (1, 2), 1500)
    loop.submit(request)
    while loop.has_work:
        loop.step()
    assert tuple(tokens) == expected_reply(request, executor.limits)[0]
    if single_program:
        assert set(executor.draft_lengths) == {2}
    else:
        lengths = executor.draft_lengths[150:]
        share = lengths.count(length) / len(lengths)
        assert share > 0.85
        assert len(set(executor.draft_lengths[: 6 * FIRST_TRIAL_INTERVAL])) == 3

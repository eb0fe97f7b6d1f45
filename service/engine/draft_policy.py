"""How many tokens to draft: pure policy, no device, no clock. Changes the speed and never a token.

A call's program has one draft length for all slots, so that is chosen for all together: the length
with the most expected tokens per cost. Tokens come from each slot's own acceptance, smoothed over the
rounds seen; costs from the durations of decode calls at about the same number of running slots. So the
length falls when acceptance is low, and under load, where drafts cost more. A slot whose drafts hardly
ever survive gets a lower cap than the others: its rows would read experts in vain.

What is not tried is not known: every now and then a few calls are made at another length, so that the
length can rise again, and learns that a shorter one has become cheaper. The same observations give the
same caps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.engine.types import FinishReason, SlotRounds

FIRST_GUESS = 0.8
"""Share of draft tokens accepted, before anything was seen: to draft is to learn."""
DRAFT_COST = 0.15
"""Cost of one more draft token per round before any was measured, in rounds without drafts."""
SLOT_WEIGHT = 0.1
"""Of one draft token verified, in the slot's estimate."""
REQUEST_WEIGHT = 0.2
"""Of one request that has ended, in the estimate that new ones start from."""
COST_WEIGHT = 0.2
"""Of one decode call, in the estimate of its cost."""
STALL = 2.0
"""A call counts at most so many times what was expected: a stall says little about its program."""
MARGIN = 1.05
"""How many times better another draft length must be to be taken."""
WORTH = 0.1
"""A draft token that survives less often is not worth verifying; to start again takes twice that."""
TRIAL_INTERVAL = 32
"""Calls from one trial of another draft length to the next."""
FIRST_TRIAL_INTERVAL = 4
"""The same while a draft length was never used at the present number of running slots."""
TRIAL_CALLS = 2
"""Length of a trial: what its first call drafts in its last round, only the second verifies."""


class RoundCosts:
    """What a round costs, by draft length and running slots. The unit does not matter."""

    def __init__(self, relative: Sequence[float]) -> None:
        """Starts from relative costs by draft length, 0 first, which stand where none is measured."""
        self._relative = tuple(relative)
        self._measured: dict[int, dict[int, float]] = {}  # by level, by draft length

    def add(self, draft_length: int, running: int, cost: float) -> None:
        """Takes in one decode call."""
        measured = self._measured.setdefault(level_of(running), {})
        known = measured.get(draft_length)
        if known is not None:
            cost = known + COST_WEIGHT * (min(cost, STALL * known) - known)
        measured[draft_length] = cost

    def of(self, draft_length: int, running: int) -> float:
        """Returns the cost: measured, or scaled from the nearest draft length measured."""
        measured = self._measured.get(level_of(running))
        if not measured:
            return self._relative[draft_length]
        nearest = min(measured, key=lambda length: (abs(length - draft_length), length))
        return measured[nearest] * self._relative[draft_length] / self._relative[nearest]


def level_of(running: int) -> int:
    """Numbers of running slots that are taken for one: 1, 2 to 3, 4 to 7, 8 to 15, ..."""
    return running.bit_length()


@dataclasses.dataclass(slots=True)
class _Slot:
    """What is known of one request's drafts."""

    acceptance: list[float]
    """By position: how often a draft is accepted when all before it are."""
    cap: int

    def tokens_per_round(self, cap: int) -> float:
        """Tokens that a round emits, as far as can be expected."""
        tokens = survives = 1.0
        for acceptance in self.acceptance[:cap]:
            survives *= acceptance
            tokens += survives
        return tokens

    def worthwhile(self, length: int) -> int:
        """How many of the draft tokens survive often enough; slow to change its mind."""
        survives = 1.0
        for position, acceptance in enumerate(self.acceptance[:length]):
            survives *= acceptance
            if survives < (WORTH if position < self.cap else 2 * WORTH):
                return position
        return length


class DraftPolicy:
    """Chooses draft caps for the requests that leave them to the server."""

    def __init__(self, draft_length: int, relative_costs: Sequence[float] = ()) -> None:
        """Starts optimistic.

        Args:
          draft_length: of the executor.
          relative_costs: of a round by draft length, 0 .. draft_length, until they are measured.
        """
        relative = relative_costs or [1 + DRAFT_COST * n for n in range(draft_length + 1)]
        self._draft_length = draft_length
        self._costs = RoundCosts(relative)
        self._usual = [FIRST_GUESS] * draft_length
        self._slots: dict[int, _Slot] = {}  # by ticket
        self._length = draft_length
        self._used: set[tuple[int, int]] = set()  # (level, draft length)
        self._calls = 0  # since the last trial
        self._trial_length = 0
        self._trial_calls = 0  # left

    def caps(self, running: Sequence[tuple[int, int | None]], ceiling: int) -> list[int]:
        """Returns the draft caps for the next decode call.

        Args:
          running: the ticket of each running slot, and the cap that its request names, if any: that
            one is returned unchanged.
          ceiling: the most that a request gets that names none.
        """
        for ticket, _ in running:
            if ticket not in self._slots:
                self._slots[ticket] = _Slot(self._usual.copy(), self._draft_length)
        named = [cap for _, cap in running if cap is not None]
        if len(named) == len(running):
            return named
        floor = max(named, default=0)
        self._length = self._best_length(running, ceiling, floor)
        free = [self._slots[ticket] for ticket, cap in running if cap is None]
        for slot in free:
            slot.cap = slot.worthwhile(self._length)
        held_back = any(slot.cap < self._length for slot in free)
        trial = self._next_trial(len(running), ceiling, floor, held_back)
        return [
            cap if cap is not None else self._slots[ticket].cap if trial is None else trial
            for ticket, cap in running
        ]

    def observe(self, ticket: int, rounds: SlotRounds) -> None:
        """Learns from what one decode call did in one slot."""
        slot = self._slots.get(ticket)
        if slot is None:
            return
        emitting = [i for i, tokens in enumerate(rounds.tokens) if tokens]
        for i in emitting:
            drafted, accepted = rounds.drafted[i], rounds.accepted[i]
            # In its last round a request may end before a draft is rejected.
            ends = rounds.finish is not FinishReason.NONE and i == emitting[-1]
            for position in range(accepted if ends else min(drafted, accepted + 1)):
                outcome = 1.0 if position < accepted else 0.0
                slot.acceptance[position] += SLOT_WEIGHT * (outcome - slot.acceptance[position])

    def observe_call(self, draft_length: int, running: int, cost: float) -> None:
        """Learns what one decode call cost: its duration, all calls having the same rounds."""
        self._costs.add(draft_length, running, cost)
        self._used.add((level_of(running), draft_length))

    def forget(self, ticket: int) -> None:
        """Forgets a request that has ended; later ones start from what was usual."""
        slot = self._slots.pop(ticket, None)
        if slot is not None:
            self._usual = [
                usual + REQUEST_WEIGHT * (acceptance - usual)
                for usual, acceptance in zip(self._usual, slot.acceptance, strict=True)
            ]

    def _best_length(
        self, running: Sequence[tuple[int, int | None]], ceiling: int, floor: int
    ) -> int:
        """The draft length of most expected tokens per cost; the present one unless clearly beaten.

        Requests that name their caps run along: `floor` is the least length of the program.
        """

        def worth(length: int) -> float:
            tokens = sum(
                self._slots[ticket].tokens_per_round(length if cap is None else cap)
                for ticket, cap in running
            )
            return tokens / self._costs.of(max(length, floor), len(running))

        present = min(self._length, ceiling)
        best = max(range(ceiling + 1), key=worth)
        return best if worth(best) > MARGIN * worth(present) else present

    def _next_trial(self, running: int, ceiling: int, floor: int, held_back: bool) -> int | None:
        """The draft length that is tried in the next call; None for what is thought best."""
        if self._trial_calls:
            self._trial_calls -= 1
            return min(self._trial_length, ceiling)
        lengths = range(min(floor, ceiling), ceiling + 1)
        level = level_of(running)
        unused = [n for n in lengths if n != self._length and (level, n) not in self._used]
        others = [n for n in lengths if n != self._length or held_back]
        self._calls += 1
        if not others or self._calls < (FIRST_TRIAL_INTERVAL if unused else TRIAL_INTERVAL):
            return None
        # In turn: the next above the length tried last, or the lowest.
        choices = unused or others
        above = [n for n in choices if n > self._trial_length]
        self._trial_length = (above or choices)[0]
        self._trial_calls = TRIAL_CALLS - 1
        self._calls = 0
        self._used.add((level, self._trial_length))
        return self._trial_length

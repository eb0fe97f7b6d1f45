"""The rows of the running batch: which request is in which slot, and how far it has come."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

from service.engine.types import (
    Limits,
    Request,
    ScoreHandle,
    SlotRounds,
    SpeculationStats,
    TokenChunk,
    TokenConstraint,
)


class SlotPhase(enum.Enum):
    """What a slot is doing, as far as the host knows."""

    FREE = "free"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclasses.dataclass(slots=True, eq=False)
class Occupant:
    """One request in one slot, from admission to its end.

    Compared by identity: a decode call is tagged with the occupants it was dispatched for, so what
    it returns cannot reach whoever holds the slot by then, not even under the same request id.
    """

    ticket: int
    """The number that the request got when it was submitted; never used twice."""
    request: Request
    page_ids: tuple[int, ...]
    """The slot's page table: reserved at admission, unchanged until the end."""
    draft_cap: int
    """What the device was last told: draft tokens per round, 0 .. draft_length."""
    prefilled: int = 0
    """Prompt tokens written to the slot's caches by the prefill calls dispatched so far."""
    running: bool = False
    """Inserted: decode calls dispatched from now on emit tokens for it."""
    emitted: int = 0
    """Tokens of the reply that have been fetched. Calls in flight may have emitted more."""
    constraint: TokenConstraint | None = None
    """What the reply is held to, made with the first masks; it knows the tokens that were fetched."""
    next_drafts: Sequence[int] = ()
    """What its next round verifies, if all calls that it took part in are recorded."""
    unrecorded: bool = False
    """For a constrained request: a call in flight has it take part, so that its next masks wait."""
    scores: list[ScoreHandle] = dataclasses.field(default_factory=list[ScoreHandle])
    """Of the prompt's chunks, if their log-probabilities are wanted and not fetched yet."""
    prompt_logprobs: tuple[float, ...] = ()
    """Fetched, and not delivered yet."""
    speculation: SpeculationStats = dataclasses.field(default_factory=SpeculationStats)

    @property
    def prefill_length(self) -> int:
        """Prompt tokens to prefill: all but the last, which is the decode program's first input."""
        return len(self.request.prompt_ids) - 1

    @property
    def position(self) -> int:
        """Known position: prompt and reply tokens that the host knows of."""
        return len(self.request.prompt_ids) + self.emitted

    @property
    def held(self) -> bool:
        """Whether it must sit the next call out."""
        return self.unrecorded and self.request.constraint is not None

    def fetch_scores(self) -> None:
        """Fetches the scores of the prompt; they are there once a decode call of the slot is."""
        self.prompt_logprobs = tuple(score for chunk in self.scores for score in chunk.fetch())
        self.scores.clear()

    def record(self, rounds: SlotRounds) -> TokenChunk:
        """Adds what one decode call did, and returns it as the chunk to deliver.

        Raises:
          ValueError: the call claims what cannot be: more tokens than the request's budget, or
            more accepted draft tokens than were verified or emitted.
        """
        token_ids: list[int] = []
        from_draft: list[bool] = []
        accepted_per_round: Counter[int] = Counter()
        verified = 0
        for tokens, drafted, accepted in zip(
            rounds.tokens, rounds.drafted, rounds.accepted, strict=True
        ):
            if not tokens:  # the slot was frozen in this round
                continue
            if not 0 <= accepted <= min(drafted, len(tokens)):
                raise ValueError(
                    f"request {self.request.request_id!r}: a round accepted {accepted} of "
                    f"{drafted} draft tokens and emitted {len(tokens)}"
                )
            token_ids += tokens
            from_draft += [True] * accepted + [False] * (len(tokens) - accepted)
            accepted_per_round[accepted] += 1
            verified += drafted
        if self.emitted + len(token_ids) > self.request.max_tokens:
            raise ValueError(
                f"request {self.request.request_id!r}: {self.emitted} + {len(token_ids)} tokens "
                f"emitted > max_tokens {self.request.max_tokens}"
            )
        self.emitted += len(token_ids)
        self.speculation = _add_rounds(self.speculation, accepted_per_round, verified)
        self.next_drafts, self.unrecorded = rounds.next_drafts, False
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, ()
        logprobs = rounds.logprobs if self.request.logprobs else ()
        top_logprobs = rounds.top_logprobs if self.request.top_logprobs else ()
        return TokenChunk(
            tuple(token_ids),
            tuple(from_draft),
            rounds.finish,
            self.speculation,
            logprobs=tuple(value for row in logprobs for value in row),
            top_logprobs=tuple(top for row in top_logprobs for top in row),
            prompt_logprobs=prompt_logprobs,
        )


def _add_rounds(
    stats: SpeculationStats, accepted_per_round: Counter[int], verified: int
) -> SpeculationStats:
    histogram = tuple(n + accepted_per_round[i] for i, n in enumerate(stats.acceptance_histogram))
    return SpeculationStats(
        rounds=stats.rounds + accepted_per_round.total(),
        drafted=stats.drafted + verified,
        accepted=stats.accepted + sum(i * n for i, n in accepted_per_round.items()),
        acceptance_histogram=histogram,
    )


class SlotTable:
    """The slots 0 .. limits.slots - 1 and their occupants."""

    def __init__(self, limits: Limits) -> None:
        """Starts with every slot free."""
        self._limits = limits
        self._occupants: list[Occupant | None] = [None] * limits.slots

    def occupant(self, slot: int) -> Occupant | None:
        """Who holds the slot; None when it is free."""
        return self._occupants[slot]

    def phase(self, slot: int) -> SlotPhase:
        """What the slot is doing."""
        occupant = self._occupants[slot]
        if occupant is None:
            return SlotPhase.FREE
        return SlotPhase.RUNNING if occupant.running else SlotPhase.PREFILLING

    def count(self, phase: SlotPhase) -> int:
        """How many slots are in a phase."""
        return sum(self.phase(slot) is phase for slot in range(self._limits.slots))

    def first_free(self) -> int | None:
        """The lowest free slot; None when all are held."""
        return next((i for i, held in enumerate(self._occupants) if held is None), None)

    def find(self, ticket: int) -> int | None:
        """The slot of a request; None when it holds none."""
        held = enumerate(self._occupants)
        return next((i for i, o in held if o is not None and o.ticket == ticket), None)

    def running(self) -> list[tuple[int, Occupant]]:
        """The running slots and their occupants, in slot order."""
        return [(i, o) for i, o in enumerate(self._occupants) if o is not None and o.running]

    def admit(
        self, slot: int, ticket: int, request: Request, page_ids: tuple[int, ...]
    ) -> Occupant:
        """Gives a free slot and its pages to a request.

        Raises:
          ValueError: the slot is held.
        """
        if self._occupants[slot] is not None:
            raise ValueError(f"slot {slot} is {self.phase(slot).value}, not free")
        none_accepted = SpeculationStats(
            acceptance_histogram=(0,) * (self._limits.draft_length + 1)
        )
        occupant = Occupant(ticket, request, page_ids, draft_cap=0, speculation=none_accepted)
        self._occupants[slot] = occupant
        return occupant

    def release(self, slot: int) -> Occupant:
        """Makes a slot free and returns who held it (the caller frees its pages).

        Raises:
          ValueError: the slot is free already.
        """
        occupant = self._occupants[slot]
        if occupant is None:
            raise ValueError(f"slot {slot} is free already")
        self._occupants[slot] = None
        return occupant

    def check_integrity(self) -> None:
        """Proves that what is written down about each occupant fits together.

        Raises:
          RuntimeError: it does not; the text names both sides.
        """
        holders: dict[int, int] = {}
        for slot, occupant in enumerate(self._occupants):
            if occupant is None:
                continue
            self._check_occupant(slot, occupant)
            for page_id in occupant.page_ids:
                other = holders.setdefault(page_id, slot)
                if other != slot:
                    raise RuntimeError(f"page {page_id} is held by slot {other} and slot {slot}")

    def _check_occupant(self, slot: int, occupant: Occupant) -> None:
        limits, stats = self._limits, occupant.speculation
        may_write = min(
            occupant.position + 2 * limits.tokens_per_call + limits.draft_length,
            limits.max_context,
        )
        covered = len(occupant.page_ids) * limits.page_size
        accepted = sum(i * n for i, n in enumerate(stats.acceptance_histogram))
        # (what must hold, the left side, the relation, the right side)
        sums = [
            (occupant.prefilled <= occupant.prefill_length,
             f"prefilled {occupant.prefilled} > {occupant.prefill_length} to prefill"),
            (not occupant.running or occupant.prefilled == occupant.prefill_length,
             f"running with prefilled {occupant.prefilled} != {occupant.prefill_length}"),
            (occupant.emitted < occupant.request.max_tokens,
             f"emitted {occupant.emitted} >= max_tokens {occupant.request.max_tokens}, still held"),
            (may_write <= covered, f"may write {may_write} positions > {covered} covered by pages"),
            (sum(stats.acceptance_histogram) == stats.rounds,
             f"histogram counts {sum(stats.acceptance_histogram)} != rounds {stats.rounds}"),
            (accepted == stats.accepted, f"histogram {accepted} != accepted {stats.accepted}"),
            # A round emits its accepted drafts and one more; only the last may stop short.
            (occupant.emitted == stats.rounds + stats.accepted,
             f"emitted {occupant.emitted} != rounds {stats.rounds} + accepted {stats.accepted}"),
        ]  # fmt: skip
        for holds, broken in sums:
            if not holds:
                raise RuntimeError(
                    f"slot {slot}, request {occupant.request.request_id!r}: {broken}"
                )

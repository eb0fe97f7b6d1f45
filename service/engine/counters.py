"""What the engine has done since it started: plain numbers that only grow, for metrics."""

from __future__ import annotations

import dataclasses

from service.engine.types import FinishReason, Request, SpeculationStats, TokenChunk


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Counts what was put into streams, and no more: an aborted request stops counting at once.

    Each choice of a call counts as a request.
    """

    draft_length: dataclasses.InitVar[int]
    prompt_tokens: int = 0
    """Of the requests whose first token has come."""
    generated_tokens: int = 0
    rounds: int = 0
    """Rounds in which a request emitted tokens, summed over requests."""
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    """Draft tokens emitted."""
    accepted_per_position: list[int] = dataclasses.field(init=False)
    """Entry i counts the rounds that accepted the i-th draft token, i in 0 .. draft_length - 1."""
    finished: dict[FinishReason, int] = dataclasses.field(
        default_factory=lambda: {reason: 0 for reason in FinishReason if reason}
    )
    """Requests that ended, by reason. A reader that stops at a stop string counts under STOP."""
    aborted: int = 0
    """Requests given up by a client, by id, or because the engine stopped."""
    expired: int = 0
    """Requests dropped from the waiting queue because their deadline had passed."""
    failed: int = 0
    """Requests lost because the executor raised."""
    dead_ends: int = 0
    """Requests that failed because their constraint let nothing follow."""
    restarts: int = 0
    """How often the engine was made anew after that."""

    def __post_init__(self, draft_length: int) -> None:
        """Makes room for each position of a draft."""
        self.accepted_per_position = [0] * draft_length

    def add(self, request: Request, before: SpeculationStats, chunk: TokenChunk) -> None:
        """Counts one chunk.

        Args:
          request: whose chunk it is.
          before: the request's cumulative figures before the chunk.
          chunk: its figures are cumulative, too.
        """
        after = chunk.speculation
        if before.rounds == 0:
            self.prompt_tokens += len(request.prompt_ids)
        self.generated_tokens += len(chunk.token_ids)
        self.rounds += after.rounds - before.rounds
        self.drafted += after.drafted - before.drafted
        self.accepted += after.accepted - before.accepted
        old = before.acceptance_histogram or (0,) * len(after.acceptance_histogram)
        reaching = (
            0  # rounds that accepted more than `position` drafts, from the last one backwards
        )
        for position in reversed(range(len(self.accepted_per_position))):
            reaching += after.acceptance_histogram[position + 1] - old[position + 1]
            self.accepted_per_position[position] += reaching
        if chunk.finish is not FinishReason.NONE:
            self.finished[chunk.finish] += 1

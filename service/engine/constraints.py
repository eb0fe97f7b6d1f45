"""Where the constraint of a reply begins: with its first token, or behind its reasoning.

What a constraint is, `types.TokenConstraint` says; `service/text/grammar.py` has the one that reads
grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.engine.errors import ConstraintError
from service.engine.slots import Occupant
from service.engine.types import (
    ConstraintFactory,
    Request,
    SlotRounds,
    TokenConstraint,
    TokenMasks,
)

Failures = Mapping[int, ConstraintError]
"""By slot, why its request has failed."""


def allowed_tokens(
    decoding: Sequence[tuple[int, Occupant]], draft_length: int, vocab_size: int
) -> tuple[Mapping[int, TokenMasks], Failures]:
    """Returns the tokens allowed in one round, by constrained slot.

    Args:
      decoding: slots that take part in the call, with all that they have emitted recorded if they
        are constrained.
      draft_length: of the call's program; drafts beyond it are dropped unverified.
      vocab_size: ids in [0, vocab_size) can be chosen.
    """
    allowed: dict[int, TokenMasks] = {}
    failures: dict[int, ConstraintError] = {}
    for slot, occupant in decoding:
        factory = occupant.request.constraint
        if factory is None:
            continue
        try:
            if occupant.constraint is None:
                occupant.constraint = begin(factory, occupant.request, vocab_size)
            allowed[slot] = occupant.constraint.masks(occupant.next_drafts[:draft_length])
        except ConstraintError as error:
            failures[slot] = error
    return allowed, failures


def accept_tokens(
    decoding: Sequence[tuple[int, Occupant]], results: Sequence[SlotRounds]
) -> Failures:
    """Tells the constraints what a decode call emitted."""
    failures: dict[int, ConstraintError] = {}
    for slot, occupant in decoding:
        if occupant.constraint is None:
            continue
        try:
            occupant.constraint.accept([t for row in results[slot].tokens for t in row])
        except ConstraintError as error:
            failures[slot] = error
    return failures


def begin(factory: ConstraintFactory, request: Request, vocab_size: int) -> TokenConstraint:
    """Returns a constraint at the beginning of the reply to a request."""
    answer = factory.matcher()
    if request.reasoning_end is None:
        return answer
    return AfterReasoning(answer, request.reasoning_end, mask_without(request.end_ids, vocab_size))


def mask_without(barred: Sequence[int], vocab_size: int) -> bytes:
    """Returns the mask of all tokens but a few (`types.TokenMasks` has the order of the bits)."""
    mask = bytearray(b"\xff" * -(-vocab_size // 8))
    for token in barred:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)


class AfterReasoning:
    """A constraint that begins behind the id that ends the reasoning.

    The reasoning itself is free, except that it must end before the reply does: a reply that ends
    inside it would have met nothing.
    """

    def __init__(self, answer: TokenConstraint, reasoning_end: int, reasoning: bytes) -> None:
        """Starts inside the reasoning.

        Args:
          answer: the constraint of what follows, at its beginning.
          reasoning_end: the id that ends the reasoning.
          reasoning: mask of what may be chosen before; holds `reasoning_end`.
        """
        self._answer = answer
        self._reasoning_end = reasoning_end
        self._reasoning = reasoning
        self._ended = False

    def masks(self, drafts: Sequence[int]) -> TokenMasks:
        """See `types.TokenConstraint.masks`."""
        if self._ended:
            return self._answer.masks(drafts)
        reasoning, answer = self._split(drafts)
        masks = [self._reasoning] * (len(reasoning) + (answer is None))
        return masks if answer is None else [*masks, *self._answer.masks(answer)]

    def accept(self, tokens: Sequence[int]) -> None:
        """See `types.TokenConstraint.accept`."""
        answer: Sequence[int] | None = tokens
        if not self._ended:
            _, answer = self._split(tokens)
            self._ended = answer is not None
        if answer is not None:
            self._answer.accept(answer)

    def _split(self, tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[int] | None]:
        """The tokens up to the end of the reasoning, and those behind it if it ends in them."""
        if self._reasoning_end not in tokens:
            return tokens, None
        behind = list(tokens).index(self._reasoning_end) + 1
        return tokens[:behind], tokens[behind:]

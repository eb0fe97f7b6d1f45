"""Constraints whose masks can be computed by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from fakes import end_of, lowest_allowed, reply_token
from service.engine.errors import ConstraintError
from service.engine.types import FinishReason, Limits, Request

Allowed = Callable[[tuple[int, ...]], Collection[int]]
"""What may follow these tokens."""


def mask_of(tokens: Collection[int], vocab_size: int = 1000) -> bytes:
    bits = sum(1 << token for token in set(tokens))
    return bits.to_bytes(-(-vocab_size // 8), "little")


@dataclasses.dataclass(eq=False)
class TokenRule:
    """Implements `ConstraintFactory`; keeps its matchers, so that tests can look at them."""

    allowed: Allowed
    matchers: list[TokenRuleMatcher] = dataclasses.field(default_factory=list)

    def matcher(self) -> TokenRuleMatcher:
        self.matchers.append(TokenRuleMatcher(self.allowed))
        return self.matchers[-1]


@dataclasses.dataclass(eq=False)
class TokenRuleMatcher:
    """Implements `TokenConstraint`."""

    allowed: Allowed
    accepted: tuple[int, ...] = ()
    drafts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """What each call of `masks` was given."""

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        self.drafts.append(tuple(drafts))
        masks: list[bytes] = []
        for count in range(len(drafts) + 1):
            if count and drafts[count - 1] not in self.allowed(
                (*self.accepted, *drafts[: count - 1])
            ):
                break
            masks.append(mask_of(self.allowed((*self.accepted, *drafts[:count]))))
        if not any(masks[0]):
            raise ConstraintError(f"nothing follows {self.accepted}")
        return masks

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.allowed(self.accepted):
                raise ConstraintError(f"{token} does not follow {self.accepted}")
            self.accepted += (token,)


def expected_constrained(
    request: Request, limits: Limits, allowed: Allowed
) -> tuple[tuple[int, ...], FinishReason]:
    """What a constrained request without reasoning gets from the fake, whatever the drafts."""
    reply: list[int] = []
    previous, finish = request.prompt_ids[-1], FinishReason.NONE
    while finish is FinishReason.NONE:
        wanted = reply_token(request, len(reply), previous, limits.vocab_size, {})
        previous = lowest_allowed(mask_of(allowed(tuple(reply))), wanted)
        reply.append(previous)
        finish = end_of(request, limits, reply)
    return tuple(reply), finish

"""Replies of the real decode program, for measuring what its drafts are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from service.engine.executor import load_executor
from service.engine.types import Request, SamplingParams

_SLOTS, _CONTEXT, _PAGE, _CHUNK = 16, 1024, 32, 128
MOST_DRAFTS = 4


@dataclasses.dataclass
class Acceptance:
    """Over whole rounds of one draft length."""

    tokens: int = 0
    rounds: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=lambda: [0] * MOST_DRAFTS)
    """Rounds that accepted draft 1, 2, ..."""

    def figures(self, draft_length: int) -> dict[str, object]:
        """Shares, rounded for a table."""
        per_draft = [round(count / self.rounds, 4) for count in self.accepted_at[:draft_length]]
        return {
            "draft_length": draft_length,
            "accepted": round(float(np.mean(per_draft)), 4),
            "per_draft": per_draft,
            "tokens_per_round": round(self.tokens / self.rounds, 3),
        }


class Decoding:
    """An executor for a checkpoint, without the engine: every slot owns its pages."""

    def __init__(self, checkpoint: Path, named_tokens: int):
        """Loads and compiles; `named_tokens` are what the tokenizer has."""
        self.executor = load_executor(
            checkpoint,
            slots=_SLOTS,
            max_context=_CONTEXT,
            page_size=_PAGE,
            pages=None,
            draft_length=MOST_DRAFTS,
            rounds_per_call=4,
            prefill_chunk=_CHUNK,
            dtype="float32",
            addressable_tokens=named_tokens,
        )
        per_slot = self.executor.limits.pages_per_slot
        self.pages = [
            list(range(1 + slot * per_slot, 1 + (slot + 1) * per_slot)) for slot in range(_SLOTS)
        ]

    def replies(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        draft_length: int,
        temperature: float = 0.0,
        end_ids: tuple[int, ...] = (),
    ) -> tuple[list[list[int]], Acceptance]:
        """Replies to prompts, as many at a time as there are slots.

        Args:
          prompts: token ids.
          tokens: of each reply, unless an end comes before.
          draft_length: of every round; rounds that a reply's end makes shorter are not counted.
          temperature: 0 is greedy; the seed is the prompt's index.
          end_ids: end a reply; empty: only its length does.

        Returns:
          (the replies with their end ids, what became of the drafts).
        """
        replies: list[list[int]] = []
        seen = Acceptance()
        for first in range(0, len(prompts), _SLOTS):
            group = prompts[first : first + _SLOTS]
            for slot, prompt in enumerate(group):
                self._insert(
                    slot,
                    Request(
                        str(first + slot),
                        tuple(prompt),
                        tokens,
                        SamplingParams(temperature=temperature, seed=first + slot),
                        end_ids=end_ids,
                    ),
                    draft_length,
                )
            replies += self._finish(len(group), draft_length, seen)
        return replies, seen

    def _insert(self, slot: int, request: Request, draft_length: int) -> None:
        prompt = request.prompt_ids
        for start in range(0, len(prompt) - 1, _CHUNK):
            end = min(start + _CHUNK, len(prompt) - 1)
            self.executor.prefill(slot, self.pages[slot], start, prompt[start:end], prompt[end])
        self.executor.insert(slot, request, draft_length)

    def _finish(self, count: int, draft_length: int, seen: Acceptance) -> list[list[int]]:
        replies: list[list[int]] = [[] for _ in range(count)]
        active = set(range(count))
        while active:
            calls = self.executor.decode(self.pages, draft_length).fetch()
            for slot in sorted(active):
                for tokens, drafted, accepted in zip(
                    calls[slot].tokens, calls[slot].drafted, calls[slot].accepted, strict=True
                ):
                    replies[slot] += tokens
                    if drafted == draft_length:
                        seen.rounds += 1
                        seen.tokens += len(tokens)
                        for place in range(accepted):
                            seen.accepted_at[place] += 1
                if calls[slot].finish:
                    active.discard(slot)
        return replies

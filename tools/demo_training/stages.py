"""The recipe: three stages, each going on from the weights of the one before."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is trained, on what, and how fast."""

    name: str
    steps: int
    peak_rate: float
    warmup_steps: int
    decay_share: float
    """Part of the steps, at their end, over which the rate falls linearly to zero."""
    shares: dict[str, float]
    """Of the streams, by which windows are drawn."""
    draft_weights: tuple[float, ...]
    """Of the loss of draft 1, 2, ... Each is fed with the head's own output, as in use, and is worth
    something only where those before it were right."""
    draft_rows: float = 0.5
    """Part of the rows that drafts are learned from: they cost as much as a third of the model."""
    distils: bool = True
    """Whether drafts learn the model's distribution and not the text: a draft is accepted when it
    is what the model says, whatever the text says."""
    drafts_only: bool = False
    """Whether nothing but the draft head changes."""
    short: tuple[int, int] = (8, 256)
    """Rows and tokens of most batches."""
    long: tuple[int, int] = (2, 1024)
    """Rows and tokens at the end: short windows are cheaper, long ones teach attention the positions
    that a short window never has."""
    long_share: float = 0.1
    first_batch: int = 0
    """Number of the first batch: a stage counts on from one with the same shares, so as not to draw
    the same windows again."""

    def shape(self, step: int) -> tuple[int, int]:
        """Rows and tokens of the batch at a step."""
        return self.short if step < round(self.steps * (1 - self.long_share)) else self.long

    @property
    def decay_start(self) -> int:
        """The step at which the learning rate begins to fall."""
        return self.steps - round(self.decay_share * self.steps)


STAGES = (
    # Library code sets the tone, and tests add variety.
    Stage(
        "text",
        steps=2500,
        peak_rate=2e-3,
        warmup_steps=200,
        decay_share=0.3,
        shares={"library": 0.70, "tests": 0.18, "chat": 0.12},
        draft_weights=(0.3, 0.1),
        distils=False,
    ),
    Stage(
        "chat",
        steps=580,
        peak_rate=1e-3,
        warmup_steps=40,
        decay_share=0.7,
        shares={"library": 0.45, "packages": 0.22, "tests": 0.08, "chat": 0.25},
        draft_weights=(0.4, 0.2, 0.1),
        short=(4, 512),
    ),
    Stage(
        "drafts",
        steps=170,
        peak_rate=1e-3,
        warmup_steps=20,
        decay_share=0.8,
        shares={"library": 0.45, "packages": 0.22, "tests": 0.08, "chat": 0.25},
        draft_weights=(1.0, 0.7, 0.5),
        draft_rows=1.0,
        drafts_only=True,
        short=(4, 512),
        first_batch=580,
    ),
)

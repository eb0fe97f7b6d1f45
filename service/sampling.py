"""The sampling fields of a request: their ranges, their defaults, the seeds of choices.

Pure functions (but for the seed that a client leaves open).
"""

import dataclasses
import secrets
from collections.abc import Iterator

from service.engine.types import Limits, SamplingParams
from service.errors import Violation
from service.model_card import GenerationDefaults
from service.pb import inference_pb2

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""
MAX_LOGIT_BIAS = 100.0
SEED_STEP = 0x9E3779B9
UINT32 = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`; NaN, for which every comparison is false, is none of them."""

    low: float
    high: float
    low_is_in: bool = True
    high_is_in: bool = True

    def __contains__(self, value: float) -> bool:
        above = self.low <= value if self.low_is_in else self.low < value
        return above and (value <= self.high if self.high_is_in else value < self.high)

    def __str__(self) -> str:
        opening, closing = "[" if self.low_is_in else "(", "]" if self.high_is_in else ")"
        return f"in {opening}{self.low:g}, {self.high:g}{closing}"


INTERVALS = {
    "temperature": Interval(0, 2),
    "top_p": Interval(0, 1, low_is_in=False),
    "min_p": Interval(0, 1, high_is_in=False),
    "repetition_penalty": Interval(0, 10, low_is_in=False),
    "frequency_penalty": Interval(-2, 2),
    "presence_penalty": Interval(-2, 2),
}
BIAS_INTERVAL = Interval(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def check_sampling(sampling: inference_pb2.Sampling, limits: Limits) -> Iterator[Violation]:
    """Checks the ranges of all fields."""
    for field, interval in INTERVALS.items():
        value = getattr(sampling, field)
        if sampling.HasField(field) and value not in interval:
            yield Violation(f"sampling.{field}", f"{value:g}", f"{interval}")
    if len(sampling.logit_bias) > limits.max_logit_bias:
        yield Violation(
            "sampling.logit_bias",
            f"{len(sampling.logit_bias)} ids",
            f"at most {limits.max_logit_bias}",
        )
        return
    for token_id, bias in sorted(sampling.logit_bias.items()):
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= limits.vocab_size:
            yield Violation(field, f"for id {token_id}", f"for an id in [0, {limits.vocab_size})")
        if bias not in BIAS_INTERVAL:
            yield Violation(field, f"{bias:g}", f"{BIAS_INTERVAL}")


def sampling_params(
    sampling: inference_pb2.Sampling, defaults: GenerationDefaults, vocab_size: int
) -> SamplingParams:
    """Fills unset fields: from the checkpoint's defaults, and a random seed."""

    def given(field: str) -> float:
        return getattr(sampling if sampling.HasField(field) else defaults, field)

    temperature = given("temperature")
    top_k = sampling.top_k if sampling.HasField("top_k") else defaults.top_k
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=given("top_p"),
        min_p=given("min_p"),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(32),
        repetition_penalty=given("repetition_penalty"),
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
    )


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of a choice by the rule of `GenerateRequest.choices`.

    The mix is MurmurHash3's finalizer (Appleby): a bijection, so that choices 1, 2, ... never share
    a seed.
    """
    if index == 0:
        return seed
    mixed = (seed + index * SEED_STEP) & UINT32
    mixed ^= mixed >> 16
    mixed = mixed * 0x85EBCA6B & UINT32
    mixed ^= mixed >> 13
    mixed = mixed * 0xC2B2AE35 & UINT32
    return mixed ^ mixed >> 16

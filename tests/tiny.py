"""Tiny models with every part of the architecture, and a driver that runs the real programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from model.config import ModelConfig
from model.state import DecodeShape
from model.transformer import Transformer
from service.engine.executor import JaxExecutor
from service.engine.types import Request, SlotRounds

HF_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "initializer_range": 0.2,
}


def config(**overrides: object) -> ModelConfig:
    """The tiny configuration, with hub fields replaced."""
    return ModelConfig.from_hf({**HF_CONFIG, **overrides})


def model(config_: ModelConfig | None = None, seed: int = 0) -> Transformer:
    """Random weights, float32; norm offsets are not zero, so that a wrong shift would show."""
    built = Transformer(config_ or config(), rngs=nnx.Rngs(seed))
    leaves, treedef = jax.tree.flatten(built)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape) if leaf.ndim == 1 else leaf
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


SHAPE = DecodeShape(
    slots=4,
    draft_length=3,
    rounds=2,
    max_context=256,
    pages=1 + 4 * 16,
    page_size=16,
    max_stop_ids=4,
    addressable_tokens=96,
)


def executor(model_: Transformer, *, prefill_chunk: int = 64, **shape: int) -> JaxExecutor:
    """An executor over SHAPE with fields replaced."""
    built = dataclasses.replace(SHAPE, **shape)
    return JaxExecutor(model_, built, prefill_chunk=prefill_chunk)


@dataclasses.dataclass
class Driver:
    """Runs requests on an executor without the engine: every slot owns a fixed run of pages."""

    executor: JaxExecutor

    def __post_init__(self) -> None:
        limits = self.executor.limits
        per_slot = limits.pages_per_slot
        self.pages = [
            list(range(1 + slot * per_slot, 1 + (slot + 1) * per_slot))
            for slot in range(limits.slots)
        ]
        self.replies: dict[int, list[int]] = {}
        self.rounds: dict[int, list[SlotRounds]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.active: set[int] = set()

    def prefill(self, slot: int, request: Request, decode_between: bool = False) -> None:
        """Prefills all chunks of a prompt; optionally runs a decode call after each."""
        chunk = self.executor.limits.prefill_chunk
        prompt = request.prompt_ids
        for start in range(0, len(prompt) - 1, chunk):
            end = min(start + chunk, len(prompt) - 1)
            self.executor.prefill(slot, self.pages[slot], start, prompt[start:end], prompt[end])
            if decode_between:
                self.step()

    def start(self, slot: int, request: Request, draft_cap: int, **kwargs: bool) -> None:
        """Prefills and inserts."""
        self.prefill(slot, request, **kwargs)
        self.executor.insert(slot, request, draft_cap)
        self.replies[slot], self.rounds[slot], self.logprobs[slot] = [], [], []
        self.active.add(slot)

    def step(self, draft_length: int | None = None, **inputs: Any) -> None:
        """One decode call; the draft length is the executor's if not given."""
        if draft_length is None:
            draft_length = self.executor.limits.draft_length
        for slot, rounds in enumerate(
            self.executor.decode(self.pages, draft_length, **inputs).fetch()
        ):
            if slot in self.active:
                self.rounds[slot].append(rounds)
                self.replies[slot] += [token for row in rounds.tokens for token in row]
                self.logprobs[slot] += [value for row in rounds.logprobs for value in row]
                if rounds.finish:
                    self.active.discard(slot)

    def finish(self) -> dict[int, list[int]]:
        """Decodes until no slot is active; returns the reply of each slot."""
        while self.active:
            self.step()
        return self.replies

    def run(self, request: Request, draft_cap: int, slot: int = 0) -> list[int]:
        """One request alone."""
        self.start(slot, request, draft_cap)
        return self.finish()[slot]

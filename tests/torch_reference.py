"""The reference: `Qwen3_5MoeForCausalLM` and `MtpLayer` of transformers, on our named weights.

Imports torch and transformers (extra `parity`): import it after `pytest.importorskip`.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hub
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from reference_weights import Recipe

# Matrices this small are slower on many threads, most of all beside other tests.
torch.set_num_threads(1)

_MTP_NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "post_norm": "norm",
    "mtp_block": "layers.0",
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """Both modules, float32, and what the tests ask of them, as NumPy arrays."""

    model: hub.Qwen3_5MoeForCausalLM
    mtp: MtpLayer

    @torch.no_grad()
    def logits(self, tokens_BT: np.ndarray, lengths_B: Sequence[int] | None = None) -> np.ndarray:
        """One pass over whole sequences, padded on the right beyond `lengths_B`."""
        mask = None
        if lengths_B is not None:
            mask = torch.tensor(np.arange(tokens_BT.shape[1]) < np.asarray(lengths_B)[:, None])
            mask = mask.long()
        out = self.model(_ids(tokens_BT), attention_mask=mask, use_cache=False)
        return out.logits.numpy()

    @torch.no_grad()
    def layers(self, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
        """What `model_passes.layers` returns, by forward hooks."""
        seen: dict[str, np.ndarray] = {}
        handles = []

        def record(module: Any, pick: Callable, name: str) -> None:
            def hook(_: object, args: tuple, output: object) -> None:
                # A copy: the next layers may write in place.
                seen[name] = pick(args, output).clone().numpy().reshape(*tokens_BT.shape, -1)

            handles.append(module.register_forward_hook(hook))

        layer: Any
        for index, layer in enumerate(self.model.model.layers):
            attention = layer.block_type == "full_attention"
            mixer = layer.self_attn if attention else layer.linear_attn
            record(layer.input_layernorm, lambda args, _: args[0], f"{index}.input")
            record(
                mixer,
                (lambda _, output: output[0]) if attention else (lambda _, output: output),
                f"{index}.mixer",
            )
            record(layer.mlp.gate, lambda _, output: output[2], f"{index}.experts")
            record(layer.mlp, lambda _, output: output, f"{index}.mlp")
            record(layer, lambda _, output: output, f"{index}.output")
        record(self.model.model.norm, lambda _, output: output, "hidden")
        try:
            self.model(_ids(tokens_BT), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    @torch.no_grad()
    def step_by_step(self, prompt: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Logits [len(prompt) + len(following), V] with the module's own cache, one token a call."""
        out = self.model(_ids(prompt[None]), use_cache=True)
        rows = [out.logits[0]]
        for token in following:
            out = self.model(_ids(np.asarray([[token]])), cache=out.cache, use_cache=True)
            rows.append(out.logits[0])
        return torch.cat(rows).numpy()

    @torch.no_grad()
    def greedy(self, prompt: np.ndarray, count: int) -> tuple[list[int], float]:
        """Greedy continuation with the module's own cache; and its least lead of first over second."""
        out = self.model(_ids(prompt[None]), use_cache=True)
        reply, lead = [], float("inf")
        for _ in range(count):
            first, second = torch.topk(out.logits[0, -1], 2).values.tolist()
            lead = min(lead, first - second)
            reply.append(int(out.logits[0, -1].argmax()))
            out = self.model(_ids(np.asarray([reply[-1:]])), cache=out.cache, use_cache=True)
        return reply, lead

    @torch.no_grad()
    def draft(
        self, hidden_BTD: np.ndarray, next_tokens_BT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whole-sequence pass of the MTP head: (hidden states after its norm, logits)."""
        tokens = next_tokens_BT.shape[1]
        positions = torch.arange(tokens)[None]
        embedded = self.model.model.embed_tokens(_ids(next_tokens_BT))
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
        hidden = self.mtp(
            embedded,
            torch.tensor(hidden_BTD),
            position_embeddings=self.model.model.rotary_emb(embedded, positions),
            attention_mask=mask.to(embedded.dtype),
            position_ids=positions,
            cache=None,
        )
        return hidden.numpy(), self.model.lm_head(hidden).numpy()


def build(recipe: Recipe) -> Reference:
    """Builds both modules and fills them with the recipe's weights."""
    config = Qwen3_5MoeTextConfig(**recipe.hf_config)
    # The plain loops and products, not fused forms.
    config._attn_implementation = config._experts_implementation = "eager"
    model = hub.Qwen3_5MoeForCausalLM(config).float().eval()
    attention_index = recipe.config.layer_types.index("full_attention")
    mtp = MtpLayer(config, hub.Qwen3_5MoeDecoderLayer, hub.Qwen3_5MoeRMSNorm, attention_index)
    _fill(model, lambda name: name.removeprefix("model."), recipe)
    _fill(mtp, _mtp_name, recipe)
    return Reference(model, mtp.float().eval())


def rotary(hf_config: dict[str, Any], positions_3BT: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cosines and sines [B, T, Q] of positions on three axes."""
    module = hub.Qwen3_5MoeTextRotaryEmbedding(Qwen3_5MoeTextConfig(**hf_config))
    both = module(torch.zeros(1), torch.tensor(positions_3BT, dtype=torch.long))
    # The module repeats each angle for the second half of the rotating dimensions.
    return tuple(array[..., : array.shape[-1] // 2].numpy() for array in both)


def _mtp_name(name: str) -> str:
    head, _, rest = name.partition(".")
    return f"mtp.{_MTP_NAMES[head]}.{rest}"


def _fill(module: torch.nn.Module, named: Callable[[str], str], recipe: Recipe) -> None:
    """Every parameter must have a name that our model knows, with the same shape."""
    state = {
        name: torch.tensor(recipe.tensor(named(name)))
        for name in module.state_dict()
        # A tied output head is the embedding under a second name.
        if named(name) in recipe.shapes or not recipe.config.tie_word_embeddings
    }
    module.load_state_dict(state, strict=not recipe.config.tie_word_embeddings)


def _ids(tokens: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.asarray(tokens), dtype=torch.long)

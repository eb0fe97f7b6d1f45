"""The files of a hub-format directory around the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tokenizers import Tokenizer

from demo_training.tokenizer import CONTROL_TOKENS, END_OF_TEXT, END_OF_TURN, MARKUP_TOKENS
from model import checkpoint
from model.transformer import Transformer

LONGEST_CONTEXT = 4096
# Padding rows of the head that name no token: served checkpoints have them (Qwen3.6: 243), and
# whoever serves them has to mask them.
UNNAMED_TOKENS = 6

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of the demo, in the form of Qwen3.6's without its vision part.

    Two wide DeltaNet key heads rather than four narrow ones: half the matrix products, twice the
    state.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": end,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": LONGEST_CONTEXT,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 64,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.005,
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size() + UNNAMED_TOKENS,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def export(
    directory: Path, config: dict[str, Any], model: Transformer, tokenizer: Tokenizer
) -> None:
    """Writes the directory beside its place and swaps it in, so that a reader never sees half.

    Args:
      directory: replaced if it exists.
      config: from `model_config`.
      model: the parameters; stored in bfloat16.
      tokenizer: the demo's.
    """
    fresh = directory.with_name(directory.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    checkpoint.save(fresh, config, model, jnp.bfloat16)
    for path in fresh.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only; the directory is to be shipped
    tokenizer.save(str(fresh / "tokenizer.json"))
    shutil.copyfile(CHAT_TEMPLATE, fresh / CHAT_TEMPLATE.name)
    end, end_of_turn = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, END_OF_TURN))
    generation = {
        "bos_token_id": end,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end],
        "pad_token_id": end,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
    }
    _write_json(fresh / "generation_config.json", generation)
    _write_json(fresh / "tokenizer_config.json", _tokenizer_config(tokenizer))
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in CONTROL_TOKENS,
        }
        for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "errors": "replace",
        "model_max_length": LONGEST_CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

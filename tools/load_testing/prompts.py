"""The prompts of a load test: Python sources, short and long, cut to what the context holds."""

from __future__ import annotations

from typing import Any

import grpc
from sample_prompts import held_out_functions

from load_testing.workload import Prompt
from service.pb import model_pb2, tokenizer_pb2, tokenizer_pb2_grpc

SHORT_TOKENS = 48
LONG_SHARE = 0.4
"""Share of the context that a long prompt takes at most; the reply needs room, too."""


async def make_prompts(
    channel: grpc.aio.Channel, model: model_pb2.Model, count: int, max_tokens: int
) -> list[Prompt]:
    """Tokenises prompts with the server's own tokenizer; every third has `max_tokens` tokens."""
    tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    functions = held_out_functions(count)
    long_tokens = max(1, min(max_tokens, int(LONG_SHARE * model.context_length)))
    prompts = []
    for index, function in enumerate(functions):
        most = min(SHORT_TOKENS, long_tokens) if index % 3 else long_tokens
        text = function if index % 3 else "\n".join(functions[index:] + functions[:index])
        # No token stands for more than so many bytes, or the text is cut for nothing.
        tokens = await tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text[: 8 * most]))
        token_ids = tokens.token_ids[:most]
        spelled = await tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=token_ids))
        prompts.append(Prompt(spelled.text, tuple(token_ids)))
    return prompts

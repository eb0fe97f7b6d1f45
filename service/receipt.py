"""The digest of a receipt: a pure function that servers, clients and tools share.

What goes into it, and how, is written at `Receipt.algorithm` in `proto/tandem/v1/inference.proto`.
"""

import hashlib
import struct
from collections.abc import Sequence

from service.constraint import digest_part
from service.pb import inference_pb2

ALGORITHM = "tandem-receipt-2"


def receipt_digest(
    fingerprint: str,
    prompt_ids: Sequence[int],
    sampling: inference_pb2.Sampling,
    stopping: inference_pb2.Stopping,
    constraint: inference_pb2.Constraint,
    reply_ids: Sequence[int],
) -> str:
    """Returns the digest as 64 hex digits.

    Args:
      fingerprint: of the checkpoint (`Started.fingerprint`), in hex.
      prompt_ids: the rendered prompt.
      sampling: what was in force (`Receipt.sampling`).
      stopping: what was in force (`Receipt.stopping`).
      constraint: what the reply was held to (`Receipt.constraint`); empty: nothing.
      reply_ids: all of `Delta.token_ids` of the choice.
    """
    remaining = (
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    bias = sorted(sampling.logit_bias.items())
    strings = sorted(string.encode() for string in stopping.stop_strings)
    parts = [
        ALGORITHM.encode(),
        bytes.fromhex(fingerprint),
        ids(prompt_ids),
        struct.pack(">fI", unsigned_zero(sampling.temperature), sampling.top_k),
        struct.pack(">5f", *map(unsigned_zero, remaining)),
        struct.pack(">I", sampling.seed),
        struct.pack(">I", len(bias)),
        *(struct.pack(">If", token_id, unsigned_zero(value)) for token_id, value in bias),
        struct.pack(">III", stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos),
        struct.pack(">I", stopping.HasField("max_reasoning_tokens")),
        struct.pack(">I", stopping.max_reasoning_tokens),
        ids(sorted(stopping.stop_token_ids)),
        struct.pack(">I", len(strings)),
        *(struct.pack(">I", len(string)) + string for string in strings),
        digest_part(constraint),
        ids(reply_ids),
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def ids(token_ids: Sequence[int]) -> bytes:
    """Encodes a list of ids: its length, then each."""
    return struct.pack(f">{len(token_ids) + 1}I", len(token_ids), *token_ids)


def unsigned_zero(value: float) -> float:
    """Returns 0 for -0, and any other value as it is."""
    return value + 0.0

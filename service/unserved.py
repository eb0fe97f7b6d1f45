"""What the contract already has and this version does not serve: refused, never ignored."""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from service.errors import ServiceError

UNSERVED: Sequence[str] = (
    "chat",
    "constraint",
    "stopping.include_stop_string",
    "stopping.max_reasoning_tokens",
    "include.token_bytes",
    "include.top_logprobs",
    "include.prompt_logprobs",
)
"""Paths of fields that a request must not set."""


def refuse_unserved(message: Message) -> None:
    """Refuses a request that sets a field which is not served.

    Raises:
      ServiceError: UNIMPLEMENTED, naming the first such field.
    """
    for path in UNSERVED:
        if is_set(message, path):
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "OPTION_NOT_SERVED",
                f"{path} is set, must be unset: this version does not serve it",
                metadata={"field": path},
            )


def is_set(message: Any, path: str) -> bool:
    """Whether a message has a field, by its path; messages without it may lack the field."""
    for part in path.split("."):
        if part not in message.DESCRIPTOR.fields_by_name or not message.HasField(part):
            return False
        message = getattr(message, part)
    return True

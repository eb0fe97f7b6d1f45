"""Chats in the words of their JSON form, with the demo's tokenizer and template."""

from pathlib import Path
from typing import Any

from google.protobuf import json_format

from fakes import small_limits
from service.pb import inference_pb2
from service.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[1] / "model" / "demo"
LIMITS = small_limits(
    slots=2, vocab_size=4090, max_context=2048, page_size=16, pages=1 + 2 * 128, max_stop_ids=6
)
TOKENIZER = Tokenizer.from_directory(DEMO)
END = TOKENIZER.added_tokens["<|im_end|>"]
END_THINK = TOKENIZER.added_tokens["</think>"]


def user(text: str) -> dict[str, Any]:
    return {"role": "ROLE_USER", "text": text}


def assistant(text: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "ROLE_ASSISTANT", "text": text, **fields}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [*messages] or [user("hi")], **fields}


def ask(chat_: dict[str, Any], request_id: str = "r", **fields: Any):
    fields = {"chat": chat_, "requestId": request_id, **fields}
    return json_format.ParseDict(fields, inference_pb2.GenerateRequest())


def written(text: str) -> list[int]:
    """The tokens of a reply that the model ends itself."""
    return [*TOKENIZER.encode(text), END]

"""Requests that must be refused, each with the field that the refusal must name."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf import duration_pb2

from service.pb import inference_pb2, model_pb2

Spoil = Callable[[inference_pb2.GenerateRequest, model_pb2.Model], None]


def _no_prompt(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.ClearField("prompt")


def _foreign_token(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.tokens.ids[:] = [0, model.vocab_size]


def _whole_context(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.tokens.ids[:] = [1] * model.context_length


def _hot(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.sampling.temperature = 2.5


def _no_share(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.sampling.top_p = 0


def _no_tokens(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.stopping.max_tokens = 0


def _empty_stop(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.stopping.stop_strings[:] = ["fine", ""]


def _no_choice(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.choices = 0


def _spaced_id(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.request_id = "two words"


def _no_window(request: inference_pb2.GenerateRequest, model: model_pb2.Model) -> None:
    request.resume_window.CopyFrom(duration_pb2.Duration())


BAD_REQUESTS: tuple[tuple[str, Spoil], ...] = (
    ("prompt", _no_prompt),
    ("tokens.ids[1]", _foreign_token),
    ("tokens.ids", _whole_context),
    ("sampling.temperature", _hot),
    ("sampling.top_p", _no_share),
    ("stopping.max_tokens", _no_tokens),
    ("stopping.stop_strings[1]", _empty_stop),
    ("choices", _no_choice),
    ("request_id", _spaced_id),
    ("resume_window", _no_window),
)
"""Field that must be named, and what makes a good request bad there."""

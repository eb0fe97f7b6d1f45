"""Limits: legal values mean what the contract says, others name field, value and limit."""

import dataclasses
import math
from typing import Any

import pytest
from google.protobuf import json_format

from fakes import small_limits
from service.engine.types import SamplingParams
from service.errors import MAX_VIOLATIONS, ServiceError
from service.model_card import GenerationDefaults, ModelCard, generation_defaults
from service.pb import inference_pb2
from service.validation import accept, request_id_of

LIMITS = small_limits(vocab_size=1000, max_context=64, max_stop_ids=4, draft_length=2)
CARD = ModelCard("tiny", "f" * 64, (7, 9), GenerationDefaults(0.5, 20, 0.75))


def message(**fields) -> inference_pb2.GenerateRequest:
    return json_format.ParseDict(
        {"tokens": {"ids": [1, 2, 3]}} | fields, inference_pb2.GenerateRequest()
    )


def accepted(text_ids=None, **fields):
    return accept(message(**fields), "id", text_ids, LIMITS, CARD)


def violations(text_ids=None, request=None, **fields) -> dict[str, str]:
    with pytest.raises(ServiceError) as failure:
        accept(request or message(**fields), "id", text_ids, LIMITS, CARD)
    assert failure.value.code.name == "INVALID_ARGUMENT"
    bad_request: Any = failure.value.details[1]
    return {item.field: item.description for item in bad_request.field_violations}


def test_unset_fields_take_the_defaults():
    request = accepted().request
    assert request.prompt_ids == (1, 2, 3)
    assert request.max_tokens == 64
    assert dataclasses.replace(request.sampling, seed=0) == SamplingParams(0.5, 20, 0.75, 0)
    assert (request.end_ids, request.stop_ids) == ((7, 9), ())
    assert request.max_draft_tokens is None


def test_include_defaults_to_text_alone():
    result = accepted()
    assert (result.include_text, result.include_token_ids, result.include_drafted) == (
        True,
        False,
        False,
    )
    result = accepted(include={"text": False, "tokenIds": True, "drafted": True})
    assert (result.include_text, result.include_token_ids, result.include_drafted) == (
        False,
        True,
        True,
    )


def test_an_unset_seed_is_random_and_a_set_one_is_kept():
    assert len({accepted().request.sampling.seed for _ in range(8)}) > 1
    for seed in (0, 2**32 - 1):
        assert accepted(sampling={"seed": seed}).request.sampling.seed == seed


@pytest.mark.parametrize(
    ("field", "value", "meaning"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 9e-6, 0.0),
        ("temperature", 2, 2.0),
        ("top_p", 1, 1.0),
        ("top_k", 0, 0),
        ("top_k", 1, 1),
        ("top_k", 999, 999),
        ("top_k", 1000, 0),
        ("top_k", 10**9, 0),
    ],
)
def test_legal_sampling(field, value, meaning):
    sampling = accepted(sampling={field: value}).request.sampling
    assert getattr(sampling, field) == meaning


@pytest.mark.parametrize(
    ("field", "value", "description"),
    [
        ("temperature", -1, "is -1, must be in [0, 2]"),
        ("temperature", 2.5, "is 2.5, must be in [0, 2]"),
        ("temperature", math.nan, "is nan, must be in [0, 2]"),
        ("temperature", math.inf, "is inf, must be in [0, 2]"),
        ("top_p", 0, "is 0, must be in (0, 1]"),
        ("top_p", -0.5, "is -0.5, must be in (0, 1]"),
        ("top_p", 1.5, "is 1.5, must be in (0, 1]"),
        ("top_p", math.nan, "is nan, must be in (0, 1]"),
    ],
)
def test_illegal_sampling(field, value, description):
    request = message()
    setattr(request.sampling, field, value)
    assert violations(request=request) == {f"sampling.{field}": description}


def test_the_token_budget():
    assert accepted(stopping={"maxTokens": 1}).request.max_tokens == 1
    assert accepted(stopping={"maxTokens": 2**32 - 1}).request.max_tokens == 64
    assert violations(stopping={"maxTokens": 0}) == {
        "stopping.max_tokens": "is 0, must be at least 1"
    }


@pytest.mark.parametrize(
    ("fields", "text_ids", "field", "description"),
    [
        ({"tokens": {"ids": []}}, None, "tokens.ids", "is 0 tokens, must be at least 1 token"),
        ({"text": ""}, (), "text", "is 0 tokens, must be at least 1 token"),
        (
            {"text": "x"},
            (1,) * 64,
            "text",
            "is 64 tokens, must be at most 63 tokens (context less one)",
        ),
        ({"text": "x" * 2049}, None, "text", "is 2049 bytes, must be at most 2048 bytes"),
        ({"text": "é" * 1025}, None, "text", "is 2050 bytes, must be at most 2048 bytes"),
        ({"tokens": {"ids": [1, 1000]}}, None, "tokens.ids[1]", "is 1000, must be in [0, 1000)"),
        ({"tokens": {"ids": [2**31]}}, None, "tokens.ids[0]", f"is {2**31}, must be in [0, 1000)"),
    ],
)
def test_illegal_prompts(fields, text_ids, field, description):
    request = json_format.ParseDict(fields, inference_pb2.GenerateRequest())
    assert violations(request=request, text_ids=text_ids) == {field: description}


def test_a_prompt_must_be_set():
    request = inference_pb2.GenerateRequest()
    assert violations(request=request) == {"prompt": "is not set, must be one of text, tokens"}


def test_prompts_up_to_the_limit():
    assert accepted(tokens={"ids": [999]}).request.prompt_ids == (999,)
    assert len(accepted(tokens={"ids": [1] * 63}).request.prompt_ids) == 63


def test_stop_ids():
    stopping = {"stopTokenIds": [5, 5, 6]}
    assert accepted(stopping=stopping).request.stop_ids == (5, 6)
    assert violations(stopping={"stopTokenIds": [0, 1000]}) == {
        "stopping.stop_token_ids[1]": "is 1000, must be in [0, 1000)"
    }
    assert violations(stopping={"stopTokenIds": [1, 2, 3]}) == {
        "stopping.stop_token_ids": "is 3 different ids, must be at most 2"
    }
    without_end = accepted(stopping={"stopTokenIds": [1, 2, 3, 4], "ignoreEos": True}).request
    assert (without_end.end_ids, without_end.stop_ids) == ((), (1, 2, 3, 4))


def test_stop_strings():
    strings = ["é" * 128, *(f"{n}" for n in range(15))]
    assert accepted(stopping={"stopStrings": strings}).stop_strings == tuple(strings)
    assert violations(stopping={"stopStrings": ["a", "", "é" * 129]}) == {
        "stopping.stop_strings[1]": "is 0 bytes, must be 1 to 256 bytes",
        "stopping.stop_strings[2]": "is 258 bytes, must be 1 to 256 bytes",
    }
    assert violations(stopping={"stopStrings": ["a"] * 17}) == {
        "stopping.stop_strings": "is 17 strings, must be at most 16"
    }


@pytest.mark.parametrize(("asked", "cap"), [(0, 0), (1, 1), (2, 2), (3, 2), (2**32 - 1, 2)])
def test_the_draft_cap(asked, cap):
    assert accepted(speculation={"maxDraftTokens": asked}).request.max_draft_tokens == cap


def test_request_ids():
    assert request_id_of(message(requestId="mine")) == "mine"
    assert request_id_of(message()) != request_id_of(message())
    limit = "at most 128 printable ASCII characters without spaces"
    assert violations(requestId="x" * 129) == {"request_id": f"is 129 characters, must be {limit}"}
    assert violations(requestId="a\nb") == {"request_id": f"is 'a\\nb', must be {limit}"}
    assert violations(requestId="é") == {"request_id": f"is '\\xe9', must be {limit}"}


def test_all_violations_are_told_together():
    found = violations(
        tokens={"ids": [1, 5000]},
        sampling={"temperature": 3, "topP": 2},
        stopping={"maxTokens": 0, "stopStrings": [""]},
        requestId=" ",
    )
    assert list(found) == [
        "request_id",
        "tokens.ids[1]",
        "sampling.temperature",
        "sampling.top_p",
        "stopping.max_tokens",
        "stopping.stop_strings[0]",
    ]


def test_a_status_stays_small_whatever_is_wrong():
    request = message(
        tokens={"ids": [4_000_000_000] * 50_000}, stopping={"stopStrings": [""] * 999}
    )
    with pytest.raises(ServiceError) as failure:
        accept(request, "id", None, LIMITS, CARD)
    status = failure.value.status()
    bad_request: Any = failure.value.details[1]
    assert len(bad_request.field_violations) == MAX_VIOLATIONS
    assert status.message.endswith("; and more")
    assert status.ByteSize() < 4096


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, GenerationDefaults(1.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20}, GenerationDefaults(0.7, 20, 1.0)),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, GenerationDefaults(0.0, 0, 0.9)),
    ],
)
def test_defaults_of_a_checkpoint(generation, defaults):
    assert generation_defaults(generation) == defaults


def test_the_model_card(card, checkpoint, tmp_path):
    assert card.name == checkpoint.name
    assert card.end_ids == (0,)
    assert card.defaults == GenerationDefaults(0.5, 20, 0.75)
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert ModelCard.from_directory(tmp_path).fingerprint == card.fingerprint
    (tmp_path / "generation_config.json").unlink()
    changed = ModelCard.from_directory(tmp_path)
    assert changed.fingerprint != card.fingerprint
    assert changed.end_ids == (7,)

"""Limits: legal values mean what the contract says, others name field, value and limit."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from fakes import small_limits
from service.engine.types import SamplingParams
from service.errors import MAX_VIOLATIONS, ServiceError
from service.model_card import GenerationDefaults, ModelCard, generation_defaults
from service.pb import inference_pb2
from service.sampling import choice_seed
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


def test_every_sampling_field_is_read():
    """A field that is set reaches the engine; unset, the checkpoint's default does."""
    defaults = GenerationDefaults(0.5, 20, 0.75, 0.25, 1.5, -1.5, 1.25)
    card = dataclasses.replace(CARD, defaults=defaults)
    unset = accept(message(), "id", None, LIMITS, card).choices[0].sampling
    for field in dataclasses.fields(GenerationDefaults):
        assert getattr(unset, field.name) == getattr(defaults, field.name)
    for field in inference_pb2.Sampling.DESCRIPTOR.fields:
        request = message()
        if field.name == "logit_bias":
            request.sampling.logit_bias[3] = 1
        else:
            setattr(request.sampling, field.name, 1 if field.name != "min_p" else 0)
        changed = accept(request, "id", None, LIMITS, card).choices[0].sampling
        assert getattr(changed, field.name) != getattr(unset, field.name)


def test_unset_fields_take_the_defaults():
    request = accepted().choices[0]
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
    assert len({accepted().choices[0].sampling.seed for _ in range(8)}) > 1
    for seed in (0, 2**32 - 1):
        assert accepted(sampling={"seed": seed}).choices[0].sampling.seed == seed


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
        ("min_p", 0, 0.0),
        ("min_p", 0.5, 0.5),
        ("repetition_penalty", 0.5, 0.5),
        ("repetition_penalty", 10, 10.0),
        ("frequency_penalty", -2, -2.0),
        ("presence_penalty", 2, 2.0),
    ],
)
def test_legal_sampling(field, value, meaning):
    sampling = accepted(sampling={field: value}).choices[0].sampling
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
        ("min_p", -0.125, "is -0.125, must be in [0, 1)"),
        ("min_p", 1, "is 1, must be in [0, 1)"),
        ("min_p", math.nan, "is nan, must be in [0, 1)"),
        ("repetition_penalty", 0, "is 0, must be in (0, 10]"),
        ("repetition_penalty", 10.5, "is 10.5, must be in (0, 10]"),
        ("repetition_penalty", math.inf, "is inf, must be in (0, 10]"),
        ("frequency_penalty", -2.5, "is -2.5, must be in [-2, 2]"),
        ("frequency_penalty", math.nan, "is nan, must be in [-2, 2]"),
        ("presence_penalty", 2.5, "is 2.5, must be in [-2, 2]"),
        ("presence_penalty", -math.inf, "is -inf, must be in [-2, 2]"),
    ],
)
def test_illegal_sampling(field, value, description):
    request = message()
    setattr(request.sampling, field, value)
    assert violations(request=request) == {f"sampling.{field}": description}


def test_logit_bias():
    bias = {"999": -100, "5": 100, "0": 2.5}
    sampling = accepted(sampling={"logitBias": bias}).choices[0].sampling
    assert sampling.logit_bias == ((0, 2.5), (5, 100.0), (999, -100.0))
    assert violations(
        sampling={"logitBias": {"1": 101, "7": "NaN", "1000": 1, "2147483648": -101}}
    ) == {
        "sampling.logit_bias[1]": "is 101, must be in [-100, 100]",
        "sampling.logit_bias[7]": "is nan, must be in [-100, 100]",
        "sampling.logit_bias[1000]": "is for id 1000, must be for an id in [0, 1000)",
        "sampling.logit_bias[2147483648]": "is -101, must be in [-100, 100]",
    }
    assert len(accepted(sampling={"logitBias": dict.fromkeys(range(64), 1)}).choices) == 1
    assert violations(sampling={"logitBias": dict.fromkeys(range(65), 1)}) == {
        "sampling.logit_bias": "is 65 ids, must be at most 64"
    }


def test_min_tokens():
    assert accepted().choices[0].min_tokens == 0
    assert accepted(stopping={"minTokens": 64}).choices[0].min_tokens == 64
    assert accepted(stopping={"minTokens": 5, "maxTokens": 5}).choices[0].min_tokens == 5
    assert violations(stopping={"minTokens": 6, "maxTokens": 5}) == {
        "stopping.min_tokens": "is 6, must be at most 5 (max_tokens)"
    }
    assert violations(stopping={"minTokens": 65}) == {
        "stopping.min_tokens": "is 65, must be at most 64 (the context)"
    }


def test_choices_differ_by_their_seeds_alone():
    assert len(accepted().choices) == 1
    choices = accepted(choices=8, sampling={"seed": 7}).choices
    assert [choice.sampling.seed for choice in choices] == [choice_seed(7, i) for i in range(8)]
    assert choices[0].sampling.seed == 7
    alike = {
        dataclasses.replace(choice, sampling=dataclasses.replace(choice.sampling, seed=0))
        for choice in choices
    }
    assert len(alike) == 1
    for wrong in (0, 9, 2**32 - 1):
        assert violations(choices=wrong) == {"choices": f"is {wrong}, must be in [1, 8]"}


@pytest.mark.parametrize("seed", [0, 1, 7, 0x61C88647, 2**32 - 1])
def test_seeds_of_choices_follow_the_written_rule(seed):
    """In numpy's own 32-bit arithmetic, as a client in another language would do it."""
    for index in range(1, 9):
        x = np.array([seed], np.uint32) + np.uint32(index) * np.array([0x9E3779B9], np.uint32)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
        assert choice_seed(seed, index) == int(x[0])
    assert choice_seed(seed, 0) == seed
    assert len({choice_seed(seed, index) for index in range(9)}) == 9


def test_the_stopping_in_force():
    stopping = accepted(
        stopping={"stopTokenIds": [5, 5], "stopStrings": ["a", "a"], "minTokens": 64}
    ).stopping
    assert stopping == inference_pb2.Stopping(
        max_tokens=61,
        min_tokens=61,
        stop_token_ids=[5],
        stop_strings=["a"],
        ignore_eos=False,
        include_stop_string=False,
    )
    assert accepted(stopping={"maxTokens": 9}).stopping.max_tokens == 9


def test_the_token_budget():
    assert accepted(stopping={"maxTokens": 1}).choices[0].max_tokens == 1
    assert accepted(stopping={"maxTokens": 2**32 - 1}).choices[0].max_tokens == 64
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
    assert violations(request=request) == {
        "prompt": "is not set, must be one of text, tokens, chat"
    }


def test_prompts_up_to_the_limit():
    assert accepted(tokens={"ids": [999]}).choices[0].prompt_ids == (999,)
    assert len(accepted(tokens={"ids": [1] * 63}).choices[0].prompt_ids) == 63


def test_stop_ids():
    stopping = {"stopTokenIds": [5, 5, 6]}
    assert accepted(stopping=stopping).choices[0].stop_ids == (5, 6)
    assert violations(stopping={"stopTokenIds": [0, 1000]}) == {
        "stopping.stop_token_ids[1]": "is 1000, must be in [0, 1000)"
    }
    assert violations(stopping={"stopTokenIds": [1, 2, 3]}) == {
        "stopping.stop_token_ids": "is 3 different ids, must be at most 2"
    }
    without_end = accepted(stopping={"stopTokenIds": [1, 2, 3, 4], "ignoreEos": True}).choices[0]
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
    assert accepted(speculation={"maxDraftTokens": asked}).choices[0].max_draft_tokens == cap


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
        sampling={"temperature": 3, "topP": 2, "minP": 1, "logitBias": {"1000": 0}},
        stopping={"maxTokens": 0, "minTokens": 1, "stopStrings": [""]},
        requestId=" ",
        choices=0,
    )
    assert list(found) == [
        "request_id",
        "tokens.ids[1]",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.logit_bias[1000]",
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.stop_strings[0]",
        "choices",
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
        (
            {"min_p": 0.1, "repetition_penalty": 1.05, "presence_penalty": 1.5, "top_p": None},
            GenerationDefaults(min_p=0.1, repetition_penalty=1.05, presence_penalty=1.5),
        ),
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

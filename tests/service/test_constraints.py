"""Constraints over gRPC: every kind holds, a bad one is refused by its field, nothing else notices.

That they hold with any drafts, test_structured_output.py shows over real programs.
"""

import asyncio
import json
import re
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from demo_chat import DEMO, END, LIMITS, TOKENIZER, chat, user, written
from fakes import FakeExecutor
from live_server import failure_of, live_server, settled
from service.constraint import Constraints, ConstraintSource
from service.pb import inference_pb2, model_pb2

SCHEMA = json.dumps({"type": "integer", "minimum": 10, "maximum": 99})


@pytest.fixture
async def live():
    executor = FakeExecutor(LIMITS, accepts=(2, 0, 1))
    async with live_server(DEMO, executor=executor) as server:
        yield server


def ask(constraint: dict[str, Any], **fields: Any) -> inference_pb2.GenerateRequest:
    fields = {"text": "x =", "constraint": constraint, "stopping": {"maxTokens": 40}} | fields
    return json_format.ParseDict(fields, inference_pb2.GenerateRequest())


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"jsonSchema": SCHEMA}, "[1-9][0-9]"),
        ({"regex": "a{3,5}é"}, "a{3,5}é"),
        ({"choices": {"texts": ["no", "maybe", "nope"]}}, "no|maybe|nope"),
        ({"grammar": 'start: "<" /[0-9]{2}/ ">"'}, "<[0-9]{2}>"),
    ],
)
@pytest.mark.parametrize("cap", [0, 2])
async def test_a_reply_is_held_to_it(live, constraint, pattern, cap):
    request = ask(constraint, speculation={"maxDraftTokens": cap})
    (choice,) = (await live.inference.Complete(request)).choices
    assert re.fullmatch(pattern, choice.delta.text), choice.delta.text
    assert choice.finished.reason == inference_pb2.FINISH_REASON_END_OF_SEQUENCE
    assert choice.finished.stop_token_id in (END, TOKENIZER.added_tokens["<|endoftext|>"])


async def test_any_json_object(live):
    (choice,) = (await live.inference.Complete(ask({"jsonObject": True}))).choices
    assert choice.delta.text.startswith("{")


async def test_it_begins_behind_the_reasoning():
    replies = {"r": written("well\n</think>no")}
    async with live_server(DEMO, executor=FakeExecutor(LIMITS, replies=replies)) as live:
        request = ask({"choices": {"texts": ["yes"]}}, requestId="r")
        request.chat.CopyFrom(
            json_format.ParseDict(chat(user("?"), enableThinking=True), type(request.chat)())
        )
        (choice,) = (await live.inference.Complete(request)).choices
    assert (choice.delta.reasoning, choice.delta.text) == ("well", "yes")


async def test_receipts_tell_it(live):
    request = ask({"regex": "ab"}, include={"receipt": True})
    first, second = [(await live.inference.Complete(request)).choices[0] for _ in range(2)]
    assert first.finished.receipt.constraint == request.constraint
    assert first.delta.text == second.delta.text == "ab"


REFUSED = [
    (
        {},
        "constraint",
        "is empty, must be one of json_schema, json_object, regex, choices, grammar",
    ),
    ({"jsonObject": False}, "constraint.json_object", "is false, must be true"),
    ({"jsonSchema": ""}, "constraint.json_schema", "is empty, must be a text"),
    (
        {"jsonSchema": "{"},
        "constraint.json_schema",
        "is '{', must be a constraint that can be met: ",
    ),
    (
        {"jsonSchema": '{"type": "string", "format": "moon"}'},
        "constraint.json_schema",
        'is \'{"type": "string", "format": "moon"}\', must be a constraint that can be met: ',
    ),
    (
        {"jsonSchema": '{"type": "integer", "minimum": 3, "maximum": 2}'},
        "constraint.json_schema",
        "is ",
    ),
    (
        {"jsonSchema": '"' + "x" * 70_000},
        "constraint.json_schema",
        "is 70001 bytes, must be at most",
    ),
    ({"regex": "(" + "a" * 100}, "constraint.regex", "is '(" + "a" * 59 + "'..., must be"),
    ({"choices": {}}, "constraint.choices", "is 0 texts, must be at least 1 text"),
    ({"choices": {"texts": ["a", ""]}}, "constraint.choices", "is empty, must be a text"),
    ({"grammar": "begin: 'x'"}, "constraint.grammar", "is "),
]


@pytest.mark.parametrize(("constraint", "field", "description"), REFUSED)
async def test_what_cannot_be_met_is_refused(live, constraint, field, description):
    request = ask(constraint)
    if not constraint:
        request.constraint.SetInParent()
    failure = await failure_of(live.inference.Generate(request))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    told = {v.field: v.description for v in failure.details["BadRequest"].field_violations}
    assert told.keys() == {field}
    assert told[field].startswith(description), told[field]


async def test_what_decides_the_end_as_well_is_refused(live):
    stopping = {"ignoreEos": True, "minTokens": 2}
    failure = await failure_of(live.inference.Generate(ask({"regex": "a"}, stopping=stopping)))
    told = {v.field: v.description for v in failure.details["BadRequest"].field_violations}
    assert told == {
        "stopping.ignore_eos": "is true, must be unset beside constraint: it decides the end",
        "stopping.min_tokens": "is 2, must be unset beside constraint: it decides the end",
    }


async def test_a_reply_that_can_go_nowhere_fails_alone(live):
    """Special tokens that a grammar names may be barred by their spelling: here by the vocabulary."""
    free = ask({}, requestId="free")
    free.ClearField("constraint")
    other = live.inference.Complete(free)
    request = ask({"regex": "a+"}, stopping={"maxTokens": 3})
    (choice,) = (await live.inference.Complete(request)).choices
    assert choice.finished.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert (await other).choices[0].finished.usage.completion_tokens == 40
    await settled(live)


async def test_limits_are_told(live):
    limits = (await live.model.GetModel(model_pb2.GetModelRequest())).model.limits
    assert (limits.max_constraint_bytes, limits.max_top_logprobs) == (65536, 20)


async def test_many_requests_at_once_share_one_compiler(monkeypatch):
    made: list[Any] = []

    class Compiler:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        def compile(self, kind: str, source: str) -> tuple[str, str]:
            return kind, source

    monkeypatch.setattr("service.constraint.GrammarCompiler", Compiler)
    constraints = Constraints(DEMO / "tokenizer.json", (END,))
    source = ConstraintSource("regex", "a", "constraint.regex")
    results = await asyncio.gather(*(constraints.compile(source, 4090) for _ in range(16)))
    assert set(results) == {("regex", "a")}
    assert len(made) == 1

"""What broke in other servers of chats, over gRPC: however tokens are grouped, stream and unary."""

import json
from typing import Any

import pytest

from demo_chat import DEMO, LIMITS, TOKENIZER, ask, assistant, chat, user, written
from fakes import FakeExecutor
from live_server import live_server, rest_of
from service.pb import inference_pb2, tokenizer_pb2
from service.translation import fold

CALLED = inference_pb2.FINISH_REASON_TOOL_CALLS
ENDED = inference_pb2.FINISH_REASON_END_OF_SEQUENCE
BUDGET = inference_pb2.FINISH_REASON_MAX_TOKENS
GROUPS = [(0,), (2,), (2, 0, 1), (0, 0, 0, 0, 0, 0, 0, 2)]
TYPES: dict[str, Any] = {
    "zip": {"type": "string"},
    "flag": {"type": "string"},
    "num": {"type": "string"},
    "n": {"type": "integer"},
    "d": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "s": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOL = {
    "name": "write",
    "parametersJson": json.dumps({"type": "object", "properties": TYPES}),
}


def call_of(**values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"


async def replies(text: str, conversation: dict[str, Any], **fields: Any):
    """The one choice of a reply, which must not depend on how its tokens come."""
    whole: list[inference_pb2.Choice] = []
    for accepts in GROUPS:
        executor = FakeExecutor(LIMITS, replies={"r": written(text)}, accepts=accepts)
        async with live_server(DEMO, executor=executor) as live:
            request = ask(conversation, sampling={"seed": 1}, **fields)
            streamed = inference_pb2.CompleteResponse()
            for message in await rest_of(live.inference.Generate(request)):
                fold(streamed, message)
            whole += [*streamed.choices, *(await live.inference.Complete(request)).choices]
    first = whole[0]
    for choice in whole:
        assert choice.delta == first.delta
        assert choice.finished.reason == first.finished.reason
    return first


def arguments(choice: inference_pb2.Choice) -> list[Any]:
    return [json.loads(call.arguments_json) for call in choice.delta.tool_calls]


async def test_reasoning_and_calls_survive_any_grouping_of_tokens():
    """Case 8."""
    text = f"I will write it.\n</think>\n\n{call_of(zip='/a', flag='x')}"
    choice = await replies(text, chat(tools=[TOOL], enableThinking=True))
    assert choice.delta.reasoning == "I will write it."
    assert choice.delta.text == ""
    assert arguments(choice) == [{"zip": "/a", "flag": "x"}]
    assert choice.finished.reason == CALLED


@pytest.mark.parametrize("stop", ["own fox", "own foxy"])
async def test_a_stop_string_that_straddles_messages(stop):
    """Case 19."""
    text = "The quick brown fox jumps"
    choice = await replies(text, chat(), stopping={"stopStrings": [stop]})
    matched = stop in text
    assert choice.delta.text == (text[: text.index(stop)] if matched else text)
    reason = inference_pb2.FINISH_REASON_STOP if matched else ENDED
    assert choice.finished.reason == reason


@pytest.mark.parametrize("text", ["👨‍👩‍👧 漢字", "e\u0301 नमस्ते"])
async def test_characters_stay_whole(text):
    """Case 20: in reasoning, text and arguments, and when a limit cuts one."""
    reply = f"{text}\n</think>\n\n{text}\n{call_of(zip=text)}"
    choice = await replies(reply, chat(tools=[TOOL], enableThinking=True))
    assert choice.delta.reasoning == text
    assert choice.delta.text == text
    assert arguments(choice) == [{"zip": text}]
    ids = TOKENIZER.encode(text)
    cuts = {count: b"".join(map(TOKENIZER.token_bytes, ids[:count])) for count in (1, 2, 3)}
    assert any(spelled.decode(errors="ignore") != spelled.decode(errors="replace")
               for spelled in cuts.values())  # fmt: skip
    for count, spelled in cuts.items():
        choice = await replies(
            text, chat(), stopping={"maxTokens": count}, include={"tokenIds": True}
        )
        assert choice.delta.text == spelled.decode(errors="replace")
        assert list(choice.delta.token_ids) == list(ids[:count])
        assert choice.finished.reason == BUDGET


@pytest.mark.parametrize("answer", [call_of(zip="Oslo"), "Rome is fine."])
async def test_a_call_inside_the_reasoning_is_none(answer):
    """Case 33."""
    draft = call_of(zip="Rome")
    text = f"Maybe\n{draft}\nno.\n</think>\n\n{answer}"
    choice = await replies(text, chat(tools=[TOOL], enableThinking=True))
    assert choice.delta.reasoning == f"Maybe\n{draft}\nno."
    if answer.startswith("<"):
        assert arguments(choice) == [{"zip": "Oslo"}]
        assert choice.finished.reason == CALLED
    else:
        assert choice.delta.text == answer
        assert not choice.delta.tool_calls
        assert choice.finished.reason == ENDED


async def test_arguments_have_the_types_of_the_schema():
    """Case 36; `argument_values.py` states the rule for a text that may be null."""
    values = {
        "zip": ("02134", "02134"),
        "flag": ("true", "true"),
        "num": ("1e5", "1e5"),
        "n": ("5.0", 5),
        "d": ("2026-01-15", "2026-01-15"),
        "b": ("True", True),
        "o": ('{"a":[1]}', {"a": [1]}),
        "s": ("null", None),
        "undeclared": ("7", "7"),
    }
    text = call_of(**{key: written for key, (written, _) in values.items()})
    choice = await replies(text, chat(tools=[TOOL]))
    assert arguments(choice) == [{key: meant for key, (_, meant) in values.items()}]


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    ("thinking", "text", "max_tokens", "reasoning", "answer"),
    [
        (False, "Hello", 0, "", "Hello"),
        (True, "Let me see.", 3, None, ""),
        (True, "Let me see.\n</think>\n\nHi", 0, "Let me see.", "Hi"),
        (False, "<think>\nhm\n</think>\n\nHi", 0, "hm", "Hi"),
    ],
)
async def test_thinking_off_unfinished_and_uncalled_for(
    thinking, text, max_tokens, reasoning, answer, tools
):
    """Case 37; the fourth: reasoning is reasoning although it was switched off."""
    stopping = {"maxTokens": max_tokens} if max_tokens else {}
    conversation = chat(enableThinking=thinking, tools=tools)
    choice = await replies(text, conversation, stopping=stopping)
    if reasoning is None:
        reasoning = TOKENIZER.decode(TOKENIZER.encode(text)[:max_tokens])
        assert choice.finished.reason == BUDGET
        assert choice.finished.usage.reasoning_tokens == max_tokens
    assert choice.delta.reasoning == reasoning
    assert choice.delta.text == answer
    assert (choice.finished.usage.reasoning_tokens > 0) is bool(reasoning)


async def test_a_turn_and_its_reply_begin_the_next_prompt():
    """Case 76: what the client sends back is what the model wrote."""
    text = f"I will.\n</think>\n\nHere:\n\n{call_of(zip='/a')}"
    executor = FakeExecutor(LIMITS, replies={"r": written(text)})
    async with live_server(DEMO, executor=executor) as live:
        asked = chat(user("hi"), tools=[TOOL], enableThinking=True, preserveThinking=True)
        request = ask(asked, include={"tokenIds": True})
        (choice,) = (await live.inference.Complete(request)).choices
        delta = choice.delta
        calls = [
            {"id": c.id, "name": c.name, "argumentsJson": c.arguments_json}
            for c in delta.tool_calls
        ]
        asked["messages"] += [
            assistant(delta.text, reasoning=delta.reasoning, toolCalls=calls),
            {"role": "ROLE_TOOL", "text": "done", "toolCallId": calls[0]["id"]},
        ]
        following = tokenizer_pb2.TokenizeRequest(chat=ask(asked).chat)
        prompt = tuple((await live.tokenizer.Tokenize(following)).token_ids)
    before = (*live.executor.inserted[0].prompt_ids, *delta.token_ids)
    assert prompt[: len(before)] == before

"""Replies of a model to chats, and what a parser makes of them however they are cut."""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any

from service.text.chat import Tool
from service.text.chat_output import ChatOutputParser, merged
from service.text.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

WRITE = Tool(
    "write",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)
PING = Tool("ping")
TOOLS = [WRITE, PING]


@dataclasses.dataclass
class Reply:
    """What the events of a reply say, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    """Name and arguments, parsed."""


def events_of(
    text: str, cuts: Iterable[int] = (), *, truncated: bool = False, **options: Any
) -> list[Event]:
    """The merged events of a reply that comes cut before the given positions."""
    options = {"tools": TOOLS} | options
    parser = ChatOutputParser(options.pop("output_format", "qwen3"), **options)
    ends = [0, *sorted(cuts), len(text)]
    events: list[Event] = []
    for start, end in itertools.pairwise(ends):
        events += parser.feed(text[start:end])
    return merged(events + parser.finish(truncated=truncated))


def read(text: str, cuts: Iterable[int] = (), **options: Any) -> Reply:
    return fold(events_of(text, cuts, **options))


def fold(events: Iterable[Event]) -> Reply:
    """Joins events, and checks that they are in order and that arguments are JSON objects."""
    reply = Reply()
    calls: list[list[str]] = []
    is_open = False
    for event in events:
        match event:
            case ReasoningDelta(text):
                assert not is_open and not reply.content and not calls and text
                reply.reasoning += text
            case ContentDelta(text):
                assert not is_open and text
                reply.content += text
            case ToolCallStart(index, _, name):
                assert not is_open and index == len(calls)
                calls.append([name, ""])
                is_open = True
            case ToolCallArguments(index, fragment):
                assert is_open and index == len(calls) - 1 and fragment
                calls[-1][1] += fragment
            case ToolCallEnd(index):
                assert is_open and index == len(calls) - 1
                is_open = False
    assert not is_open
    for name, arguments in calls:
        value = json.loads(arguments, parse_constant=lambda name: 1 / 0)
        assert isinstance(value, dict)
        reply.calls.append((name, value))
    return reply


def call(name: str, **arguments: str) -> str:
    """A call as the format wants it."""
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

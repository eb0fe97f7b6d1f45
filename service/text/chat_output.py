"""The text of a reply to a chat: in pieces, to reasoning, content and tool calls.

The events, joined, do not depend on how the text was cut. Control tokens have no text, so none
arrive here; <think>, <tool_call> and the like have text and are found as text.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from service.text.chat import Tool
from service.text.output_events import ContentDelta, Event, ReasoningDelta, ToolCallArguments
from service.text.reasoning import ReasoningSplitter
from service.text.tags import FUNCTION, PARAMETER, TOOL_CALL, Piece, TagScanner
from service.text.tool_calls import ToolCallParser

OutputFormat = Literal["qwen3", "plain"]
"""How a checkpoint writes tool calls and reasoning: see tool_calls.py; plain: not at all."""


def detect_format(template: str) -> OutputFormat:
    """Returns the format that the source of a chat template teaches the model."""
    return "qwen3" if all(tag in template for tag in (TOOL_CALL, FUNCTION, PARAMETER)) else "plain"


class ChatOutputParser:
    """Reads one reply."""

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
        parse_tool_calls: bool = True,
        call_id: Callable[[int], str] = "call_{}".format,
    ) -> None:
        """Starts a reply.

        Args:
          output_format: In the plain format everything is content, after the reasoning if the
            prompt opened one.
          tools: What the prompt offered; without any, calls are text.
          reasoning_open: The prompt ends inside reasoning (`RenderedChat.reasoning_open`).
          parse_tool_calls: False leaves calls as text in the content (tool_choice none).
          call_id: Names the n-th call of the reply, from 0. Must depend on nothing but the request,
            so that a repeated request gives the same reply.
        """
        reads_calls = output_format == "qwen3" and parse_tool_calls and bool(tools)
        self._scanner = TagScanner()
        self._reasoning = (
            ReasoningSplitter(reasoning_open=reasoning_open, hold_calls=reads_calls)
            if output_format == "qwen3" or reasoning_open
            else None
        )
        self._calls = ToolCallParser(tools, call_id) if reads_calls else None

    def feed(self, text: str) -> list[Event]:
        """Returns the events that are certain now that `text` follows."""
        return merged(event for piece in self._scanner.feed(text) for event in self._read(piece))

    def finish(self, *, truncated: bool = False) -> list[Event]:
        """Ends the reply: returns what was held back.

        Args:
          truncated: The model did not end the reply itself: it met a limit, or a stop string.
        """
        events: list[Event] = []
        held = self._scanner.finish()
        if self._reasoning is not None:
            if held and not self._reasoning.is_over:
                events += self._read(Piece(held))
                held = ""
            reasoning, pieces = self._reasoning.finish(truncated=truncated)
            events += self._answer(reasoning, pieces)
        if self._calls is not None:
            events += self._calls.finish(held, truncated=truncated)
        elif held:
            events.append(ContentDelta(held))
        return merged(events)

    def _read(self, piece: Piece) -> list[Event]:
        if self._reasoning is None:
            return self._answer("", [piece])
        return self._answer(*self._reasoning.feed(piece))

    def _answer(self, reasoning: str, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = [ReasoningDelta(reasoning)] if reasoning else []
        for piece in pieces:
            events += [ContentDelta(piece.text)] if self._calls is None else self._calls.feed(piece)
        return events


def merged(events: Iterable[Event]) -> list[Event]:
    """Joins deltas that follow each other."""
    joined: list[Event] = []
    for (kind, index), run in itertools.groupby(events, key=_kind_and_call):
        if kind is ToolCallArguments:
            fragments = [event.fragment for event in run if isinstance(event, ToolCallArguments)]
            joined.append(ToolCallArguments(index, "".join(fragments)))
        elif kind is ReasoningDelta:
            texts = [event.text for event in run if isinstance(event, ReasoningDelta)]
            joined.append(ReasoningDelta("".join(texts)))
        elif kind is ContentDelta:
            texts = [event.text for event in run if isinstance(event, ContentDelta)]
            joined.append(ContentDelta("".join(texts)))
        else:
            joined.extend(run)
    return joined


def _kind_and_call(event: Event) -> tuple[type[Event], int]:
    return type(event), 0 if isinstance(event, ReasoningDelta | ContentDelta) else event.index

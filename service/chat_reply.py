"""The reply to a chat: text into reasoning, text and calls of functions."""

import hashlib
import struct
from collections.abc import Callable, Sequence

from service.chats import ChatPrompt
from service.engine.types import Request
from service.pb import inference_pb2
from service.text.chat_output import ChatOutputParser
from service.text.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

CALL_ID_DIGITS = 16
ORDER: dict[type[Event], int] = {
    ReasoningDelta: 0,
    ContentDelta: 1,
    ToolCallStart: 2,
    ToolCallArguments: 2,
}
"""Of what stands in one Delta."""


class ChatReply:
    """Reads the text of one choice: `feed` as it comes, then `finish`."""

    def __init__(self, prompt: ChatPrompt, choice: Request) -> None:
        """Starts with nothing."""
        self._parser = ChatOutputParser(
            prompt.output_format,
            tools=prompt.tools,
            reasoning_open=prompt.rendered.reasoning_open,
            parse_tool_calls=prompt.tool_choice.read_calls,
            call_id=call_ids(choice),
        )
        self._reasoning_end = prompt.reasoning_end
        self._reasons = prompt.rendered.reasoning_open
        self._reasoning_tokens = 0  # of a reply that reasons
        self._reasoning_ended = prompt.reasoning_end is None
        self._calls = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the one that ends the reasoning, it included; 0 without reasoning."""
        return self._reasoning_tokens if self._reasons else 0

    def count(self, token_id: int) -> None:
        """Counts a token of the reply, shown or not."""
        if not self._reasoning_ended:
            self._reasoning_tokens += 1
            self._reasoning_ended = token_id == self._reasoning_end

    def feed(self, text: str) -> list[inference_pb2.Delta]:
        """Returns what is certain now that `text` follows."""
        return self._deltas(self._parser.feed(text))

    def finish(self, finished: inference_pb2.Finished) -> list[inference_pb2.Delta]:
        """Ends the reply, and tells its end if the model ended it with calls."""
        by_model = finished.reason == inference_pb2.FINISH_REASON_END_OF_SEQUENCE
        deltas = self._deltas(self._parser.finish(truncated=not by_model))
        if by_model and self._calls:
            finished.reason = inference_pb2.FINISH_REASON_TOOL_CALLS
        return deltas

    def _deltas(self, events: Sequence[Event]) -> list[inference_pb2.Delta]:
        self._reasons |= any(isinstance(event, ReasoningDelta) for event in events)
        self._calls |= any(isinstance(event, ToolCallStart) for event in events)
        return deltas_of(events)


def call_ids(choice: Request) -> Callable[[int], str]:
    """Names the calls of a reply, by all that the reply is a function of but the checkpoint.

    So a repeated request gets the same names, and another turn of the same chat gets others.
    """
    ids = choice.prompt_ids
    digest = hashlib.sha256(struct.pack(f">I{len(ids)}I", choice.sampling.seed, *ids)).hexdigest()
    return lambda index: f"call_{digest[:CALL_ID_DIGITS]}_{index}"


def deltas_of(events: Sequence[Event]) -> list[inference_pb2.Delta]:
    """Writes what a reply consists of as pieces of it, as few as keep the order.

    Within a piece reasoning comes first, then text, then calls.
    """
    deltas: list[inference_pb2.Delta] = []
    last = len(ORDER)
    for event in events:
        if isinstance(event, ToolCallEnd):  # its arguments are a whole JSON object: that tells it
            continue
        place = ORDER[type(event)]
        if place < last:
            deltas.append(inference_pb2.Delta())
        last = place
        add_event(deltas[-1], event)
    return deltas


def add_event(delta: inference_pb2.Delta, event: Event) -> None:
    """Adds an event to a piece."""
    match event:
        case ReasoningDelta(text):
            delta.reasoning += text
        case ContentDelta(text):
            delta.text += text
        case ToolCallStart(index, call_id, name):
            delta.tool_calls.add(index=index, id=call_id, name=name)
        case ToolCallArguments(index, fragment):
            calls = delta.tool_calls
            if not calls or calls[-1].index != index:
                calls.add(index=index)
            calls[-1].arguments_json += fragment
        case _:
            pass

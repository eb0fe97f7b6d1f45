"""How a terminal shows a reply while it comes."""

import codecs
from typing import Protocol

from rich.console import Console
from rich.text import Text

from service.pb import inference_pb2

REASONING, CALL, DRAFTED = "dim italic", "cyan", "green underline"


class View(Protocol):
    """Shows one reply."""

    def show(self, piece: inference_pb2.Delta) -> None:
        """Shows the next piece."""
        ...

    def end(self, reply: inference_pb2.Delta) -> None:
        """Shows what is left to show of the whole reply, and ends the line."""
        ...


class TurnView:
    """Reasoning, text and calls, each in its own look."""

    def __init__(self, console: Console) -> None:
        """Shows nothing yet."""
        self._console = console
        self._part = ""  # what is being shown

    def show(self, piece: inference_pb2.Delta) -> None:
        """See `View.show`."""
        self._print("reasoning", piece.reasoning, REASONING)
        self._print("text", piece.text, "")
        for call in piece.tool_calls:
            part = f"call {call.index}"
            if call.name:
                self._print(part, f"→ {call.name} ", CALL)
            self._print(part, call.arguments_json, CALL)

    def end(self, reply: inference_pb2.Delta) -> None:
        """See `View.end`."""
        if self._part:
            self._console.print()

    def _print(self, part: str, text: str, style: str) -> None:
        if self._part not in ("", part) and text:
            self._console.print()
        if self._part != part:
            text = text.lstrip("\n")  # templates set parts off by blank lines
        if text:
            self._part = part
            self._console.print(Text(text, style), end="", soft_wrap=True)


class MarkedTokens:
    """The tokens as the model made them, tags and all; those drafted and accepted are marked."""

    def __init__(self, console: Console) -> None:
        """Shows nothing yet."""
        self._console = console
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, piece: inference_pb2.Delta) -> None:
        """See `View.show`. A character of several tokens looks like the last of them."""
        for token, drafted in zip(piece.token_bytes, piece.drafted, strict=True):
            text = Text(self._decoder.decode(token), DRAFTED if drafted else "")
            self._console.print(text, end="", soft_wrap=True)

    def end(self, reply: inference_pb2.Delta) -> None:
        """See `View.end`: the calls are shown again, as they were understood."""
        self._console.print(self._decoder.decode(b"", final=True))
        for call in reply.tool_calls:
            self._console.print(Text(f"→ {call.name} {call.arguments_json}", CALL))

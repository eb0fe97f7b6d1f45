"""Tool calls in a reply, in the XML-like form of Qwen3.5 and 3.6.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

What is not quite in this form is read as what it was meant to be; a call is never lost:
  * <tool_call> without <function= is text. <function= without <tool_call> is a call at the start of
    a line with the name of a tool, otherwise text. Any name after <tool_call> is a call: whoever
    runs the tools knows best what to say about a name that does not exist.
  * Closing tags may be missing: a call ends where the next one begins or where the reply ends, a
    value where the next parameter begins or the call ends.
  * </parameter> ends a value at the start of a line. Elsewhere it does only before another tag of
    the format or at the end of the reply, as values may be XML; </function> and </tool_call> end
    an open value only where nothing but the rest of a call, or another one, follows.
  * Text between parameters is dropped if the call goes on, and content if it does not.
Newlines around calls are layout, not content.
"""

from collections.abc import Callable, Sequence

from service.text.call_reader import END_OF_NAME, MAX_NAME_CHARACTERS, CallReader
from service.text.chat import Tool
from service.text.output_events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from service.text.tags import END_FUNCTION, END_TOOL_CALL, FUNCTION, TOOL_CALL, Piece


class ToolCallParser:
    """Divides the pieces of one answer into content and calls.

    The state is the method that reads the next piece.
    """

    def __init__(self, tools: Sequence[Tool], call_id: Callable[[int], str]) -> None:
        """Starts an answer; `call_id` names the n-th call."""
        self._tools = {tool.name: tool for tool in tools}
        self._call_id = call_id
        self._events: list[Event] = []
        self._state: Callable[[Piece], None] = self._in_content
        self._newlines = ""
        """At the end of the content so far: layout if a call follows."""
        self._at_line_start = True
        self._after_call = False
        self._opening = ""
        """What is a call if more of one follows."""
        self._bare = False
        """Whether the opening has no <tool_call>."""
        self._calls = 0
        self._call = CallReader(None)

    def feed(self, piece: Piece) -> list[Event]:
        """Returns the events that are certain now that `piece` follows."""
        self._state(piece)
        return self._take()

    def finish(self, held: str, *, truncated: bool) -> list[Event]:
        """Ends the answer.

        Args:
          held: The beginning of a tag that the text ends with.
          truncated: The model did not end the answer itself.
        """
        if held and self._state not in (self._in_call, self._behind_call):
            self._state(Piece(held))
        if self._state == self._in_name and not truncated and self._name() in self._tools:
            self._start_call(self._name())
        if self._state == self._in_call:
            fragment, whole = self._call.finish(held)
            self._write_arguments(fragment)
            self._end_call(complete=whole or not truncated)
        elif self._state in (self._in_name, self._behind_tool_call):
            self._not_a_call()
        if self._newlines:
            self._events.append(ContentDelta(self._newlines))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _in_content(self, piece: Piece) -> None:
        if piece.is_tag and piece.text == TOOL_CALL:
            self._open(piece, bare=False)
        elif piece.is_tag and piece.text == FUNCTION and self._at_line_start:
            self._open(piece, bare=True)
        else:
            self._write(piece.text)

    def _write(self, text: str) -> None:
        """Writes content, but for newlines at its end."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._newlines + text
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        if text:
            self._at_line_start = bool(self._newlines)
        if shown:
            self._events.append(ContentDelta(shown))

    def _open(self, piece: Piece, *, bare: bool) -> None:
        self._opening, self._bare = piece.text, bare
        self._state = self._in_name if piece.text == FUNCTION else self._behind_tool_call

    def _not_a_call(self) -> None:
        self._state = self._in_content
        self._write(self._opening)

    def _behind_tool_call(self, piece: Piece) -> None:
        if piece.is_blank:
            self._opening += piece.text
        elif piece.is_tag and piece.text == FUNCTION:
            self._opening += piece.text
            self._state = self._in_name
        else:
            self._not_a_call()
            self._state(piece)

    def _name(self) -> str:
        return self._opening.rpartition(FUNCTION)[2].strip()

    def _in_name(self, piece: Piece) -> None:
        if piece.is_tag:
            self._end_name(self._name())
            self._state(piece)
            return
        self._opening += piece.text
        name = self._opening.rpartition(FUNCTION)[2].lstrip()
        end = END_OF_NAME.search(name)
        if end is None and len(name) <= MAX_NAME_CHARACTERS:
            return
        if end is None or end.start() > MAX_NAME_CHARACTERS:
            self._not_a_call()
        elif self._end_name(name[: end.start()].rstrip()) and (rest := name[end.end() :]):
            self._state(Piece(rest))

    def _end_name(self, name: str) -> bool:
        """Starts the call if it is one; otherwise the opening is content."""
        is_call = bool(name) and (not self._bare or name in self._tools)
        if is_call:
            self._start_call(name)
        else:
            self._not_a_call()
        return is_call

    def _start_call(self, name: str) -> None:
        self._events.append(ToolCallStart(self._calls, self._call_id(self._calls), name))
        self._call = CallReader(self._tools.get(name))
        self._newlines = ""
        self._state = self._in_call

    def _in_call(self, piece: Piece) -> None:
        self._write_arguments(self._call.feed(piece))
        if self._call.rest:
            self._end_call()
            for behind in self._call.rest:
                self._state(behind)

    def _write_arguments(self, fragment: str) -> None:
        if fragment:
            self._events.append(ToolCallArguments(self._calls, fragment))

    def _end_call(self, *, complete: bool = True) -> None:
        self._events.append(ToolCallEnd(self._calls, complete))
        self._calls += 1
        self._after_call = self._at_line_start = True
        self._write(self._call.between)
        self._state = self._behind_call

    def _behind_call(self, piece: Piece) -> None:
        if piece.is_tag and piece.text in (TOOL_CALL, FUNCTION):
            self._open(piece, bare=False)
        elif not piece.is_blank and piece != Piece(END_FUNCTION, is_tag=True):
            self._state = self._in_content
            if piece != Piece(END_TOOL_CALL, is_tag=True):
                self._state(piece)

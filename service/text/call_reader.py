"""One tool call of a reply, from behind its name up to what ends it."""

import re
from collections.abc import Callable

from service.text.argument_writer import ArgumentsWriter
from service.text.chat import Tool
from service.text.tags import (
    END_FUNCTION,
    END_PARAMETER,
    END_TOOL_CALL,
    FUNCTION,
    PARAMETER,
    TOOL_CALL,
    Piece,
)

MAX_NAME_CHARACTERS = 256
"""A longer name, of a tool or behind a value that is still open, is none."""
END_OF_NAME = re.compile("[>\n]")
FOLLOWERS = {
    END_PARAMETER: (PARAMETER, END_FUNCTION, END_TOOL_CALL, TOOL_CALL, FUNCTION),
    END_FUNCTION: (END_TOOL_CALL, TOOL_CALL, FUNCTION),
    END_TOOL_CALL: (TOOL_CALL,),
}
"""What must follow so that a closing tag inside a value is one."""
CALL_ENDS = (END_FUNCTION, END_TOOL_CALL, TOOL_CALL, FUNCTION)


class CallReader:
    """Reads the pieces of one call and writes its arguments as JSON.

    The state is the method that reads the next piece.
    """

    def __init__(self, tool: Tool | None) -> None:
        """Starts a call; None: of a tool that nobody declared."""
        self.rest: list[Piece] = []
        """What is behind the call, its closing tag first. Not empty: the call is over."""
        self.between = ""
        """Text behind the last parameter."""
        self._arguments = ArgumentsWriter(tool)
        self._written: list[str] = []
        self._state: Callable[[Piece], None] = self._between_parameters
        self._key = ""
        self._closing = ""
        """What ends a value if the right thing follows."""

    def feed(self, piece: Piece) -> str:
        """Returns the JSON that is certain now that `piece` follows."""
        self._state(piece)
        return self._take()

    def finish(self, held: str) -> tuple[str, bool]:
        """Ends the reply inside the call.

        Args:
          held: The beginning of a tag that the reply ends with.

        Returns:
          The rest of the JSON, and whether nothing but closing tags can be missing.
        """
        whole = self._state == self._behind_closing and self._closing.startswith(CALL_ENDS)
        if self._state == self._behind_next_parameter and not self._arguments.at_line_start:
            self._not_closing()
        if self._state == self._in_value and not self._arguments.at_line_start and held:
            self._written.append(self._arguments.feed(held))
        if self._state not in (self._between_parameters, self._in_key):
            self._end_value()
        self._written.append(self._arguments.close())
        return self._take(), whole

    def _take(self) -> str:
        written, self._written = "".join(self._written), []
        return written

    def _end(self, *rest: Piece) -> None:
        self._written.append(self._arguments.close())
        self.rest.extend(rest)

    def _between_parameters(self, piece: Piece) -> None:
        if not piece.is_tag or piece.text not in (PARAMETER, *CALL_ENDS):
            self.between += piece.text
        elif piece.text == PARAMETER:
            self.between = self._key = ""
            self._state = self._in_key
        else:
            if piece.text in (END_FUNCTION, END_TOOL_CALL):
                self.between = ""
            self._end(piece)

    def _in_key(self, piece: Piece) -> None:
        if not piece.is_tag:
            text = piece.text if self._key else piece.text.lstrip()
            end = END_OF_NAME.search(text)
            if end is None:
                self._key += text
                return
            self._key += text[: end.start()]
            piece = Piece(text[end.end() :])
        self._begin_value(self._key)
        if piece.text:
            self._state(piece)

    def _begin_value(self, key: str) -> None:
        self._written.append(self._arguments.begin(key.strip()))
        self._state = self._in_value

    def _in_value(self, piece: Piece) -> None:
        if not piece.is_tag or piece.text not in (*FOLLOWERS, PARAMETER):
            self._written.append(self._arguments.feed(piece.text))
        elif piece.text == END_PARAMETER and self._arguments.at_line_start:
            self._end_value()
        else:
            self._closing = piece.text
            is_next = piece.text == PARAMETER
            self._state = self._behind_next_parameter if is_next else self._behind_closing

    def _end_value(self) -> None:
        self._written.append(self._arguments.end())
        self._state = self._between_parameters

    def _behind_closing(self, piece: Piece) -> None:
        tag = self._closing.rstrip()
        if piece.is_blank:
            self._closing += piece.text
        elif not piece.is_tag or piece.text not in FOLLOWERS[tag]:
            self._not_closing()
            self._state(piece)
        else:
            self._end_value()
            if tag == END_PARAMETER:
                self._state(piece)
            else:
                self._end(Piece(tag, is_tag=True), piece)

    def _behind_next_parameter(self, piece: Piece) -> None:
        if piece.is_tag:
            self._not_closing()
            self._state(piece)
            return
        self._closing += piece.text
        key = self._closing.removeprefix(PARAMETER)
        end = END_OF_NAME.search(key)
        if end is None and len(key) <= MAX_NAME_CHARACTERS:
            return
        if end is None or end[0] != ">" or not self._is_next(key[: end.start()]):
            self._not_closing()
            return
        self._end_value()
        self._begin_value(key[: end.start()])
        if rest := key[end.end() :]:
            self._state(Piece(rest))

    def _is_next(self, key: str) -> bool:
        """Whether a parameter begins although the value before it was not closed."""
        plausible = self._arguments.has_schema or self._arguments.at_line_start
        return (
            len(key) <= MAX_NAME_CHARACTERS and plausible and self._arguments.expects(key.strip())
        )

    def _not_closing(self) -> None:
        self._state = self._in_value
        self._written.append(self._arguments.feed(self._closing))

"""Cuts a reply that comes in pieces into tags and the text between them.

What reads the reply sees the same sequence however it was cut, but for where text is divided.
"""

import dataclasses
import re

THINK = "<think>"
END_THINK = "</think>"
TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
TAGS = (
    *(THINK, END_THINK, TOOL_CALL, END_TOOL_CALL),
    *(FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER),
)
ANY_TAG = re.compile("|".join(map(re.escape, TAGS)))


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tag as it is spelled, or text without a tag, never empty."""

    text: str
    is_tag: bool = False

    @property
    def is_blank(self) -> bool:
        """Whether this is text, and nothing but white space."""
        return not self.is_tag and self.text.isspace()


class TagScanner:
    """Finds the tags of one reply; holds back nothing but the beginning of one."""

    def __init__(self) -> None:
        """Starts at the beginning of a reply."""
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that are certain now that `text` follows."""
        text = self._held + text
        pieces: list[Piece] = []
        end = 0
        for match in ANY_TAG.finditer(text):
            if match.start() > end:
                pieces.append(Piece(text[end : match.start()]))
            pieces.append(Piece(match[0], is_tag=True))
            end = match.end()
        # A tag has no "<" but its first, so only the last one can begin a tag that is not whole.
        start = text.rfind("<", end)
        if start < 0 or not any(tag.startswith(text[start:]) for tag in TAGS):
            start = len(text)
        if start > end:
            pieces.append(Piece(text[end:start]))
        self._held = text[start:]
        return pieces

    def finish(self) -> str:
        """Ends the reply: returns the beginning of a tag that never became one."""
        held, self._held = self._held, ""
        return held

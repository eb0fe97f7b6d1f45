"""Stop strings: find them in a text that comes in pieces, without showing any part of them.

The text is read character by character, so the result cannot depend on how it was cut into tokens
and messages. Each stop string is followed by its Knuth-Morris-Pratt automaton, whose state is the
length of the longest beginning of the string that the text ends with: the match is found when the
state is the whole length, and the largest state is what must be held back. A character costs the
same whatever came before.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """What may be shown after a piece of text."""

    text: str
    stop_string: str | None = None
    """The stop string that matched; the text before it is complete and nothing may follow."""


class StopString:
    """One stop string and how much of it the text ends with."""

    def __init__(self, string: str) -> None:
        """Prepares the automaton of a string that is not empty."""
        self.string = string
        self.matched = 0
        self._fallback = [0] * len(string)
        length = 0
        for position in range(1, len(string)):
            while length and string[position] != string[length]:
                length = self._fallback[length - 1]
            length += string[position] == string[length]
            self._fallback[position] = length

    def advance(self, character: str) -> bool:
        """Reads one character; returns True when it completes the string."""
        while self.matched and character != self.string[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.string[self.matched]
        return self.matched == len(self.string)


class StopMatcher:
    """Watches one reply: of several matches the one that ends first counts, then the longest."""

    def __init__(self, stop_strings: Sequence[str], *, show_match: bool = False) -> None:
        """Starts at the beginning of a reply; with `show_match` its text ends with the match."""
        self._show_match = show_match
        self._stops = [StopString(string) for string in stop_strings]
        self._held = ""

    def feed(self, text: str) -> Released:
        """Returns what may be shown now that `text` follows. Not to be called after a match."""
        if not self._stops:
            return Released(text)
        for position, character in enumerate(text):
            complete = [stop.string for stop in self._stops if stop.advance(character)]
            if complete:
                stop_string = max(complete, key=len)
                read, self._held = self._held + text[: position + 1], ""
                hidden = 0 if self._show_match else len(stop_string)
                return Released(read[: len(read) - hidden], stop_string)
        read = self._held + text
        shown = len(read) - max(stop.matched for stop in self._stops)
        self._held = read[shown:]
        return Released(read[:shown])

    def flush(self) -> str:
        """Ends the reply: returns what was held back for a match that never completed."""
        held, self._held = self._held, ""
        return held

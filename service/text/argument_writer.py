"""Writes the arguments of a call as JSON while the text of their values comes in."""

import json
from collections.abc import Mapping
from typing import cast

from service.text.argument_values import allowed_types, value_json
from service.text.chat import Tool


class ValueWriter:
    """Writes the JSON of one value while its text comes in: strings at once, others at the end.

    One newline at the beginning and one at the end are layout.
    """

    def __init__(self, types: frozenset[str]) -> None:
        """Starts a value of the given types."""
        self.at_line_start = True
        """Whether the next character begins a line."""
        self._types = types
        self._at_start = True
        self._streams: bool | None = None
        """Whether the value is a string whatever follows; None: open."""
        self._parts: list[str] = []
        """Read, but not written."""

    def feed(self, text: str) -> str:
        """Returns the JSON that is certain now that `text`, not empty, follows."""
        self.at_line_start = text.endswith("\n")
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\n")
        self._parts.append(text)
        opening = ""
        if self._streams is None:
            self._streams = self._is_string("".join(self._parts))
            opening = '"' if self._streams else ""
        if not self._streams:
            return ""
        read = "".join(self._parts)
        shown = read.removesuffix("\n")
        self._parts = [read[len(shown) :]]
        return opening + json.dumps(shown, ensure_ascii=False)[1:-1]

    def close(self) -> str:
        """Returns the rest of the JSON."""
        if self._streams:
            return '"'
        return value_json("".join(self._parts).removesuffix("\n"), self._types)

    def _is_string(self, start: str) -> bool | None:
        if "string" not in self._types:
            return not self._types
        if "null" in self._types and "null\n".startswith(start):
            return None
        containers = {"object": "{", "array": "["}
        openings = {opening for name, opening in containers.items() if name in self._types}
        if not openings:
            return True
        first = start.lstrip()[:1]
        return first not in openings if first else None


class ArgumentsWriter:
    """Writes the JSON object of one call, value by value.

    The first value of a name counts: JSON that is being streamed cannot be taken back.
    """

    def __init__(self, tool: Tool | None) -> None:
        """Starts the arguments of a call; None: of a tool that nobody declared."""
        self._schema: Mapping[str, object] = (tool.parameters if tool else None) or {}
        properties = self._schema.get("properties")
        self._properties: Mapping[str, object] = (
            cast(Mapping[str, object], properties) if isinstance(properties, Mapping) else {}
        )
        self._given: set[str] = set()
        self._value = ValueWriter(frozenset())
        self._repeated = False

    @property
    def at_line_start(self) -> bool:
        """Whether the next character of the open value begins a line."""
        return self._value.at_line_start

    def expects(self, name: str) -> bool:
        """Says whether a value of this name is to be expected; anything goes without a schema."""
        return name not in self._given and (not self._properties or name in self._properties)

    @property
    def has_schema(self) -> bool:
        """Whether the tool declares the names of its arguments."""
        return bool(self._properties)

    def begin(self, name: str) -> str:
        """Opens a value."""
        self._value = ValueWriter(allowed_types(self._properties.get(name), self._schema))
        self._repeated = name in self._given
        if self._repeated:
            return ""
        separator = ", " if self._given else "{"
        self._given.add(name)
        return f"{separator}{json.dumps(name, ensure_ascii=False)}: "

    def feed(self, text: str) -> str:
        """Returns the JSON that is certain now that `text` follows in the open value."""
        written = self._value.feed(text)
        return "" if self._repeated else written

    def end(self) -> str:
        """Closes the open value."""
        written = self._value.close()
        return "" if self._repeated else written

    def close(self) -> str:
        """Closes the object; no value may be open."""
        return "}" if self._given else "{}"

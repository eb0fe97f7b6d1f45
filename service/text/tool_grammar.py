"""A grammar of the calls that a reply must make, in the qwen3 format (`tool_calls.py` reads it)."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from service.text.chat import Tool
from service.text.tags import (
    END_FUNCTION,
    END_PARAMETER,
    END_TOOL_CALL,
    FUNCTION,
    PARAMETER,
    TOOL_CALL,
)

MAX_BLANK_LINES = 2
"""Before the first call: chat templates set it off so."""


def tool_grammar(tools: Sequence[Tool], added_tokens: Collection[str], *, single: bool) -> str:
    """Returns a Lark grammar of replies that call some of the tools, and hold nothing else.

    The parameters of a call come in the order in which the schema declares them, each at most once,
    and all that it requires. A parameter that may be a string is free text, one with an `enum` one of
    its values, all others are JSON as their schema says.

    Args:
      tools: to choose from.
      added_tokens: of the tokenizer: tags among them are tokens of their own.
      single: one call, and not several.
    """
    rules = _Rules(added_tokens)
    calls = [rules.call(index, tool) for index, tool in enumerate(tools)]
    more = "" if single else ' ("\\n" call)*'
    lines = [
        f"start: /\\n{{0,{MAX_BLANK_LINES}}}/ call{more}",
        f"call: {' | '.join(calls)}",
        *rules.lines,
    ]
    return "\n".join(lines) + "\n"


class _Rules:
    """Collects the rules below `call`."""

    def __init__(self, added_tokens: Collection[str]) -> None:
        self.lines: list[str] = []
        self._added_tokens = added_tokens

    def call(self, index: int, tool: Tool) -> str:
        """Adds the rules of one tool; returns the name of the first."""
        name = f"call_{index}"
        schema = tool.parameters or {}
        properties = _mapping(schema.get("properties"))
        required = schema.get("required")
        wanted: Sequence[object] = (
            cast(Sequence[object], required) if isinstance(required, list) else ()
        )
        parts = [
            self._tag(TOOL_CALL),
            _literal(f"\n{FUNCTION}{tool.name}>\n"),
        ]
        for number, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{number}"
            self.lines.append(f"{rule}: {self._parameter(rule, key, value, schema)}")
            parts.append(rule if key in wanted else f"{rule}?")
        parts += [_literal(f"{END_FUNCTION}\n"), self._tag(END_TOOL_CALL)]
        self.lines.append(f"{name}: {' '.join(parts)}")
        return name

    def _parameter(self, rule: str, key: str, value: object, schema: Mapping[str, object]) -> str:
        start, end = _literal(f"{PARAMETER}{key}>\n"), f"\n{END_PARAMETER}\n"
        own = _mapping(value)
        choices = own.get("enum")
        if isinstance(choices, list) and choices:
            written = cast(Sequence[object], choices)
            texts = [v if isinstance(v, str) else json.dumps(v) for v in written]
            return f"{start} ({' | '.join(map(_literal, texts))}) {_literal(end)}"
        if _may_be_text(own):
            self.lines.append(f"{rule}_text[suffix={_literal(end)}]: /(?s:.*)/")
            return f"{start} {rule}_text"
        definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        whole = {**definitions, **own, "x-guidance": {"whitespace_flexible": False}}
        return f"{start} %json {json.dumps(whole)} {_literal(end)}"

    def _tag(self, tag: str) -> str:
        return tag if tag in self._added_tokens else _literal(tag)


def _may_be_text(schema: Mapping[str, object]) -> bool:
    """Whether a parameter is written as plain text: as `argument_values.py` reads it."""
    kind = schema.get("type")
    if kind is None:
        return not any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref", "const"))
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, dict) else {}


def _literal(text: str) -> str:
    """A string of the Lark language: that of JSON."""
    return json.dumps(text, ensure_ascii=False)

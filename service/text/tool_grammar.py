"""A grammar of the calls that a reply must make, in the qwen3 format (`tool_calls.py` reads it)."""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

from service.text.chat import Tool
from service.text.parameter_grammar import MAX_TOLD_CHARACTERS, SchemaError, literal, value_grammar
from service.text.tags import END_FUNCTION, END_TOOL_CALL, FUNCTION, PARAMETER, TOOL_CALL

MAX_BLANK_LINES = 2
"""Before the first call: chat templates set it off so."""
MAX_CALLS = 16
"""Of one reply: a weak model would otherwise go on calling until its budget is used up."""
CONDITIONS = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const"),
    *("minProperties", "maxProperties", "propertyNames", "patternProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
"""What the arguments of a call as a whole are not held to."""
END_OF_LINE = literal("\n")


class ToolGrammarError(Exception):
    """Calls of a tool cannot be held to its schema."""

    def __init__(self, tool: str, reason: str) -> None:
        """Takes the tool's name, and a sentence without it that is fit for clients."""
        super().__init__(reason)
        self.tool = tool
        self.reason = reason


def tool_grammar(tools: Sequence[Tool], added_tokens: Collection[str], *, single: bool) -> str:
    """Returns a Lark grammar of replies that call some of the tools, and hold nothing else.

    The parameters of a call come in the order in which the schema declares them, each at most once,
    and all that it requires. What one may be, `parameter_grammar.py` says.

    Args:
      tools: to choose from.
      added_tokens: of the tokenizer: tags among them are tokens of their own.
      single: one call, and not up to `MAX_CALLS`.

    Raises:
      ToolGrammarError: a schema has what such a grammar cannot express.
    """
    rules = _Rules(added_tokens)
    calls = [rules.call(index, tool) for index, tool in enumerate(tools)]
    more = "" if single else f' ("\\n" call){{0,{MAX_CALLS - 1}}}'
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
        required = [key for key in _listed(schema.get("required")) if isinstance(key, str)]
        properties = {**_mapping(schema.get("properties"))}
        properties.update({key: {} for key in required if key not in properties})
        if unmet := [word for word in CONDITIONS if word in schema]:
            raise ToolGrammarError(tool.name, f"has {unmet[0]} beside its properties")
        parts = [self._tag(TOOL_CALL), literal(f"\n{FUNCTION}{tool.name}>\n")]
        for number, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{number}"
            told = f"declares {key[:MAX_TOLD_CHARACTERS]!a}"
            if not key or key != key.strip() or any(character in "<>\n" for character in key):
                raise ToolGrammarError(tool.name, f"{told}, which calls cannot name")
            try:
                written, lines = value_grammar(rule, value, schema)
            except SchemaError as error:
                raise ToolGrammarError(tool.name, f"{told}, which {error}") from None
            opening = f"{PARAMETER}{key}>\n"
            self.lines += [
                f"{rule}: {literal(opening)} {written} {END_OF_LINE}",
                *lines,
            ]
            parts.append(rule if key in required else f"{rule}?")
        parts += [literal(f"{END_FUNCTION}\n"), self._tag(END_TOOL_CALL)]
        self.lines.append(f"{name}: {' '.join(parts)}")
        return name

    def _tag(self, tag: str) -> str:
        return tag if tag in self._added_tokens else literal(tag)


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, dict) else {}


def _listed(value: object) -> Sequence[object]:
    return cast(list[object], value) if isinstance(value, list) else ()

"""A grammar of what the value of one parameter may be, in the qwen3 format of calls.

All that it allows is read back (`argument_values.py`, `call_reader.py`) as JSON that the schema allows.
It may allow less: where text may stand, a number is not written beside it, as it would be read as text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from service.text.argument_values import MAX_NESTING, allowed_types, resolve, value_json
from service.text.tags import ANY_TAG, END_PARAMETER

MAX_COUNTED_CHARACTERS = 256
"""Largest `minLength` and `maxLength`: a grammar has states for every character that it counts."""
MAX_TOLD_CHARACTERS = 60
"""Of a client's text in a message about it."""
CLOSING = f"\n{END_PARAMETER}"
TAG_IN_TEXT = r"<\/(parameter|function|tool_call)>[\s\x1c-\x1f]*<|<parameter="
"""Where text is read as the end of its value."""
READABLE = rf"~/(?s:.*)({TAG_IN_TEXT})(?s:.*)/ & ~/<\/parameter>(?s:.*)/"
COMBINATIONS = ("$ref", "anyOf", "oneOf", "allOf")
CONDITIONS = ("pattern", "not", "if", "then", "else")
"""What text is not held to."""
BESIDE_COMBINATIONS = (*CONDITIONS, "type", "enum", "const", "minLength", "maxLength")
CONTAINERS = {"object": "{", "array": "["}


class SchemaError(Exception):
    """Replies cannot be held to a schema. The message, behind a name, is for clients."""


def value_grammar(
    rule: str, schema: object, root: Mapping[str, object]
) -> tuple[str, Sequence[str]]:
    """Returns an expression for a value with what closes it, and the rules that it needs.

    Args:
      rule: begins the names of those rules.
      schema: of the value; anything but a mapping: none.
      root: the schema of all arguments, for references.

    Raises:
      SchemaError: it cannot be done exactly.
    """
    types = allowed_types(schema, root)
    if types and "string" not in types:
        written = _json(cast(Mapping[str, object], schema), root)
        return f"{written} {literal(CLOSING)}", ()
    bodies: dict[str, None] = {}
    others: list[str] = []
    constants: list[str] = []
    for leaf in _leaves(schema, root, MAX_NESTING):
        own = allowed_types(leaf, root)
        values = [leaf["const"]] if "const" in leaf else leaf.get("enum")
        if isinstance(values, list):
            constants += [_constant(value, types) for value in cast(list[object], values)]
            continue
        if not own or "string" in own:
            bodies[_text(leaf, types)] = None
        elif "null" in own:
            constants.append(literal("null"))
        if containers := sorted(own & CONTAINERS.keys()):
            others.append(_json({**leaf, "type": containers}, root))
    # Text and a constant could be the same: there the constants are left out.
    closed = [f"({' | '.join(each)}) {literal(CLOSING)}" for each in (others, constants) if each]
    if not bodies:
        return f"({' | '.join(closed)})", ()
    names = [f"{rule}_text{number}" for number in range(len(bodies))]
    lines: list[str] = []
    for name, body in zip(names, bodies, strict=True):
        terminal = name.upper()
        lines += [f"{name}[suffix={literal(CLOSING)}]: {terminal}", f"{terminal}: {body}"]
    return f"({' | '.join([*names, *closed[: len(others) > 0]])})", lines


def literal(text: str) -> str:
    """A string of the Lark language: that of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _leaves(
    schema: object, root: Mapping[str, object], depth: int
) -> Iterator[Mapping[str, object]]:
    """The alternatives of a schema, with references followed."""
    known = isinstance(schema, Mapping)
    fields: Mapping[str, object] = cast(Mapping[str, object], schema) if known else {}
    used = [word for word in COMBINATIONS if word in fields]
    unmet = [w for w in (BESIDE_COMBINATIONS if used else CONDITIONS) if w in fields] + used[1:]
    if schema is False or depth == 0:
        raise SchemaError("allows nothing" if schema is False else "is nested too deep")
    if unmet:
        beside = f" beside {used[0]}" if used else ""
        raise SchemaError(f"is text with {unmet[0]}{beside}")
    if not used:
        yield fields
        return
    value = fields[used[0]]
    if isinstance(value, str):
        yield from _leaves(resolve(value, root), root, depth - 1)
        return
    alternatives = cast(list[object], value) if isinstance(value, list) else []
    if not alternatives or (used[0] == "allOf" and len(alternatives) > 1):
        raise SchemaError(f"has {used[0]} with {len(alternatives)} entries")
    for alternative in alternatives:
        yield from _leaves(alternative, root, depth - 1)


def _constant(value: object, types: frozenset[str]) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if ANY_TAG.search(text) or json.loads(value_json(text, types)) != value:
        told = ascii(text[:MAX_TOLD_CHARACTERS])
        raise SchemaError(f"allows {told}, which would be read as something else")
    return literal(text)


def _text(schema: Mapping[str, object], types: frozenset[str]) -> str:
    """A terminal for text."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for limit in (least, most):
        if limit is not None and (
            not isinstance(limit, int) or not 0 <= limit <= MAX_COUNTED_CHARACTERS
        ):
            told = f"must be in [0, {MAX_COUNTED_CHARACTERS}]"
            raise SchemaError(f"has a minLength or maxLength of {limit!r}, {told}")
    count = f".{{{least},{'' if most is None else most}}}" if least or most is not None else ".*"
    openings = "".join(f"\\{CONTAINERS[name]}" for name in sorted(types & CONTAINERS.keys()))
    not_json = rf" & ~/[\s\x1c-\x1f]*[{openings}](?s:.*)/" if openings else ""
    return f"/(?s:{count})/ & {READABLE}{not_json}"


def _json(schema: Mapping[str, object], root: Mapping[str, object]) -> str:
    whole = {**schema, "x-guidance": {"whitespace_flexible": False}}
    if "$ref" in (written := json.dumps(whole)):
        definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        written = json.dumps({**definitions, **whole})
    return f"%json {written}"

"""The text of an argument to JSON, by the type that the tool's schema declares.

The rules:
  * A value whose schema allows a string is the text itself: no leading zero, no "true", no "1e5" is
    lost. Two exceptions, both only if the schema allows them as well: exactly `null` is null, and
    text that is a JSON object or array is that.
  * Other values are read as the types that the schema allows, in this order: null ("null", "None"),
    boolean ("true", "false" in any case), integer ("5.0" is 5), number, object, array, and "1" and
    "0" as booleans last.
  * Text that is none of these stays a string, as does a value without a declared type: a call is
    never lost because of a value.
"""

import decimal
import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")
OTHER_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""What authors of schemas write instead of the names of JSON Schema."""
DIGITS = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
MAX_DIGITS = 40
"""Of an integer that is written with a point or an exponent."""
MAX_NESTING = 16
"""How deep alternatives and references are followed."""


def allowed_types(schema: object, root: Mapping[str, object]) -> frozenset[str]:
    """Returns the types of JSON that a schema allows; none if it does not say.

    Understands `type`, `nullable`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and references inside
    `root`, the schema of all arguments.
    """
    return frozenset(_Types(root).of(schema, MAX_NESTING)) & set(TYPES)


class _Types:
    """Looks for types in schemas; each reference is followed once, as one may lead to itself."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._followed: set[str] = set()

    def of(self, schema: object, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return set()
        fields = cast(Mapping[str, object], schema)
        types = {OTHER_NAMES.get(str(name), str(name)) for name in _listed(fields.get("type"))}
        if not types:
            constants = [fields["const"]] if "const" in fields else _listed(fields.get("enum"))
            types = set(map(_type_of, constants))
        for keyword in ("anyOf", "oneOf"):
            for alternative in _listed(fields.get(keyword)):
                types |= self.of(alternative, depth - 1)
        for part in _listed(fields.get("allOf")):
            required = self.of(part, depth - 1)
            types = types & required if types and required else types | required
        reference = fields.get("$ref")
        if not types and isinstance(reference, str) and reference not in self._followed:
            self._followed.add(reference)
            types = self.of(resolve(reference, self._root), depth - 1)
        return types | {"null"} if types and fields.get("nullable") is True else types


def _listed(value: object) -> Sequence[object]:
    if value is None:
        return ()
    return cast(list[object], value) if isinstance(value, list) else (value,)


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
        case list() | tuple():
            return "array"
        case _:
            return "string"


def resolve(reference: str, root: Mapping[str, object]) -> object:
    """Follows "#/$defs/Name" inside `root`; None if it leads nowhere."""
    start, *names = reference.split("/")
    value: object = root if start == "#" else None
    found: Mapping[str, object] = root if start == "#" else {}
    for name in names:
        value = step = found.get(name.replace("~1", "/").replace("~0", "~"))
        found = cast(Mapping[str, object], step) if isinstance(step, Mapping) else {}
    return value


def value_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of a value whose whole text is known."""
    stripped = text.strip()
    if "string" in types:
        candidates = [name for name in ("object", "array") if name in types]
        if text == "null" and "null" in types:
            return "null"
    else:
        candidates = [name for name in TYPES if name in types]
    for name in candidates:
        if (found := _read(stripped, name)) is not None:
            return found
    if "boolean" in candidates and stripped in ("0", "1"):
        return "true" if stripped == "1" else "false"
    return json.dumps(text, ensure_ascii=False)


def _read(text: str, name: str) -> str | None:
    """Returns the JSON of a text read as a type, or None if it is not of that type."""
    match name:
        case "null":
            return "null" if text in ("null", "None") else None
        case "boolean":
            return text.lower() if text.lower() in ("true", "false") else None
        case "integer":
            return _integer(text)
        case "number":
            return _integer(text) if DIGITS.fullmatch(text) else _number(text)
        case _:
            return _container(text, "{" if name == "object" else "[")


def _integer(text: str) -> str | None:
    if DIGITS.fullmatch(text):
        return str(int(text))
    if not NUMBER.fullmatch(text):
        return None
    number = decimal.Decimal(text)
    if number.adjusted() >= MAX_DIGITS or number != number.to_integral_value():
        return None
    return str(int(number))


def _number(text: str) -> str | None:
    if not NUMBER.fullmatch(text):
        return None
    number = float(text)
    return json.dumps(number) if abs(number) != float("inf") else None


def _container(text: str, opening: str) -> str | None:
    """Keeps the text itself, so that nothing about it changes."""
    if not text.startswith(opening):
        return None
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

"""Fills a schema from the command line, the environment and a TOML file, in this order."""

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

PREFIX = "TANDEM_"
"""Environment variables that begin with it are settings."""
CONFIG = "config"
"""Names the file, so that no file can."""

LIMITS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:.0f}",
    "literal_error": "{expected}",
    "path_type": "a path",
    "string_too_short": "at least {min_length} character",
    "string_type": "text",
}
"""What a value must be, by pydantic's word for what is wrong with it."""

Schema = TypeVar("Schema", bound=BaseModel)
Value = TypeVar("Value")
Spelling = Callable[[str], str]
"""How a source writes the name of a setting."""


def read_settings(
    schema: type[Schema],
    groups: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Schema, dict[str, str]]:
    """Reads settings; ends the process with status 2 and a message when they are wrong.

    Args:
      schema: the settings, with their help as descriptions.
      groups: titles in the help, by the setting with which each begins.
      arguments: the command line; unset: the process's own.
      environment: variables; unset: the process's own.

    Returns:
      The settings, and where each comes from that was given.
    """
    parser = command_line(schema, groups)
    parsed, surplus = parser.parse_known_args(arguments)
    flags = vars(parsed)
    variables = from_environment(os.environ if environment is None else environment)
    named_by = flag if CONFIG in flags else variable
    file: str | None = flags.pop(CONFIG, variables.pop(CONFIG, None))
    try:
        keys = from_file(switched_off(file))
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        parser.error(f"{named_by(CONFIG)} is {file!r}, must be a TOML file: {reason}")

    def key(name: str) -> str:
        return f"{name} in {file}"

    values: dict[str, Any] = {}
    spellings: dict[str, Spelling] = {}
    for spelling, given in ((key, keys), (variable, variables), (flag, flags)):
        values |= given
        spellings |= dict.fromkeys(given, spelling)
    words = [word.partition("=")[0] for word in surplus if word.startswith("-")]
    problems = [not_a_setting(word, word, flag, schema) for word in words]
    problems = problems or [f"{word!r} belongs to no flag" for word in surplus]
    try:
        settings = schema(**values)
    except ValidationError as error:
        problems += [complaint(details, spellings, schema) for details in error.errors()]
    else:
        if not problems:
            return settings, {name: spelling(name) for name, spelling in spellings.items()}
    parser.error("; ".join(problems))


def command_line(schema: type[BaseModel], groups: Mapping[str, str]) -> argparse.ArgumentParser:
    """Returns a parser with a flag for each setting; what is not given is not in its result."""
    parser = argparse.ArgumentParser(
        prog="python -m service",
        usage="%(prog)s [--help] [--config FILE] [--SETTING VALUE]...",
        description="Serves a Qwen3.6-class checkpoint over gRPC.",
        epilog="Flags go before environment variables, these before the file, and all before the "
        "defaults. The file has the names of the flags as keys, with _ in place of -. The value "
        "none, or an empty one, switches off what can be off.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        flag(CONFIG),
        metavar="FILE",
        help=f"TOML file with settings. [default: none, {variable(CONFIG)}]",
    )
    group = parser.add_argument_group()
    for name, field in schema.model_fields.items():
        if name in groups:
            group = parser.add_argument_group(groups[name])
        default = f"default: {shown(field.default)}, {variable(name)}"
        help_text = f"{field.description} [{default}]".replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=help_text)
            continue
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        metavar = "{" + ",".join(choices) + "}" if choices else "VALUE"
        group.add_argument(flag(name), metavar=metavar, help=help_text)
    return parser


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings among variables, known and unknown.

    Kubernetes describes a service `tandem` to every container beside it in variables that begin like
    settings, `TANDEM_PORT=tcp://10.0.0.1:50051` among them: they are none.
    """
    services = [
        name.removesuffix("_SERVICE_HOST")
        for name in environment
        if name.endswith("_SERVICE_HOST") and name.removesuffix("HOST") + "PORT" in environment
    ]

    def describes_service(name: str, value: str) -> bool:
        return any(
            name.startswith((f"{service}_SERVICE_", f"{service}_PORT_"))
            or (name == f"{service}_PORT" and "://" in value)
            for service in services
        )

    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not describes_service(name, value)
    }


def from_file(file: str | None) -> dict[str, Any]:
    """Reads a TOML file, if there is one.

    Raises:
      OSError: it cannot be read.
      RuntimeError: its path begins with `~`, and no home directory is known.
      ValueError: it is no TOML.
    """
    if file is None:
        return {}
    return tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))


def flag(name: str) -> str:
    """Spells a setting for the command line."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Spells a setting for the environment."""
    return PREFIX + name.upper()


def shown(default: object) -> str:
    """Spells a default as one would give it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def switched_off(value: Value) -> Value | None:
    """Reads the words that switch a setting off, where there is only text."""
    return None if value in ("", "none") else value


def complaint(
    details: ErrorDetails, spellings: Mapping[str, Spelling], schema: type[BaseModel]
) -> str:
    """Says what is wrong: where, with which value, and what it must be."""
    reason = details.get("ctx", {})
    if not details["loc"]:
        return str(reason["error"])
    name = str(details["loc"][0])
    spelling = spellings.get(name, "default of {}".format)
    if details["type"] == "extra_forbidden":
        return not_a_setting(spelling(name), name, spelling, schema)
    if details["type"] == "value_error":
        return f"{spelling(name)} {reason['error']}"
    limit = LIMITS.get(details["type"])
    must = f"must be {limit.format(**reason)}" if limit else details["msg"]
    return f"{spelling(name)} is {details['input']!r}, {must}"


def not_a_setting(word: str, name: str, spelling: Spelling, schema: type[BaseModel]) -> str:
    """Says that a word names no setting, and which is the nearest."""
    name = name.strip("-").replace("-", "_").lower()
    (nearest,) = difflib.get_close_matches(name, schema.model_fields, n=1, cutoff=0)
    return f"{word} is not a setting, the nearest is {spelling(nearest)}"

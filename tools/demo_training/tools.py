"""Tools of the demo's chats: what a user may want of each, and what comes of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from demo_training.corpus import Function

_SHORT_LINES = 12
_CITIES = (
    "Rome",
    "Oslo",
    "Paris",
    "Berlin",
    "London",
    "Madrid",
    "Tokyo",
    "Lima",
    "Cairo",
    "Vienna",
)
_WEATHER = ("sunny", "cloudy", "rain", "snow", "wind", "fog")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a user wants of a tool, what the tool says, and what is said then."""

    request: str
    arguments: dict[str, Any]
    result: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool, and how tasks for it are made."""

    name: str
    description: str
    parameters: dict[str, str]
    """Each parameter and its type in JSON schema; all are required."""
    make_task: Callable[[Function, random.Random], Task]

    def schema(self) -> dict[str, Any]:
        """As chat templates are given it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": type_} for name, type_ in self.parameters.items()
                    },
                    "required": list(self.parameters),
                },
            },
        }


def _excerpt(function: Function) -> str:
    return "\n".join(function.code.split("\n")[:_SHORT_LINES])


def _line(choices: random.Random) -> int:
    return choices.randint(1, 900)


def _test_path(function: Function) -> str:
    return f"tests/test_{function.path.rsplit('/', 1)[-1]}"


def _read_file(function: Function, choices: random.Random) -> Task:
    path = function.path
    requests = ("Read the file {}.", "Show me {}.", "What is in {}?", "Open {}.", "Read {}.")
    return Task(
        choices.choice(requests).format(path),
        {"path": path},
        _excerpt(function),
        f"{path} has the function {function.name}.",
    )


def _write_file(function: Function, choices: random.Random) -> Task:
    requests = ("Write this to {}:\n{}", "Save this as {}:\n{}", "Put this into {}:\n{}")
    path, content = function.path, _excerpt(function)
    return Task(
        choices.choice(requests).format(path, content),
        {"path": path, "content": content},
        "ok",
        f"I wrote {path}.",
    )


def _list_files(function: Function, choices: random.Random) -> Task:
    folder = function.path.rsplit("/", 1)[0] if "/" in function.path else "."
    requests = ("List the files in {}.", "What files are in {}?", "Which files does {} have?")
    name = function.path.rsplit("/", 1)[-1]
    return Task(
        choices.choice(requests).format(folder),
        {"path": folder},
        f"{name}\n__init__.py",
        f"{folder} has two files: {name} and __init__.py.",
    )


def _search(function: Function, choices: random.Random) -> Task:
    requests = ("Search for {}.", "Find {}.", "Where is {}?", "Where is {} used?", "Look for {}.")
    line = _line(choices)
    return Task(
        choices.choice(requests).format(function.name),
        {"query": function.name},
        f"{function.path}:{line}: def {function.signature}:",
        f"{function.name} is in line {line} of {function.path}.",
    )


def _run_tests(function: Function, choices: random.Random) -> Task:
    requests = ("Run the tests in {}.", "Run {}.", "Do the tests in {} pass?", "Test {}.")
    path, passed, failed = _test_path(function), choices.randint(1, 40), choices.choice((0, 0, 1))
    answer = f"{failed} test in {path} failed." if failed else f"All tests in {path} pass."
    return Task(
        choices.choice(requests).format(path),
        {"target": path},
        f"{passed} passed, {failed} failed",
        answer,
    )


def _run_command(function: Function, choices: random.Random) -> Task:
    commands = ("python {}", "wc -l {}", "git diff {}", "ruff check {}", "cat {}")
    command = choices.choice(commands).format(function.path)
    requests = ("Run the command {}", "Run `{}`.", "Execute {}")
    return Task(
        choices.choice(requests).format(command),
        {"command": command},
        "exit status 0",
        f"{command} ended with exit status 0.",
    )


def _read_lines(function: Function, choices: random.Random) -> Task:
    first = _line(choices)
    last = first + choices.randint(1, 40)
    requests = ("Show lines {} to {} of {}.", "Read lines {} to {} of {}.")
    return Task(
        choices.choice(requests).format(first, last, function.path),
        {"path": function.path, "first": first, "last": last},
        _excerpt(function),
        f"These lines of {function.path} have the function {function.name}.",
    )


def _get_weather(function: Function, choices: random.Random) -> Task:
    del function
    city, weather = choices.choice(_CITIES), choices.choice(_WEATHER)
    requests = ("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?")
    return Task(
        choices.choice(requests).format(city),
        {"city": city},
        weather,
        f"The weather in {city}: {weather}.",
    )


TOOLS = (
    Tool("read_file", "Reads a file.", {"path": "string"}, _read_file),
    Tool("write_file", "Writes a file.", {"path": "string", "content": "string"}, _write_file),
    Tool("list_files", "Lists the files in a folder.", {"path": "string"}, _list_files),
    Tool("search", "Searches the code.", {"query": "string"}, _search),
    Tool("run_tests", "Runs tests.", {"target": "string"}, _run_tests),
    Tool("run_command", "Runs a command in a shell.", {"command": "string"}, _run_command),
    Tool(
        "read_lines",
        "Reads some lines of a file.",
        {"path": "string", "first": "integer", "last": "integer"},
        _read_lines,
    ),
    Tool("get_weather", "Says what the weather is.", {"city": "string"}, _get_weather),
)

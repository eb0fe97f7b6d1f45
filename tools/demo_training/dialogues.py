"""Chats that the demo learns from: requests for functions, and dialogues with tools.

All are rendered by the demo's own chat template, so what it learned is what it is asked.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from demo_training.corpus import Document, Function, find_functions
from demo_training.hub import CHAT_TEMPLATE
from demo_training.tools import TOOLS
from service.text.chat_template import ChatTemplate

_WITH_TOOLS, _WITH_THINKING, _WITH_SYSTEM = 0.5, 0.25, 0.3
_MOST_TOOLS = 4

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a coding assistant.",
    "You write Python. Be brief.",
    "You help with a Python project.",
)


def dialogues(documents: list[Document]) -> list[Document]:
    """Makes one chat of every short function.

    Args:
      documents: sources; those that do not parse are left out.

    Returns:
      One document a chat, in the words of the template. They depend on the sources alone.
    """
    template = ChatTemplate(CHAT_TEMPLATE.read_text(encoding="utf-8"))
    made: list[Document] = []
    for document in documents:
        for function in find_functions(document):
            digest = hashlib.sha256(f"{function.path}\n{function.code}".encode()).digest()
            choices = random.Random(digest)
            messages, tools = (
                _tool_chat(function, choices)
                if choices.random() < _WITH_TOOLS
                else _code_chat(function, choices)
            )
            text = template.render(messages, tools=tools, add_generation_prompt=False)
            made.append(Document(document.path, text))
    return made


def _code_chat(function: Function, choices: random.Random) -> tuple[list[dict[str, Any]], list]:
    """The user wants a function, and gets it."""
    request = f"Write the Python function {function.signature}. {function.purpose}".rstrip()
    answer: dict[str, Any] = {"role": "assistant", "content": function.code}
    if choices.random() < _WITH_THINKING:
        thought = f"The user wants the function {function.name}. {function.purpose}".rstrip()
        answer["reasoning_content"] = thought
    return [*_system(choices), {"role": "user", "content": request}, answer], []


def _tool_chat(
    function: Function, choices: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The user wants what one of a few tools can do."""
    offered = choices.sample(TOOLS, choices.randint(1, _MOST_TOOLS))
    tool = choices.choice(offered)
    task = tool.make_task(function, choices)
    call = {"function": {"name": tool.name, "arguments": task.arguments}}
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer: dict[str, Any] = {"role": "assistant", "content": task.answer}
    if choices.random() < _WITH_THINKING:
        wanted = task.request.split("\n")[0]
        called["reasoning_content"] = f"The user says: {wanted} I call {tool.name} for it."
    messages = [
        *_system(choices),
        {"role": "user", "content": task.request},
        called,
        {"role": "tool", "content": task.result},
        answer,
    ]
    return messages, [entry.schema() for entry in offered]


def _system(choices: random.Random) -> list[dict[str, Any]]:
    if choices.random() >= _WITH_SYSTEM:
        return []
    return [{"role": "system", "content": choices.choice(_SYSTEM)}]

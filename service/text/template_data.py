"""A chat as chat templates expect it: dictionaries by the names that the hub's templates read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from service.text.chat import Chat, ChatMessage, Tool

Mark = Callable[[str], str]
"""Is applied to every string of a client; `service/text/control_tokens.py` says why."""
THINKING_FLAGS = ("enable_thinking", "preserve_thinking")
ChatData = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, object]]


def chat_data(chat: Chat, mark: Mark, mark_assistant: Mark) -> ChatData:
    """Returns messages, tools and variables as templates expect them, strings marked by speaker."""
    messages = [
        message_data(message, mark_assistant if message.role == "assistant" else mark)
        for message in chat.messages
    ]
    variables = {name: map_text(value, mark) for name, value in chat.variables.items()}
    for name in THINKING_FLAGS:
        if (flag := getattr(chat, name)) is not None:
            variables[name] = flag
    return messages, [tool_data(tool, mark) for tool in chat.tools], variables


def message_data(message: ChatMessage, mark: Mark) -> dict[str, Any]:
    """Returns a message as templates expect it, with its strings marked."""
    role = "system" if message.role == "developer" else message.role
    data: dict[str, Any] = {"role": role, "content": _content(message, mark)}
    if message.reasoning is not None:
        data["reasoning_content"] = mark(message.reasoning)
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "type": "function",
                **({} if call.call_id is None else {"id": mark(call.call_id)}),
                "function": {
                    "name": mark(call.name),
                    "arguments": map_text(call.arguments, mark),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = mark(message.tool_call_id)
    return data


def _content(message: ChatMessage, mark: Mark) -> str | list[dict[str, str]]:
    """A string if there is nothing but text: not every template takes a list."""
    if isinstance(message.content, str):
        return mark(message.content)
    texts = [part for part in message.content if isinstance(part, str)]
    if len(texts) == len(message.content):
        return mark("".join(texts))
    return [
        {"type": "text", "text": mark(part)} if isinstance(part, str) else {"type": "image"}
        for part in message.content
    ]


def tool_data(tool: Tool, mark: Mark) -> dict[str, Any]:
    """Returns a tool as templates expect it; what is not given is not there."""
    function: dict[str, Any] = {"name": mark(tool.name)}
    if tool.description is not None:
        function["description"] = mark(tool.description)
    if tool.parameters is not None:
        function["parameters"] = map_text(tool.parameters, mark)
    return {"type": "function", "function": function}


def map_text(value: object, function: Callable[[str], str]) -> object:
    """Applies a function to every string of JSON-like data, keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[str, object], value).items()
        return {function(key): map_text(item, function) for key, item in items}
    if isinstance(value, list | tuple):
        return [map_text(item, function) for item in cast(Sequence[object], value)]
    return value

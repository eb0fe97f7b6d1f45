"""From a Chat of the contract to the chat that a template renders: every bad field at once."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from service.errors import Violation, invalid_argument, told
from service.pb import chat_pb2
from service.text.chat import Chat, ChatMessage, Tool, ToolCall, json_object
from service.unserved import not_served

ROLES = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_DEVELOPER: "developer",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
    chat_pb2.ROLE_TOOL: "tool",
}
MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_ENTRIES = 1024
"""Parts, and calls, of one message."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TOOL_NAME_LIMIT = "1 to 64 letters, digits, underscores, dots and dashes"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the reply may, or must, call."""

    read_calls: bool
    """False: what looks like a call is text."""
    wanted: tuple[Tool, ...] = ()
    """The reply must call one of these; empty: it need not call any."""
    single: bool = False
    """The reply must be one call, and not several."""


def read_chat(message: chat_pb2.Chat) -> tuple[Chat, ToolChoice]:
    """Translates a chat.

    Raises:
      ServiceError: INVALID_ARGUMENT with every violation; UNIMPLEMENTED, there is an image.
    """
    reader = _Reader()
    chat = reader.chat(message)
    choice = ToolChoice(read_calls=True)
    if message.HasField("tool_choice"):
        choice = reader.tool_choice(message.tool_choice, chat.tools)
    if reader.violations:
        raise invalid_argument(reader.violations)
    return chat, choice


class _Reader:
    """Collects what is wrong while it translates."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def chat(self, message: chat_pb2.Chat) -> Chat:
        self._check_count("chat.messages", len(message.messages), MAX_MESSAGES, least=1)
        self._check_count("chat.tools", len(message.tools), MAX_TOOLS)
        messages = [
            self._message(entry, f"chat.messages[{position}]")
            for position, entry in enumerate(message.messages[:MAX_MESSAGES])
        ]
        self._check_call_ids(messages)
        return Chat(
            messages=messages,
            tools=tuple(self._tools(message.tools[:MAX_TOOLS])),
            enable_thinking=message.enable_thinking
            if message.HasField("enable_thinking")
            else None,
            preserve_thinking=message.preserve_thinking
            if message.HasField("preserve_thinking")
            else None,
            variables=self._json("chat.variables_json", message.variables_json),
            continue_final_message=message.continue_final_message,
        )

    def tool_choice(self, message: chat_pb2.ToolChoice, tools: Iterable[Tool]) -> ToolChoice:
        named = {tool.name: tool for tool in tools}
        kind = message.WhichOneof("kind")
        if kind == "tool":
            if message.tool not in named:
                names = ", ".join(named) or "none: there are no tools"
                self._refuse("chat.tool_choice.tool", told(message.tool), f"one of {names}")
                return ToolChoice(True)
            return ToolChoice(True, (named[message.tool],), single=True)
        if kind is None:
            self._refuse("chat.tool_choice", "empty", "one of mode, tool")
        mode = message.mode if kind == "mode" else chat_pb2.ToolChoice.MODE_AUTO
        if mode == chat_pb2.ToolChoice.MODE_REQUIRED:
            if not named:
                self._refuse("chat.tool_choice.mode", "REQUIRED", "NONE or AUTO without tools")
            return ToolChoice(True, tuple(named.values()))
        if mode not in (chat_pb2.ToolChoice.MODE_NONE, chat_pb2.ToolChoice.MODE_AUTO):
            self._refuse(
                "chat.tool_choice.mode", f"{mode}", "one of NONE, AUTO, REQUIRED (1, 2, 3)"
            )
        return ToolChoice(read_calls=mode != chat_pb2.ToolChoice.MODE_NONE)

    def _message(self, message: chat_pb2.Message, path: str) -> ChatMessage:
        role = ROLES.get(message.role, "")
        if not role:
            limit = "one of SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL (1 to 5)"
            self._refuse(f"{path}.role", f"{message.role}", limit)
        if message.tool_call_id and role and role != "tool":
            self._refuse(f"{path}.tool_call_id", told(message.tool_call_id), "unset but for TOOL")
        if message.text and message.parts:
            self._refuse(f"{path}.parts", f"{len(message.parts)} parts", "unset beside text")
        self._check_count(f"{path}.parts", len(message.parts), MAX_ENTRIES)
        self._check_count(f"{path}.tool_calls", len(message.tool_calls), MAX_ENTRIES)
        parts = [
            self._part(part, f"{path}.parts[{position}]")
            for position, part in enumerate(message.parts[:MAX_ENTRIES])
        ]
        calls = [
            self._call(call, f"{path}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls[:MAX_ENTRIES])
        ]
        return ChatMessage(
            role=role,
            content=parts or message.text,
            reasoning=message.reasoning if message.HasField("reasoning") else None,
            tool_calls=calls,
            tool_call_id=message.tool_call_id or None,
        )

    def _part(self, part: chat_pb2.Part, path: str) -> str:
        kind = part.WhichOneof("kind")
        if kind == "image":
            raise not_served(f"{path}.image")
        if kind is None:
            self._refuse(path, "empty", "text or an image")
        return part.text

    def _call(self, call: chat_pb2.ToolCall, path: str) -> ToolCall:
        if not call.name:
            self._refuse(f"{path}.name", "empty", "the name of a function")
        arguments = self._json(f"{path}.arguments_json", call.arguments_json)
        return ToolCall(call.name, arguments, call.id or None)

    def _tools(self, tools: Iterable[chat_pb2.Tool]) -> Iterable[Tool]:
        names: set[str] = set()
        for position, tool in enumerate(tools):
            path = f"chat.tools[{position}]"
            if not TOOL_NAME.fullmatch(tool.name):
                self._refuse(f"{path}.name", told(tool.name), TOOL_NAME_LIMIT)
            elif tool.name in names:
                self._refuse(f"{path}.name", told(tool.name), "unlike that of another tool")
            names.add(tool.name)
            parameters = self._json(f"{path}.parameters_json", tool.parameters_json)
            yield Tool(
                tool.name, tool.description or None, parameters if tool.parameters_json else None
            )

    def _check_call_ids(self, messages: Iterable[ChatMessage]) -> None:
        """Results name calls that were made before them."""
        made: set[str] = set()
        for position, message in enumerate(messages):
            made.update(call.call_id for call in message.tool_calls if call.call_id)
            answered = message.tool_call_id
            if message.role == "tool" and answered and answered not in made:
                field = f"chat.messages[{position}].tool_call_id"
                self._refuse(field, told(answered), "the id of a call in an earlier message")

    def _json(self, field: str, text: str) -> Mapping[str, object]:
        if not text:
            return {}
        try:
            return json_object(text)
        except ValueError as error:
            why = str(error).removeprefix("is ")
            self._refuse(field, f"{told(text)} ({why})", "a JSON object")
            return {}

    def _check_count(self, field: str, count: int, most: int, least: int = 0) -> None:
        if not least <= count <= most:
            self._refuse(field, f"{count} entries", f"{least} to {most} entries")

    def _refuse(self, field: str, actual: str, limit: str) -> None:
        self.violations.append(Violation(field, actual, limit))

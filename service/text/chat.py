"""A chat as the service hands it to the checkpoint's template: plain data, no messages of gRPC."""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import cast

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak. A developer message is rendered as a system message, in every template."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of an image in a message; whoever decodes the images keeps them, in this order."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made earlier."""

    name: str
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """In the order in which they are rendered."""
    call_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """JSON Schema of the arguments; keys are rendered in this order."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    content: str | Sequence[str | ImagePart] = ""
    """Text, or texts and images; texts that follow each other are joined with nothing between."""
    reasoning: str | None = None
    """Of an assistant message. None: not given, so a template may look for it in the content."""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    """Of a tool message: the call that it answers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Everything that determines the text of a prompt, beside the template."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    enable_thinking: bool | None = None
    """None: as the template does when nothing is said."""
    preserve_thinking: bool | None = None
    """Whether reasoning of earlier turns is rendered. None: as the template does."""
    variables: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Further variables of the template; values are JSON."""
    add_generation_prompt: bool = True
    """Ends with what opens the assistant's turn."""
    continue_final_message: bool = False
    """Ends with the content of the last message, an assistant's, so that the reply continues it.

    Then there is no generation prompt, whatever `add_generation_prompt` says.
    """
    now: datetime.datetime | None = None
    """What `strftime_now` tells a template. None: the function is not defined.

    A clock would make the same chat another prompt tomorrow, so the time is part of the chat.
    """


def json_object(text: str) -> dict[str, object]:
    """Parses a JSON object: arguments of a call, a schema, variables. Keeps the order of keys.

    Raises:
      ValueError: it is no JSON, not an object, or nested too deep to be parsed.
    """
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}, must be an object")
    return cast(dict[str, object], value)

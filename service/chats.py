"""Chats into prompts, by the template of the checkpoint."""

import asyncio
import dataclasses
from collections.abc import Sequence

import grpc

from service.chat_request import ToolChoice, read_chat
from service.errors import ServiceError, Violation, invalid_argument
from service.pb import chat_pb2
from service.text.chat import Tool
from service.text.chat_output import OutputFormat, detect_format
from service.text.chat_prompt import ChatEncoder, RenderedChat
from service.text.chat_template import ChatTemplate, ChatTemplateError
from service.text.tags import END_THINK
from service.text.tokenizer import Tokenizer
from service.text.tool_grammar import ToolGrammarError, tool_grammar


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as the model reads it, and how the reply is to be read."""

    rendered: RenderedChat
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    output_format: OutputFormat
    reasoning_end: int | None
    """The id that ends reasoning, in this vocabulary; None when no single token does."""
    grammar_of_calls: str | None
    """A Lark grammar of the calls that the reply must make; None when it need not make any."""

    @property
    def open_reasoning_end(self) -> int | None:
        """The id that ends the reasoning which the prompt opens; None when it opens none."""
        return self.reasoning_end if self.rendered.reasoning_open else None


class Chats:
    """Reads chats with one checkpoint."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        output_format: OutputFormat | None = None,
    ) -> None:
        """Serves a template; `output_format` None: the one that the template teaches."""
        self._encoder = None if template is None else ChatEncoder(template, tokenizer)
        self._added_tokens = tokenizer.added_tokens
        self._reasoning_end = self._added_tokens.get(END_THINK)
        self._format: OutputFormat | None = output_format
        if output_format is None and template is not None:
            self._format = detect_format(template.source)

    @property
    def output_format(self) -> OutputFormat | None:
        """How replies are read; None when there is no template, so that chats are refused."""
        return self._format if self._encoder is not None else None

    async def prompt(self, message: chat_pb2.Chat, max_characters: int) -> ChatPrompt:
        """Renders and tokenises a chat, without holding up the event loop.

        Raises:
          ServiceError: INVALID_ARGUMENT, with every bad field or the one that the template refuses;
            UNIMPLEMENTED, there is an image; FAILED_PRECONDITION, there is no template.
        """
        return await asyncio.to_thread(self._prompt, message, max_characters)

    def _prompt(self, message: chat_pb2.Chat, max_characters: int) -> ChatPrompt:
        chat, tool_choice = read_chat(message)
        encoder, output_format = self._encoder, self.output_format
        if encoder is None or output_format is None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_CHAT_TEMPLATE",
                "chat is set, must be unset: the checkpoint has no chat template",
                metadata={"field": "chat"},
            )
        if tool_choice.wanted and output_format == "plain":
            limit = "NONE or AUTO: calls are not read from the replies of this checkpoint"
            raise invalid_argument([Violation("chat.tool_choice", "set", limit)])
        try:
            rendered = encoder.encode(chat, max_characters=max_characters)
        except ChatTemplateError as error:
            raise refused_chat(error) from None
        tools = tuple(chat.tools)
        grammar = self._grammar_of_calls(tools, tool_choice)
        return ChatPrompt(rendered, tools, tool_choice, output_format, self._reasoning_end, grammar)

    def _grammar_of_calls(self, tools: Sequence[Tool], choice: ToolChoice) -> str | None:
        if not choice.wanted:
            return None
        try:
            return tool_grammar(choice.wanted, self._added_tokens, single=choice.single)
        except ToolGrammarError as error:
            index = [tool.name for tool in tools].index(error.tool)
            actual = f"a schema that {error.reason}"
            limit = "one that calls can be held to, or chat.tool_choice NONE or AUTO"
            field = f"chat.tools[{index}].parameters_json"
            raise invalid_argument([Violation(field, actual, limit)]) from None


def refused_chat(error: ChatTemplateError) -> ServiceError:
    """What a template refuses, by the field's name in the contract."""
    field = f"chat.{error.field}".replace("chat.variables", "chat.variables_json")
    limit = f"one that it takes: {error.reason}"
    return invalid_argument([Violation(field, "refused by the chat template", limit)])

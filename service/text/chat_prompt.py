"""A chat to the prompt that is run: text and token ids."""

import dataclasses
from typing import Any

from service.text.chat import ROLES, Chat, ChatMessage
from service.text.chat_template import MAX_CHARACTERS, ChatTemplate, ChatTemplateError
from service.text.control_tokens import MarkedEncoder, Marking, checked
from service.text.reasoning import reasoning_is_open
from service.text.template_data import THINKING_FLAGS, Mark, chat_data
from service.text.tokenizer import Tokenizer

END_MARK = "\udfff"
"""Stands behind the message that is to be continued; no mark of a control token."""


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt."""

    text: str
    """What the template writes, byte for byte."""
    token_ids: tuple[int, ...]
    reasoning_open: bool
    """Whether the prompt ends inside reasoning, so that the reply begins there."""


class ChatEncoder:
    """Renders and tokenises chats with the template and the tokenizer of one checkpoint.

    The control tokens of a prompt come from the template alone: what spells one in a client's text
    (messages, tools, arguments, variables) is tokenised as text. Control tokens are the tokenizer's
    special ones. Markup tokens, the other added tokens that the template writes (<think>,
    <tool_call>, <tool_response>), are read as text, too, wherever a client has written them, with
    two exceptions: in an assistant's messages they are what the model itself wrote, and where the
    template looks for them in a text (Qwen3.6: a user's message that is a tool response) they are
    tokens throughout that chat.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        """Finds the tokens by which the template shapes a prompt."""
        self._template = template
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        self._marking = Marking(
            control=[token for token in added if tokenizer.is_special(added[token])],
            markup=[
                token
                for token in added
                if not tokenizer.is_special(added[token])
                and token.strip()
                and token in template.source
            ],
        )
        self._encoder = MarkedEncoder(tokenizer, self._marking)

    def encode(
        self,
        chat: Chat,
        *,
        parse_control_tokens: bool = False,
        max_characters: int = MAX_CHARACTERS,
    ) -> RenderedChat:
        """Returns the prompt; with `parse_control_tokens`, control tokens in texts are tokens.

        Raises:
          ChatTemplateError: the chat cannot be rendered, and why; the reason and the field are fit
            for the client.
        """
        try:
            self._check(chat)
            if parse_control_tokens:
                marked = self._render(chat, _unchanged, _unchanged, max_characters)
                (token_ids,) = self._tokenizer.encode_batch([marked])
            else:
                marked = self._render_marked(chat, max_characters)
                token_ids = self._encoder.encode(marked)
        except ChatTemplateError as error:
            reason = self._marking.restore(error.reason).replace(END_MARK, "")
            raise ChatTemplateError(reason, error.field) from None
        except RecursionError:
            raise ChatTemplateError("tools, arguments or variables are nested too deep") from None
        return RenderedChat(
            self._marking.restore(marked),
            token_ids,
            reasoning_is_open(self._marking.last_turn(marked)),
        )

    def _render_marked(self, chat: Chat, max_characters: int) -> str:
        mark_control, mark_all = self._marking.mark_control, self._marking.mark_all
        sparing = self._render(chat, mark_control, mark_control, max_characters)
        if chat_data(chat, mark_all, mark_control) == chat_data(chat, mark_control, mark_control):
            return sparing
        try:
            full = self._render(chat, mark_all, mark_control, max_characters)
        except ChatTemplateError:
            return sparing
        # Where marks change what the template does, it looks for markup in the text.
        same = self._marking.restore(full) == self._marking.restore(sparing)
        return full if same else sparing

    def _render(self, chat: Chat, mark: Mark, mark_assistant: Mark, max_characters: int) -> str:
        """Renders with the strings of the chat marked."""
        messages, tools, variables = chat_data(chat, mark, mark_assistant)
        if chat.continue_final_message:
            _mark_end(messages[-1])
        text = self._template.render(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            now=chat.now,
            max_characters=max_characters,
        )
        return _cut_at_end_mark(text) if chat.continue_final_message else text

    def _check(self, chat: Chat) -> None:
        """Refuses what the template would leave out without a word, and what is no chat at all."""
        template = self._template
        if not chat.messages:
            raise ChatTemplateError("a chat needs at least one message")
        for index, message in enumerate(chat.messages):
            _check_message(message, f"messages[{index}]", template.source)
        if chat.tools and "tools" not in template.variables:
            raise ChatTemplateError("the chat template of this checkpoint takes no tools", "tools")
        for name in THINKING_FLAGS:
            if getattr(chat, name) is not None and name not in template.variables:
                raise ChatTemplateError(f"the chat template has no {name}", name)
            if name in chat.variables:
                raise ChatTemplateError(f"{name!r} is a field of its own", "variables")
        template.check_variables(chat.variables)
        _check_texts(chat)
        final = chat.messages[-1]
        if chat.continue_final_message and (final.role != "assistant" or final.tool_calls):
            raise ChatTemplateError(
                "only an assistant's message without tool calls can be continued",
                "continue_final_message",
            )


def _check_texts(chat: Chat) -> None:
    """Before any work is done on them: strings are text, and not too much of it."""
    size = 0

    def count(text: str) -> str:
        nonlocal size
        size += len(checked(text))
        return text

    chat_data(chat, count, count)
    if size > MAX_CHARACTERS:
        raise ChatTemplateError(f"the chat has {size} characters, at most {MAX_CHARACTERS}")


def _check_message(message: ChatMessage, path: str, source: str) -> None:
    if message.role not in ROLES:
        raise ChatTemplateError(
            f"is {message.role!r}, must be one of {', '.join(ROLES)}", f"{path}.role"
        )
    if message.role != "assistant" and (message.tool_calls or message.reasoning is not None):
        raise ChatTemplateError("only an assistant reasons and calls tools", path)
    if message.tool_calls and "tool_calls" not in source:
        raise ChatTemplateError(
            "the chat template of this checkpoint takes no tool calls", f"{path}.tool_calls"
        )
    if message.reasoning and "reasoning_content" not in source:
        raise ChatTemplateError(
            "the chat template of this checkpoint takes no reasoning", f"{path}.reasoning"
        )


def _mark_end(message: dict[str, Any]) -> None:
    """Marks the end of a message; the space behind shows whether the template trims it."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}{END_MARK} "
    elif content[-1]["type"] == "text":
        content[-1]["text"] += f"{END_MARK} "
    else:
        raise ChatTemplateError("ends with an image and cannot be continued", "messages")


def _cut_at_end_mark(text: str) -> str:
    head, mark, rest = text.rpartition(END_MARK)
    if not mark:
        raise ChatTemplateError(
            "the chat template leaves out the message that is to be continued",
            "continue_final_message",
        )
    return head if rest.startswith(" ") else head.rstrip()


def _unchanged(text: str) -> str:
    return text

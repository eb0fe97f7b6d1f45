"""The checkpoint's chat template: messages to the text of a prompt.

The environment offers what transformers' `apply_chat_template` offers, with these differences, all
so that the same chat is always the same prompt: `strftime_now` exists only when the chat brings
the time (`Chat.now`), and the filter `random` and the function `lipsum` do not exist.

The template is the operator's, the data are a client's. So: the sandbox, no attribute of Python
objects behind the data, a bound on the size of the text, and no way for an exception to be anything
but a `ChatTemplateError`. There is no time limit: the work of a template is a loop over data whose
size is bounded, and a clock would make the result depend on the load.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 16 * 1024 * 1024
"""Bound on a rendered prompt when the caller has no tighter one."""
MAX_REASON_CHARACTERS = 300
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now"})
"""Set by the service alone."""


class ChatTemplateError(Exception):
    """The chat cannot be rendered: the client's mistake, told without a trace."""

    def __init__(self, reason: str, field: str = "messages") -> None:
        """Takes one sentence and the path of the field that it is about."""
        super().__init__(reason)
        self.reason = reason
        self.field = field


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles a template; it may write `special_tokens`, as bos_token, by name.

        Raises:
          ValueError: the template has a syntax error.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = new_environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None
        functions = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
        self._reserved = OWN_VARIABLES | functions.keys() | self._special_tokens.keys()

    @classmethod
    def from_directory(cls, checkpoint: Path) -> "ChatTemplate | None":
        """Loads `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, if any.

        Of several named templates it takes the one named "default".

        Raises:
          ValueError: the template, or the configuration around it, is broken.
        """
        path, config_path = checkpoint / "chat_template.jinja", checkpoint / "tokenizer_config.json"
        config: dict[str, object] = {}
        if config_path.is_file():
            config = json.loads(config_path.read_text(encoding="utf-8"))
        if path.is_file():
            source: object = path.read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        if isinstance(source, list):
            named = cast(list[dict[str, object]], source)
            source = {entry.get("name"): entry.get("template") for entry in named}.get("default")
        if not isinstance(source, str) or not source:
            return None
        return cls(source, _special_tokens(config))

    def check_variables(self, variables: Mapping[str, object]) -> None:
        """Refuses variables that the template would not read, or that are not a client's to set.

        Raises:
          ChatTemplateError: names the first such variable.
        """
        for name in variables:
            if name in self._reserved:
                raise ChatTemplateError(f"{name!r} is set by the service", "variables")
            if name not in self.variables:
                raise ChatTemplateError(
                    f"the chat template of this checkpoint has no variable {name!r}", "variables"
                )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        now: datetime.datetime | None = None,
        max_characters: int = MAX_CHARACTERS,
    ) -> str:
        """Renders plain data. A template that asks whether `tools` are given is told none, not [].

        Raises:
          ChatTemplateError: the template refuses the chat (the reason is the template's own), fails
            on it, or its text is longer than `max_characters`.
        """
        context: dict[str, object] = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        if now is not None:
            context["strftime_now"] = lambda pattern: now.strftime(pattern)  # pyright: ignore
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > max_characters:
                    break
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can raise anything at all
            raise ChatTemplateError(_failure(error)) from None
        if size > max_characters:
            raise ChatTemplateError(f"the prompt has more than {max_characters} characters")
        return "".join(pieces)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def new_environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    filters = cast(dict[str, object], environment.filters)  # pyright: ignore[reportUnknownMemberType]
    functions = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"], functions["raise_exception"] = to_json, _raise_exception
    del filters["random"], functions["lipsum"]
    return environment


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: unlike Jinja's own it escapes nothing for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # all but the marks of service/text/control_tokens.py
        text = re.sub("[^\0-~\ud800-\udfff]", lambda match: json.dumps(match[0])[1:-1], text)
    return text


def _raise_exception(message: object) -> None:
    raise ChatTemplateError(str(message)[:MAX_REASON_CHARACTERS])


def _failure(error: Exception) -> str:
    reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
    return f"the chat template of this checkpoint cannot render this chat: {reason}"


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The tokens that `tokenizer_config.json` names, as bos_token; each a string or an object."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = cast(dict[str, object], value).get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens

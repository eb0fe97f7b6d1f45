"""Talks with the served model in a terminal: `python tools/chat.py`.

Without --target it starts a server of its own on the embedded checkpoint. Replies stream as they are
written; reasoning is dimmed, calls of functions are shown, and their results are asked for. Ctrl-C
ends a reply, Ctrl-D the conversation; a line that ends in a backslash goes on in the next.

Commands: /new, /undo, /system TEXT, /think on|off|auto, /drafts on|off, /prompt, /help, /quit.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from chat_view import MarkedTokens, TurnView
from client import MAX_MESSAGE_BYTES, describe, figures
from google.protobuf import json_format
from local_server import ServerEndedError, local_server
from rich.console import Console

from service.pb import (
    chat_pb2,
    inference_pb2,
    inference_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

HELP = """/new           forget the conversation
/undo          forget the last question and what followed
/system TEXT   instructions for the model; without text: none
/think WHAT    on, off, or auto: as the checkpoint's template does
/drafts WHAT   on: show the tokens as they were made, drafted and accepted ones underlined; off
/prompt        show the conversation as the model would read it
/quit          or Ctrl-D"""
THINKING = {"on": True, "off": False, "auto": None}


@dataclasses.dataclass
class Conversation:
    """What was said, and how to ask for more."""

    settings: inference_pb2.GenerateRequest
    """Sampling, stopping and speculation of every request."""
    tools: list[chat_pb2.Tool]
    system: str = ""
    thinking: bool | None = None
    messages: list[chat_pb2.Message] = dataclasses.field(default_factory=list)

    def chat(self) -> chat_pb2.Chat:
        """Returns all of it, as the server takes it."""
        instructions = chat_pb2.Message(role=chat_pb2.ROLE_SYSTEM, text=self.system)
        return chat_pb2.Chat(
            messages=[*([instructions] if self.system else []), *self.messages],
            tools=self.tools,
            enable_thinking=self.thinking,
        )

    def request(self, *, marked: bool) -> inference_pb2.GenerateRequest:
        """Returns the request for the next reply; `marked` asks for each token's origin."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.settings)
        request.chat.CopyFrom(self.chat())
        if marked:
            request.include.drafted = request.include.token_bytes = True
        return request

    def say(self, text: str) -> None:
        """Adds what the person said."""
        self.messages.append(chat_pb2.Message(role=chat_pb2.ROLE_USER, text=text))

    def add_reply(self, reply: inference_pb2.Delta) -> list[chat_pb2.ToolCall]:
        """Adds what the model said; returns the calls that it wants answered."""
        calls = [
            chat_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in reply.tool_calls
        ]
        self.messages.append(
            chat_pb2.Message(
                role=chat_pb2.ROLE_ASSISTANT,
                text=reply.text,
                reasoning=reply.reasoning or None,
                tool_calls=calls,
            )
        )
        return calls

    def answer(self, call: chat_pb2.ToolCall, result: str) -> None:
        """Adds the result of a call."""
        self.messages.append(
            chat_pb2.Message(role=chat_pb2.ROLE_TOOL, text=result, tool_call_id=call.id)
        )

    def undo(self) -> None:
        """Forgets everything from the last question on."""
        while self.messages and self.messages.pop().role != chat_pb2.ROLE_USER:
            pass


class Terminal:
    """The conversation's two ends: a console and a server."""

    def __init__(
        self,
        channel: grpc.Channel,
        conversation: Conversation,
        console: Console,
        read_line: Callable[[str], str] = input,
    ) -> None:
        """Asks nothing of the server yet; `read_line` shows a prompt and raises EOFError at the end."""
        self.marked = False
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._conversation = conversation
        self._console = console
        self._read_line = read_line

    def run(self) -> None:
        """Talks until the person ends it."""
        while True:
            try:
                text = self._read("> ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._console.print()
                continue
            if text == "/quit":
                return
            try:
                if text.startswith("/"):
                    self._command(*text[1:].partition(" ")[::2])
                elif text:
                    self._conversation.say(text)
                    self._reply()
            except grpc.RpcError as error:
                self._console.print(describe(error), style="red", markup=False)
                if not text.startswith("/"):
                    self._conversation.undo()

    def _read(self, prompt: str) -> str:
        lines = [self._read_line(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line(". "))
        return "\n".join(lines)

    def _reply(self) -> None:
        """One reply, and those that follow from the calls in it."""
        while calls := self._conversation.add_reply(self._stream()):
            for call in calls:
                try:
                    result = self._read(f"result of {call.name}: ")
                except (EOFError, KeyboardInterrupt):
                    result = "The call was declined."
                    self._console.print(result, style="dim")
                self._conversation.answer(call, result)

    def _stream(self) -> inference_pb2.Delta:
        """Shows a reply as it comes. One that Ctrl-C ends keeps its text and loses its calls."""
        view = MarkedTokens(self._console) if self.marked else TurnView(self._console)
        reply = inference_pb2.Delta()
        started_at, first_at = time.monotonic(), 0.0
        call = self._inference.Generate(self._conversation.request(marked=self.marked))
        try:
            for message in call:
                if message.WhichOneof("kind") == "delta":
                    first_at = first_at or time.monotonic()
                    view.show(message.delta)
                    join(reply, message.delta)
                elif message.WhichOneof("kind") == "finished":
                    view.end(reply)
                    seconds = time.monotonic() - started_at
                    line = figures(message.finished, seconds, first_at and first_at - started_at)
                    self._console.print(line, style="dim", highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            del reply.tool_calls[:]
            view.end(reply)
            self._console.print("interrupted", style="dim")
        finally:
            call.cancel()  # of a call that has ended, it does nothing
        return reply

    def _command(self, name: str, argument: str) -> None:
        conversation = self._conversation
        match name, argument:
            case "new", "":
                conversation.messages.clear()
            case "undo", "":
                conversation.undo()
            case "system", _:
                conversation.system = argument
            case "think", "on" | "off" | "auto":
                conversation.thinking = THINKING[argument]
            case "drafts", "on" | "off":
                self.marked = argument == "on"
            case "prompt", "":
                request = tokenizer_pb2.TokenizeRequest(chat=conversation.chat())
                prompt = self._tokenizer.Tokenize(request)
                self._console.print(prompt.rendered, style="dim", markup=False, highlight=False)
                self._console.print(f"{len(prompt.token_ids)} tokens", style="dim")
            case _:
                self._console.print(HELP, style="dim", markup=False, highlight=False)


def join(reply: inference_pb2.Delta, piece: inference_pb2.Delta) -> None:
    """Appends a piece of a reply to what there is of it."""
    reply.text += piece.text
    reply.reasoning += piece.reasoning
    for call in piece.tool_calls:
        if call.index == len(reply.tool_calls):
            reply.tool_calls.add()
        whole = reply.tool_calls[call.index]
        whole.id += call.id
        whole.name += call.name
        whole.arguments_json += call.arguments_json


def read_tools(path: Path) -> list[chat_pb2.Tool]:
    """Reads a JSON list of functions: name, description, parameters (a JSON schema).

    Raises:
      ValueError: it is no such list.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: not a list of functions")
    tools = []
    for entry in entries:
        unknown = entry.keys() - {"name", "description", "parameters"}
        if unknown or "name" not in entry:
            raise ValueError(f"{path}: a function has name, description and parameters: {entry}")
        tools.append(
            chat_pb2.Tool(
                name=entry["name"],
                description=entry.get("description", ""),
                parameters_json=json.dumps(entry["parameters"]) if "parameters" in entry else "",
            )
        )
    return tools


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", help="host:port of a running server; default: start one")
    add("--system", default="", help="instructions for the model")
    add("--tools", type=Path, help="JSON file: a list of {name, description, parameters}")
    add("--think", choices=THINKING, default="auto", help="default: as the template does")
    add("--drafts", action="store_true", help="mark the tokens that were drafted and accepted")
    add("--max-tokens", type=int, default=1024, help="per reply [%(default)s]")
    add("--max-reasoning-tokens", type=int, help="default: no limit")
    add("--max-draft-tokens", type=int, help="0 turns drafting off")
    add("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    add("--seed", type=int, help="default: random")
    return parser.parse_args()


def begin(arguments: argparse.Namespace) -> Conversation:
    """Returns an empty conversation with the options of the command line."""
    settings: dict[str, dict[str, object]] = {
        "sampling": {"temperature": arguments.temperature, "seed": arguments.seed},
        "stopping": {
            "max_tokens": arguments.max_tokens,
            "max_reasoning_tokens": arguments.max_reasoning_tokens,
        },
        "speculation": {"max_draft_tokens": arguments.max_draft_tokens},
    }
    return Conversation(
        json_format.ParseDict(settings, inference_pb2.GenerateRequest()),
        read_tools(arguments.tools) if arguments.tools else [],
        arguments.system,
        THINKING[arguments.think],
    )


def main() -> int:
    """Runs the tool; returns its exit code."""
    arguments = parse_arguments()
    # So that a server of our own is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` its history and keys)
    try:
        conversation = begin(arguments)
        if arguments.target is None:
            print("starting a server; the first start compiles for a minute", file=sys.stderr)
        server = contextlib.nullcontext(arguments.target) if arguments.target else local_server()
        options = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
        with server as target, grpc.insecure_channel(target, options) as channel:
            terminal = Terminal(channel, conversation, Console())
            terminal.marked = arguments.drafts
            terminal.run()
    except (OSError, ServerEndedError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The terminal chat, as a person uses it: what is asked for, and what is shown."""

import asyncio
import io
import json
from typing import Any

import grpc
import pytest
from chat import Conversation, Terminal, read_tools
from rich.console import Console

from demo_chat import DEMO, LIMITS, TOKENIZER, written
from fakes import FakeExecutor
from live_server import live_server
from service.pb import chat_pb2, inference_pb2

TOOL = chat_pb2.Tool(name="add", parameters_json='{"properties": {"a": {"type": "integer"}}}')
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"


async def talk(
    lines: list[str], replies: list[str], *, colours: bool = False, marked: bool = False, **fields
) -> tuple[str, Any]:
    """Types lines, gets scripted replies in turn; returns what was shown, and the executor."""
    out = io.StringIO()
    console = Console(
        file=out, width=100, force_terminal=colours, color_system="truecolor" if colours else None
    )
    typed = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        out.write(f"{prompt}{line}\n")
        return line

    scripts = {f"turn{number}": written(text) for number, text in enumerate(replies)}
    executor = FakeExecutor(LIMITS, replies=scripts, accepts=(2, 0))
    async with live_server(DEMO, executor=executor) as live:
        conversation = Turns(inference_pb2.GenerateRequest(), **{"tools": [], **fields})

        def run() -> None:
            with grpc.insecure_channel(live.target) as channel:
                terminal = Terminal(channel, conversation, console, read_line)
                terminal.marked = marked
                terminal.run()

        await asyncio.to_thread(run)
    return out.getvalue(), executor


class Turns(Conversation):
    """Names its requests, so that the fake knows what to reply."""

    def request(self, *, marked: bool) -> inference_pb2.GenerateRequest:
        request = super().request(marked=marked)
        self.turn = getattr(self, "turn", -1) + 1
        request.request_id = f"turn{self.turn}"
        return request


def prompts(executor: FakeExecutor) -> list[str]:
    return [TOKENIZER.decode(r.prompt_ids, include_special=True) for r in executor.inserted]


async def test_a_conversation():
    shown, executor = await talk(
        ["hello", "/system Be brief.", "more\\", "of it", "/undo", "/new", "again"],
        ["one", "two", "three"],
    )
    lines = shown.splitlines()
    assert lines[:2] == ["> hello", "one"]
    assert "tokens/s" in lines[2] and lines[2].endswith("END_OF_SEQUENCE")
    first, second, third = prompts(executor)
    assert first == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert second == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nmore\nof it<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert third.endswith(
        "Be brief.<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_reasoning_and_calls_look_unlike_text():
    shown, executor = await talk(
        ["/think on", "what is 5?", "five"],
        [f"hm\n</think>\n\nLet me see.\n\n{CALL}", "It is five."],
        colours=True,
        tools=[TOOL],
    )
    assert "\x1b[2;3mhm" in shown
    assert "\x1b[36m→ add " in shown
    assert '{"a": 5}' in "".join(shown.split("\x1b[36m")).replace("\x1b[0m", "")
    assert "result of add: five" in shown
    assert shown.count("tokens/s") == 2
    assert "<tool_response>\nfive\n</tool_response>" in prompts(executor)[1]


async def test_drafted_tokens_are_marked():
    shown, _ = await talk(["hi"], ["one two three 漢字"], colours=True, marked=True)
    assert "\x1b[4;32m" in shown
    plain, _ = await talk(["hi"], ["one two three 漢字"], marked=True)
    assert "one two three 漢字" in plain
    assert "\x1b" not in plain


async def test_the_prompt_is_shown_and_help_is_given():
    shown, executor = await talk(["/prompt", "hello", "/prompt", "/what", "/think maybe"], ["one"])
    assert "chat.messages is 0 entries" in shown
    assert "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|>" in shown
    assert shown.count("/undo") == 2
    assert len(executor.inserted) == 1


async def test_a_question_that_is_refused_is_forgotten():
    shown, executor = await talk(["x y " * 6000, "hello"], ["", "one"])
    assert "INVALID_ARGUMENT" in shown
    assert prompts(executor) == ["<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]


def test_tools_come_from_a_file(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}]))
    first, second = read_tools(path)
    assert (first.name, first.parameters_json) == ("f", '{"type": "object"}')
    assert (second.name, second.parameters_json) == ("g", "")
    for wrong in ({"name": "f"}, [{"title": "f"}], [{"name": "f", "args": {}}]):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"tools\.json"):
            read_tools(path)

"""The embedded checkpoint: small, loadable, and with a draft head that earns its place."""

from __future__ import annotations

import ast
import functools
import pathlib

import numpy as np
from tokenizers import Tokenizer

import model as model_package
import tiny
from service.engine.executor import load_executor
from service.engine.types import Request, SamplingParams
from service.text.chat import Tool
from service.text.chat_output import ChatOutputParser
from service.text.chat_template import ChatTemplate
from service.text.output_events import ContentDelta, ToolCallStart

DEMO = pathlib.Path(model_package.__file__).parent / "demo"
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\ndef read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def is_prime(number):\n    ",
)
TOKENS = 96


@functools.cache
def driver() -> tiny.Driver:
    executor = load_executor(
        DEMO,
        slots=2,
        max_context=256,
        page_size=32,
        pages=None,
        draft_length=3,
        rounds_per_call=4,
        prefill_chunk=64,
        dtype="float32",
        addressable_tokens=tokenizer().get_vocab_size(),
    )
    return tiny.Driver(executor)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def reply(prompt: str, cap: int, temperature: float) -> list[int]:
    request = Request(
        "r",
        tuple(tokenizer().encode(prompt).ids),
        TOKENS,
        SamplingParams(temperature=temperature, top_p=0.95, seed=1),
    )
    return driver().run(request, cap)


def test_it_is_under_40_megabytes():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 40e6


def test_rows_without_a_token_exist_and_are_masked():
    """As on the hub, the output head has more rows than the tokenizer has tokens."""
    assert tokenizer().get_vocab_size() < driver().executor._config.vocab_size
    assert driver().executor.limits.vocab_size == tokenizer().get_vocab_size()


def test_replies_do_not_depend_on_drafting_and_drafts_are_accepted():
    """Case 6, second half: acceptance falls with depth, and is nothing by chance."""
    rounds = []
    for temperature in (0.0, 0.8):
        for prompt in PROMPTS:
            want = reply(prompt, 0, temperature)
            assert reply(prompt, 3, temperature) == want
            for call in driver().rounds[0]:
                rounds += list(zip(call.drafted, call.accepted, strict=True))
    full = np.array([accepted for drafted, accepted in rounds if drafted == 3])
    by_position = [(full > position).mean() for position in range(3)]
    assert by_position[0] > 0.4
    assert by_position[0] > by_position[1] > by_position[2] > 0.05


def test_it_continues_with_recognisable_python():
    """Most greedy lines that are complete parse as Python on their own or as a block's head."""
    lines: list[str] = []
    for prompt in PROMPTS:
        text = tokenizer().decode(reply(prompt, 3, 0.0))
        lines += [line.strip() for line in text.splitlines()[:-1] if line.strip()]
    good = sum(parses(line) or parses(line + "\n    pass") for line in lines)
    assert good / len(lines) > 0.5, lines


def test_a_chat_about_a_file_gets_the_call_that_reads_it():
    """The template, the parser and what the demo learned fit together."""
    template = ChatTemplate.from_directory(DEMO)
    assert template is not None
    path = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    function = {"name": "read_file", "description": "Reads a file.", "parameters": path}
    prompt = template.render(
        [{"role": "user", "content": "Read the file setup.py."}],
        tools=[{"type": "function", "function": function}],
    )
    text = tokenizer().decode(reply(prompt, 3, 0.0), skip_special_tokens=False)
    parser = ChatOutputParser("qwen3", tools=[Tool("read_file", parameters=path)])
    events = [*parser.feed(text.split("<|im_end|>")[0]), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["read_file"]
    assert all(not isinstance(event, ContentDelta) for event in events)


def parses(line: str) -> bool:
    try:
        ast.parse(line)
    except SyntaxError:
        return False
    return True

"""Replies in pieces: reasoning, content and calls are the same however the text was cut."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_samples
from chat_replies import TOOLS, Reply, call, events_of, fold, read
from service.text.chat_output import ChatOutputParser, detect_format, merged
from service.text.detokenizer import Detokenizer
from service.text.output_events import ContentDelta, ReasoningDelta
from service.text.tags import END_THINK, END_TOOL_CALL, TAGS, THINK, TOOL_CALL
from service.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "model" / "demo"
REAL = ROOT.parent / "shared" / "qwen36"
ROME, OSLO = call("write", path="Rome"), call("write", path="Oslo")
OPEN: dict[str, Any] = {"reasoning_open": True}

FIXTURES = {
    "reasoning and a call": (
        "I will write it.\n</think>\n\n" + call("write", path="/a", content="x"),
        OPEN,
    ),
    "reasoning, content, calls": (
        "\nhm\n\nhm < 3\n</think>\n\nLook:\n\n"
        + call("write", content="<b>\n", mode="5.0", note="null")
        + f"\n{call('ping')}\nbye\n",
        OPEN,
    ),
    "draft, then a call": (f"draft\n{ROME}\n no.\n</think>\n\n{OSLO}", OPEN),
    "call in reasoning": (f"<think>\nso:\n\n{ROME}\n{OSLO}\n", OPEN),
    "block although off": ("<think>\nhm\n</think>\n\n</think>Hi <think> there", {}),
    "no closing tags": (
        "<function=write>\n<parameter=path>x<parameter=mode>1</parameter>\n<tool_call>"
        "<function=ping></tool_call>\n<tool_call>",
        {},
    ),
    "calls are text": (f"hm</think>\n\n{ROME}\n", OPEN | {"parse_tool_calls": False}),
    "plain": (f"hm\n</think>\n\n{ROME} <think>", OPEN | {"output_format": "plain"}),
}


def stripped(text: str) -> str:
    """A reply without what may be layout."""
    for layout in (THINK, END_THINK, "\n", " "):
        text = text.replace(layout, "")
    return text


class TestCuts:
    @pytest.mark.parametrize("name", FIXTURES)
    def test_one_cut_and_single_characters(self, name):
        text, options = FIXTURES[name]
        whole = events_of(text, **options)
        fold(whole)
        assert events_of(text, range(1, len(text)), **options) == whole
        for cut in range(len(text) + 1):
            assert events_of(text, [cut], **options) == whole

    @pytest.mark.parametrize("name", FIXTURES)
    def test_two_cuts(self, name):
        text, options = FIXTURES[name]
        whole = events_of(text, **options)
        for cuts in itertools.combinations(range(1, len(text)), 2):
            assert events_of(text, cuts, **options) == whole

    @settings(max_examples=400)
    @given(data=st.data())
    def test_any_cuts(self, data):
        for text, options in FIXTURES.values():
            cuts = data.draw(st.sets(st.integers(0, len(text)), max_size=30))
            assert events_of(text, cuts, **options) == events_of(text, **options)

    @settings(max_examples=2000)
    @given(data=st.data())
    def test_any_tags_in_any_order(self, data):
        """Whatever a model writes: the events do not depend on cuts, and arguments are JSON."""
        piece = st.sampled_from(
            [
                *TAGS,
                *("write>", "ping>", "nobody>", "path>", "mode>", "note>", "content>"),
                *("\n", " ", "x", "5", "null", '{"', "<", "</", "é\\", "\n</parameter>\n"),
                call("ping"),
            ]
        )
        text = "".join(data.draw(st.lists(piece, max_size=25)))
        cuts = data.draw(st.sets(st.integers(0, len(text)), max_size=len(text)))
        options = {
            "reasoning_open": data.draw(st.booleans()),
            "truncated": data.draw(st.booleans()),
            "parse_tool_calls": data.draw(st.booleans()),
        }
        whole = events_of(text, **options)
        assert events_of(text, cuts, **options) == whole
        assert events_of(text, range(1, len(text)), **options) == whole
        reply = fold(whole)
        if not reply.calls:
            assert stripped(reply.reasoning + reply.content) == stripped(text)

    @given(text=st.text(max_size=60))
    def test_text_without_tags_is_content(self, text):
        assert read(text, range(1, len(text))).content == text


class TestReasoning:
    def test_reasoning_then_a_call(self):
        text, options = FIXTURES["reasoning and a call"]
        assert read(text, **options) == Reply(
            reasoning="I will write it.", calls=[("write", {"path": "/a", "content": "x"})]
        )

    @pytest.mark.parametrize("tools", [[], TOOLS])
    @pytest.mark.parametrize(
        ("text", "reasoning_open", "truncated", "expected"),
        [
            ("Hello", False, False, Reply(content="Hello")),
            ("I think that", True, True, Reply(reasoning="I think that")),
            ("I think that\n", True, True, Reply(reasoning="I think that\n")),
            ("I think</thi", True, True, Reply(reasoning="I think</thi")),
            ("hm\n</think>\n\nHi", True, False, Reply("hm", "Hi")),
            ("<think>\nhm\n</think>\n\nHi", True, False, Reply("hm", "Hi")),
            ("\n</think>\n\nHi", True, False, Reply(content="Hi")),
            ("</think>Hi", True, False, Reply(content="Hi")),
            ("hm</think>", True, False, Reply("hm")),
            ("hm</think>\n\n", True, False, Reply("hm")),
            ("a\n\nb  \n\n</think>\n\n  code\n", True, False, Reply("a\n\nb  ", "  code\n")),
            ("<think>\nhm\n</think>\n\nHello", False, False, Reply("hm", "Hello")),
            ("\n<think>hm</think>Hello", False, False, Reply("hm", "Hello")),
            ("<think>\n\n</think>\n\nHello", False, False, Reply(content="Hello")),
            ("</think>\n\nHello", False, False, Reply(content="Hello")),
            ("<think>never closed", False, True, Reply("never closed")),
            ("a</think></think>b", True, False, Reply("a", "b")),
            ("a</think>\n<think>c</think>b", True, False, Reply("ac", "b")),
            ("say <think> or </think>.", False, False, Reply(content="say <think> or </think>.")),
            ("a <think> b</think>c", True, False, Reply("a <think> b", "c")),
            ("\n  Hello", False, False, Reply(content="\n  Hello")),
            (" \n", False, False, Reply(content=" \n")),
            ("", True, True, Reply()),
        ],
    )
    def test_split(self, tools, text, reasoning_open, truncated, expected):
        options = {"reasoning_open": reasoning_open, "truncated": truncated, "tools": tools}
        assert read(text, **options) == expected
        assert read(text, range(1, len(text)), **options) == expected

    def test_json_begins_exactly_behind_the_reasoning(self):
        """Also if the tag and the first characters come at once, and if JSON spells the tag."""
        value = json.dumps({"city": "</think><think>", "hot": True})
        assert read(f"hm\n</think>\n\n{value}", **OPEN) == Reply("hm", value)
        assert read(value) == Reply(content=value)

    def test_it_is_shown_as_it_comes(self):
        parser = ChatOutputParser("qwen3", tools=TOOLS, reasoning_open=True)
        assert parser.feed("\nhm") == [ReasoningDelta("hm")]
        assert parser.feed("\n") == []
        assert parser.feed("ok </th") == [ReasoningDelta("\nok ")]
        assert parser.feed("ink>\n\nHi") == [ContentDelta("Hi")]


class TestDrafts:
    def test_a_call_in_the_reasoning_is_none(self):
        reply = read(f"Maybe {ROME}\nNo.\n</think>\n\n{OSLO}", **OPEN)
        assert reply == Reply(reasoning=f"Maybe {ROME}\nNo.", calls=[("write", {"path": "Oslo"})])

    def test_also_at_its_end(self):
        assert read(f"Maybe {ROME}\n</think>\n\nIt is warm.", **OPEN) == Reply(
            f"Maybe {ROME}", "It is warm."
        )

    def test_calls_at_the_end_of_reasoning_that_was_never_closed(self):
        """The model has ended its turn with calls and forgot the tag."""
        text = f"Maybe {OSLO} or:\n\n{ROME}\n{call('ping')}\n"
        calls = [("write", {"path": "Rome"}), ("ping", {})]
        assert read(text, **OPEN) == Reply(reasoning=f"Maybe {OSLO} or:", calls=calls)
        assert read(text, **OPEN, truncated=True) == Reply(reasoning=text)
        for end in range(len(text.rstrip())):
            reply = read(text[:end], **OPEN, truncated=True)
            assert not reply.calls and not reply.content

    def test_no_tools_no_calls(self):
        assert read(ROME, **OPEN, tools=[]) == Reply(reasoning=ROME)

    def test_reasoning_that_only_names_the_tags_is_not_held_back(self):
        parser = ChatOutputParser("qwen3", tools=TOOLS, reasoning_open=True)
        assert parser.feed("a <tool_call> b") == [ReasoningDelta("a <tool_call> b")]
        drafted = parser.feed(f"\n{ROME}")
        assert drafted == []
        assert parser.feed(" c") == [ReasoningDelta(f"\n{ROME} c")]


class TestWithoutCalls:
    @pytest.mark.parametrize(
        "options",
        [{"parse_tool_calls": False}, {"tools": []}, {"output_format": "plain"}],
    )
    def test_calls_stay_text(self, options):
        text = f"a\n\n{ROME}\n{OSLO}\nb\n\n"
        assert read(text, **options) == Reply(content=text)

    def test_plain_text_has_no_tags(self):
        text = "\n<think>a</think>\n\nb"
        assert read(text, output_format="plain") == Reply(content=text)
        assert read(f"x{text}", output_format="plain", **OPEN) == Reply("x\n<think>a", "b")

    def test_format_of_a_template(self):
        assert detect_format(chat_samples.TEMPLATE.replace("<function=name>", "")) == "qwen3"
        assert detect_format((DEMO / "chat_template.jinja").read_text()) == "qwen3"
        assert detect_format('<tool_call>\n{"name": "f"}\n</tool_call>') == "plain"

    def test_format_of_the_real_template(self):
        path = REAL / "chat_template.jinja"
        if not path.is_file():
            pytest.skip(f"Qwen3.6's template is not in {REAL.parent.name}/{REAL.name}")
        assert detect_format(path.read_text()) == "qwen3"


@pytest.fixture(params=[DEMO, REAL], ids=["demo", "real"])
def tokenizer(request) -> Tokenizer:
    if not (request.param / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer in {request.param.name}")
    return Tokenizer.from_directory(request.param)


class TestTokens:
    """The path of a reply: ids, detokenizer, parser, in groups as draft and verify make them."""

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 1000])
    def test_groups_of_tokens(self, tokenizer, group):
        for text, options in FIXTURES.values():
            detokenizer = Detokenizer(tokenizer)
            pieces = [*map(detokenizer.feed, tokenizer.encode(text + "<|im_end|>"))]
            pieces.append(detokenizer.flush())
            ends = list(itertools.accumulate(map(len, pieces)))
            assert "".join(pieces) == text
            assert events_of(text, ends[group - 1 :: group], **options) == events_of(
                text, **options
            )

    def test_the_tags_of_the_format_have_text(self, tokenizer):
        for tag in (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL):
            token_id = tokenizer.added_tokens[tag]
            assert not tokenizer.is_special(token_id)
            assert Detokenizer(tokenizer).feed(token_id) == tag
        assert Detokenizer(tokenizer).feed(tokenizer.added_tokens["<|im_end|>"]) == ""


@pytest.mark.parametrize("key", ["content", "tags", "other"])
def test_long_values(key):
    """All of it in small pieces; a cost that grew with what was read would take minutes."""
    value = '["' + "x < y </parameter> " * 20_000 + '"]'
    text = call("write", **{key: value})
    parser = ChatOutputParser("qwen3", tools=TOOLS)
    events = [
        event for start in range(0, len(text), 4) for event in parser.feed(text[start : start + 4])
    ]
    ((_, arguments),) = fold(merged(events + parser.finish())).calls
    assert arguments == {key: json.loads(value) if key == "tags" else value}

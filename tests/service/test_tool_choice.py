"""tool_choice: what must be called is called, with arguments that the tool's schema allows."""

import itertools
import json
import re
from typing import Any

import grpc
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_chat import DEMO, END, LIMITS, TOKENIZER, ask, chat, user, written
from fakes import FakeExecutor
from live_server import failure_of, live_server
from service.engine.errors import ConstraintError
from service.pb import inference_pb2
from service.text.chat import Tool
from service.text.chat_output import ChatOutputParser
from service.text.grammar import GrammarCompiler
from service.text.output_events import ContentDelta, ToolCallArguments
from service.text.parameter_grammar import MAX_COUNTED_CHARACTERS
from service.text.tags import TAGS
from service.text.tool_grammar import ToolGrammarError, tool_grammar

COMPILER = GrammarCompiler(DEMO / "tokenizer.json", LIMITS.vocab_size, [END])
MODE = {
    "$defs": {"Mode": {"type": "string", "enum": ["r", "w<=", "null"]}},
    "properties": {"v": {"$ref": "#/$defs/Mode"}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "anything": {},
    "text or null": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "text or null, as types": {"type": ["string", "null"]},
    "text of some length": {"type": "string", "minLength": 1, "maxLength": 4},
    "text or list": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "choice": {"$ref": "#/$defs/Mode"},
    "choice or null": {"anyOf": [{"$ref": "#/$defs/Pick"}, {"type": "null"}]},
    "choice, described": {"oneOf": [{"const": "a"}, {"const": "b"}]},
    "choice, inherited": {"allOf": [{"$ref": "#/$defs/Mode"}], "title": "Mode"},
    "integer": {"type": "integer", "minimum": 0},
    "integer or null": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "boolean": {"type": "boolean"},
    "number": {"type": "number"},
    "object": {"type": "object", "properties": {"a": {"$ref": "#/$defs/Mode"}}, "required": ["a"]},
}
PIECES = ("\n", " ", "a", "null", '["r"]', "{", "12", "\x1c")
DEFINITIONS = {**MODE["$defs"], "Pick": {"enum": ["r", "w"]}}
ACCEPTED: list[tuple[str, str, object]] = [
    ("text", "src/é.py", "src/é.py"),
    ("text", "", ""),
    ("text", "\n a\n", "\n a\n"),
    ("text", "a </parameter> b\n<function=x>\n<think>", "a </parameter> b\n<function=x>\n<think>"),
    ("text", '"quoted"', '"quoted"'),
    ("anything", "5", "5"),
    ("text or null", "null", None),
    ("text or null", "abc", "abc"),
    ("text or null, as types", "null", None),
    ("text of some length", "漢字", "漢字"),
    ("text or list", "abc", "abc"),
    ("text or list", '["a","</parameter>"]', ["a", "</parameter>"]),
    ("choice", "w<=", "w<="),
    ("choice", "null", "null"),
    ("choice or null", "null", None),
    ("choice or null", "w", "w"),
    ("choice, described", "b", "b"),
    ("choice, inherited", "r", "r"),
    ("integer", "12", 12),
    ("integer or null", "null", None),
    ("integer or null", "-3", -3),
    ("boolean", "true", True),
    ("number", "1.5", 1.5),
    ("object", '{"a":"r"}', {"a": "r"}),
]
NOT_ACCEPTED = [
    ("text", "a\n</parameter>\n<parameter=v>\nb"),
    ("text", "</parameter>\n"),
    ("text", "a</parameter>\n</function>"),
    ("text", "a<parameter=v>b"),
    ("text of some length", ""),
    ("text of some length", "abcde"),
    ("text or list", "[1]"),
    ("text or list", "[a"),
    ("choice", '"r"'),
    ("choice", "x"),
    ("choice or null", "None"),
    ("integer", "-1"),
    ("integer", '"1"'),
    ("boolean", "True"),
    ("object", "{}"),
]


def tool_of(schema: dict[str, Any], name: str = "f") -> Tool:
    whole = {"type": "object", "$defs": DEFINITIONS, "properties": {"v": schema}, "required": ["v"]}
    return Tool(name, None, whole)


def call_of(value: str, key: str = "v", name: str = "f") -> str:
    parameter = f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{parameter}</function>\n</tool_call>"


def allows(tools: list[Tool], text: str, *, single: bool = True) -> bool:
    """Whether a reply may be this text, and end there."""
    return allows_tokens(tools, written(text), single=single)


def allows_value(tools: list[Tool], value: str) -> bool:
    """Whether a call may have this value, in which no tag is a token of its own."""
    before, after = call_of("|").split("|")
    parts = [before, *re.split("(?<=<)", value), after]
    return allows_tokens(tools, [*itertools.chain(*map(TOKENIZER.encode, parts)), END])


def allows_tokens(tools: list[Tool], token_ids: list[int], *, single: bool = True) -> bool:
    grammar = tool_grammar(tools, TOKENIZER.added_tokens, single=single)
    matcher = COMPILER.compile("lark", grammar).matcher()
    try:
        matcher.accept(token_ids)
    except ConstraintError:
        return False
    return True


def arguments_of(tools: list[Tool], text: str) -> list[Any]:
    """The arguments of the calls in a text that holds nothing else."""
    parser = ChatOutputParser("qwen3", tools=tools)
    events = [*parser.feed(text), *parser.finish()]
    assert not any(isinstance(event, ContentDelta) for event in events)
    fragments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallArguments):
            fragments[event.index] = fragments.get(event.index, "") + event.fragment
    return [json.loads(fragment) for fragment in fragments.values()]


class TestGrammar:
    @pytest.mark.parametrize(("schema", "value", "meant"), ACCEPTED)
    def test_a_value_is_written_as_it_is_read(self, schema, value, meant):
        tools = [tool_of(SCHEMAS[schema])]
        assert allows_value(tools, value)
        (arguments,) = arguments_of(tools, call_of(value))
        assert arguments == {"v": meant}
        assert type(arguments["v"]) is type(meant)
        jsonschema.validate(arguments, dict(tools[0].parameters or {}))

    @pytest.mark.parametrize(("schema", "value"), NOT_ACCEPTED)
    def test_a_value_that_would_be_read_otherwise(self, schema, value):
        assert not allows_value([tool_of(SCHEMAS[schema])], value)

    @settings(max_examples=400, deadline=None)
    @given(
        schema=st.sampled_from(sorted(SCHEMAS)),
        pieces=st.lists(
            st.sampled_from([*TAGS, "<parameter=v>", "<function=f>", *PIECES]),
            max_size=5,
        ),
    )
    def test_whatever_it_allows_is_one_call_that_the_schema_allows(self, schema, pieces):
        """Case 36: with any tags of the format in the value, in any order."""
        tools, value = [tool_of(SCHEMAS[schema])], "".join(pieces)
        if allows_value(tools, value):
            (arguments,) = arguments_of(tools, call_of(value))
            jsonschema.validate(arguments, dict(tools[0].parameters or {}))

    def test_what_is_required_must_be_there(self):
        schema = {"properties": {"a": {}, "b": {"type": "integer"}}, "required": ["b", "c"]}
        tools = [Tool("f", None, schema)]

        def allowed(*parameters: str) -> bool:
            inner = "".join(f"<parameter={p}\n</parameter>\n" for p in parameters)
            return allows(tools, f"\n\n<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>")

        assert allowed("a>\nx", "b>\n1", "c>\nx")
        assert allowed("b>\n1", "c>\nx")
        assert not allowed("a>\nx", "b>\n1")
        assert not allowed("b>\n1", "a>\nx", "c>\nx")
        assert not allowed("b>\n1", "b>\n1", "c>\nx")
        assert not allowed()

    def test_one_call_or_several(self):
        tools = [tool_of({}), Tool("g")]
        without = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
        assert allows(tools, without)
        assert not allows(tools, "")
        assert not allows(tools, f"Well.\n{without}")
        assert not allows(tools, without.replace("=g", "=h"))
        both = f"{call_of('x')}\n{without}"
        assert allows(tools, both, single=False)
        assert not allows(tools, both, single=True)

    def test_tags_that_are_no_tokens(self):
        grammar = tool_grammar([Tool("g")], (), single=True)
        assert '"<tool_call>"' in grammar
        assert '"</tool_call>"' in grammar

    @pytest.mark.parametrize(
        ("schema", "reason"),
        [
            ({"type": "string", "pattern": "^a"}, "is text with pattern"),
            (
                {"anyOf": [{"type": "string"}], "minLength": 1},
                "is text with minLength beside anyOf",
            ),
            ({"allOf": [{"type": "string"}, {}]}, "has allOf with 2 entries"),
            ({"type": "string", "maxLength": MAX_COUNTED_CHARACTERS + 1}, "has a minLength or"),
            ({"enum": ["1", 1]}, "allows '1', which would be read as something else"),
            ({"enum": ["</parameter>"]}, "allows '</parameter>', which would be read as"),
            (False, "allows nothing"),
            ({"$ref": "#/properties/v"}, "is nested too deep"),
        ],
    )
    def test_what_cannot_be_held_to_is_refused(self, schema, reason):
        with pytest.raises(ToolGrammarError) as caught:
            tool_grammar([tool_of(schema)], (), single=True)
        assert caught.value.tool == "f"
        assert caught.value.reason.startswith(f"declares 'v', which {reason}")

    @pytest.mark.parametrize(
        ("parameters", "reason"),
        [
            ({"properties": {"a>b": {}}}, "declares 'a>b', which calls cannot name"),
            ({"required": [" a"]}, "declares ' a', which calls cannot name"),
            ({"properties": {}, "minProperties": 1}, "has minProperties beside its properties"),
        ],
    )
    def test_arguments_that_cannot_be_held_to_are_refused(self, parameters, reason):
        with pytest.raises(ToolGrammarError) as caught:
            tool_grammar([Tool("f", None, parameters)], (), single=True)
        assert caught.value.reason == reason

    def test_a_counted_text_can_be_written_to_its_end(self):
        """The states of a matcher are bounded; counting must stay far from that."""
        schema = {"type": "string", "maxLength": MAX_COUNTED_CHARACTERS}
        text = ("x <p </pa\n</" * MAX_COUNTED_CHARACTERS)[:MAX_COUNTED_CHARACTERS]
        assert allows_value([tool_of(schema)], text)
        assert not allows_value([tool_of(schema)], text + "y")
        grammar = tool_grammar([tool_of(schema)], TOKENIZER.added_tokens, single=True)
        matcher = COMPILER.compile("lark", grammar).matcher()
        for token in written(call_of(text)):  # a mask tries the ways on, one by one
            assert any(matcher.masks([])[0])
            matcher.accept([token])


def offered(schema: object = None, name: str = "f") -> dict[str, Any]:
    whole = {"type": "object", "properties": {"v": schema or {"type": "string"}}, "required": ["v"]}
    return {"name": name, "parametersJson": json.dumps(whole)}


CALL, PROSE = call_of("x"), "It is four."
SETTINGS = [
    {"mode": "MODE_NONE"},
    {"mode": "MODE_AUTO"},
    {"mode": "MODE_REQUIRED"},
    {"tool": "f"},
]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("reply", [CALL, PROSE], ids=["call", "prose"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
async def test_the_four_settings(setting, reply, thinking):
    """Case 75: a call that must be made is made, never raw tags with OK, never a false reason."""
    text = f"hm\n</think>\n\n{reply}" if thinking else reply
    scripts = {"r": written(text)}
    executor = FakeExecutor(LIMITS, replies=scripts, accepts=(1, 0, 2))
    async with live_server(DEMO, executor=executor) as live:
        conversation = chat(
            user("2 + 2?"), tools=[offered()], toolChoice=setting, enableThinking=thinking
        )
        request = ask(conversation, stopping={"maxTokens": 120})
        (choice,) = (await live.inference.Complete(request)).choices
    assert choice.delta.reasoning == ("hm" if thinking else "")
    called = choice.finished.reason == inference_pb2.FINISH_REASON_TOOL_CALLS
    if setting == {"mode": "MODE_NONE"} or (setting == {"mode": "MODE_AUTO"} and reply == PROSE):
        assert choice.delta.text == reply
        assert not choice.delta.tool_calls
        assert not called
    elif reply == CALL:
        (call,) = choice.delta.tool_calls
        assert (call.name, json.loads(call.arguments_json)) == ("f", {"v": "x"})
        assert choice.delta.text == ""
        assert called
    else:  # the model wants no call: what it writes in one is up to it, and may not end in time
        assert choice.delta.text == ""
        assert [call.name for call in choice.delta.tool_calls][:1] == ["f"]


async def test_a_schema_that_calls_cannot_be_held_to():
    """Refused where it would have to be met, and only there."""
    pattern = offered({"type": "string", "pattern": "^a"}, "g")
    async with live_server(DEMO, executor=FakeExecutor(LIMITS)) as live:

        def asked(setting: dict[str, str]):
            conversation = chat(tools=[offered(), pattern], toolChoice=setting)
            return ask(conversation, stopping={"maxTokens": 2})

        for setting in ({"mode": "MODE_REQUIRED"}, {"tool": "g"}):
            failure = await failure_of(live.inference.Generate(asked(setting)))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            (violation,) = failure.details["BadRequest"].field_violations
            assert violation.field == "chat.tools[1].parameters_json"
            assert violation.description.startswith(
                "is a schema that declares 'v', which is text with pattern, must be one that"
            )
        for setting in ({"mode": "MODE_AUTO"}, {"tool": "f"}):
            await live.inference.Complete(asked(setting))

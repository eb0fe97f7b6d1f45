"""Calls in the XML-like format: types by the schema, recoveries, and nothing that gets lost."""

import pytest

from chat_replies import TOOLS, WRITE, Reply, call, events_of, read
from service.text.argument_values import allowed_types
from service.text.chat import Tool
from service.text.chat_output import ChatOutputParser
from service.text.output_events import ToolCallArguments, ToolCallEnd, ToolCallStart

SCHEMA = {
    "type": "object",
    "properties": {
        "zip": {"type": "string"},
        "flag": {"type": "string"},
        "num": {"type": "string"},
        "n": {"type": "integer"},
        "d": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "s": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}


def value_of(text: str, schema: object, **definitions: object) -> object:
    """What a parameter of one tool becomes, cut at every character."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    tools = [Tool("f", parameters=parameters)]
    reply = call("f", x=text)
    whole = read(reply, tools=tools)
    assert read(reply, range(1, len(reply)), tools=tools) == whole
    ((_, arguments),) = whole.calls
    return arguments["x"]


def arguments_of(text: str) -> dict[str, object]:
    """The arguments of the only call of a reply without content, cut at every character, too."""
    reply = read(text)
    assert read(text, range(1, len(text))) == reply
    assert not reply.content and not reply.reasoning
    ((name, arguments),) = reply.calls
    assert name == "write"
    return arguments


def written_while(before: str, value: str, *, key: str) -> list[str]:
    """The JSON of a value after each of its characters, as far as it is shown by then."""
    parser = ChatOutputParser("qwen3", tools=TOOLS)
    start, *events = parser.feed(f"<tool_call>\n<function=write>\n<parameter={key}>\n")
    assert isinstance(start, ToolCallStart)
    shown = []
    for character in value:
        events += parser.feed(character)
        written = "".join(e.fragment for e in events if isinstance(e, ToolCallArguments))
        assert written.startswith(before)
        shown.append(written.removeprefix(before))
    return shown


class TestTypes:
    def test_declared_types(self):
        reply = read(
            call(
                "f",
                **{"zip": "02134", "flag": "true", "num": "1e5", "n": "5.0", "d": "2026-01-15"},
                **{"b": "True", "o": '{"a":[1]}', "s": "null", "undeclared": "7"},
            ),
            tools=[Tool("f", parameters=SCHEMA)],
        )
        ((_, arguments),) = reply.calls
        assert arguments == {
            **{"zip": "02134", "flag": "true", "num": "1e5", "n": 5, "d": "2026-01-15"},
            **{"b": True, "o": {"a": [1]}, "s": None, "undeclared": "7"},
        }
        assert type(arguments["n"]) is int

    @pytest.mark.parametrize(
        ("type_name", "text", "expected"),
        [
            ("integer", "007", 7),
            ("integer", "-5", -5),
            ("integer", "+5", 5),
            ("integer", " 12 ", 12),
            ("integer", "1e3", 1000),
            ("integer", "1" * 100, int("1" * 100)),
            ("integer", "5.5", "5.5"),
            ("integer", "1_000", "1_000"),
            ("integer", "٣", "٣"),
            ("integer", "1e9999", "1e9999"),
            ("integer", "1e999999999999", "1e999999999999"),
            ("integer", "9" * 5000, "9" * 5000),
            ("integer", "null", "null"),
            ("integer", "true", "true"),
            ("integer", "", ""),
            ("number", "5", 5),
            ("number", "0.10", 0.1),
            ("number", ".5", 0.5),
            ("number", "-1e-5", -1e-5),
            ("number", "1e999", "1e999"),
            ("number", "NaN", "NaN"),
            ("number", "Infinity", "Infinity"),
            ("number", "1" * 100_000 + "x", "1" * 100_000 + "x"),
            ("boolean", "FALSE", False),
            ("boolean", "1", True),
            ("boolean", "0", False),
            ("boolean", "yes", "yes"),
            ("object", "{}", {}),
            ("object", '\n{"a":\n 1}\n', {"a": 1}),
            ("object", "[1]", "[1]"),
            ("object", '{"a": NaN}', '{"a": NaN}'),
            ("object", "{'a': 1}", "{'a': 1}"),
            ("object", '{"a":' * 9_999, '{"a":' * 9_999),
            ("array", '["a", {"b": "ü\\ud83d\\ude00"}]', ["a", {"b": "ü😀"}]),
            ("array", '{"a": 1}', '{"a": 1}'),
            ("null", "null", None),
            ("null", "None", None),
            ("null", "nil", "nil"),
            ("string", "null", "null"),
            ("string", "", ""),
            ("string", '{"a": 1}', '{"a": 1}'),
            ("string", ' "quoted" \\ \t\x00\u2028 ', ' "quoted" \\ \t\x00\u2028 '),
            ("str", "1", "1"),
            ("int", "1", 1),
            ("float", "1.5", 1.5),
            ("bool", "true", True),
            ("dict", '{"a": 1}', {"a": 1}),
            ("list", "[1]", [1]),
            ("datetime", "1", "1"),
        ],
    )
    def test_one_type(self, type_name, text, expected):
        value = value_of(text, {"type": type_name})
        assert value == expected
        assert type(value) is type(expected)

    @pytest.mark.parametrize(
        ("schema", "text", "expected"),
        [
            ({"type": ["string", "null"]}, "null", None),
            ({"type": ["string", "null"]}, "null ", "null "),
            ({"type": ["string", "null"]}, "nul", "nul"),
            ({"type": ["string", "null"]}, "nullable", "nullable"),
            ({"type": ["string", "null"]}, "None", "None"),
            ({"type": ["string", "null"]}, "5", "5"),
            ({"type": "string", "nullable": True}, "null", None),
            ({"type": ["integer", "null"]}, "null", None),
            ({"type": ["integer", "null"]}, "3", 3),
            ({"type": ["integer", "string"]}, "02134", "02134"),
            ({"type": ["integer", "boolean"]}, "1", 1),
            ({"type": ["number", "boolean"]}, "true", True),
            ({"type": ["string", "array"]}, '["a"]', ["a"]),
            ({"type": ["string", "array"]}, "[a", "[a"),
            ({"type": ["string", "array"]}, "{}", "{}"),
            ({"type": ["string", "array"]}, " text", " text"),
            ({"type": ["string", "object", "null"]}, "null", None),
            ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
            ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "3", 3),
            ({"allOf": [{"$ref": "#/$defs/A"}]}, "3", 3),
            ({"$ref": "#/$defs/A"}, "3", 3),
            ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, "null", None),
            ({"$ref": "#/$defs/Loop"}, "3", "3"),
            ({"$ref": "#/$defs/None"}, "3", "3"),
            ({"$ref": "https://example.org/schema"}, "3", "3"),
            ({"enum": ["1", "2"]}, "1", "1"),
            ({"enum": [1, 2]}, "1", 1),
            ({"enum": ["a", None]}, "null", None),
            ({"const": True}, "true", True),
            ({"const": None}, "null", None),
            ({"type": "integer", "enum": ["a"]}, "1", 1),
            ({}, "5", "5"),
            (True, "5", "5"),
            (None, "5", "5"),
            ({"type": {"odd": []}}, "5", "5"),
        ],
    )
    def test_schemas(self, schema, text, expected):
        loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
        value = value_of(text, schema, A={"type": "integer"}, Loop=loop)
        assert value == expected
        assert type(value) is type(expected)

    def test_references_that_multiply_cost_nothing(self):
        names = [f"N{n}" for n in range(30)]
        everything = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
        root = {"$defs": {name: everything for name in names} | {"N29": {"type": "integer"}}}
        assert allowed_types({"$ref": "#/$defs/N0"}, root) == {"integer"}

    def test_parameters_that_are_no_schema(self):
        for parameters in ({"properties": []}, {"properties": None}, {}, None):
            reply = read(call("f", x="1"), tools=[Tool("f", parameters=parameters)])
            assert reply.calls == [("f", {"x": "1"})]


class TestStreaming:
    def test_a_string_grows(self):
        """Nothing is held back but a newline at the end and the beginning of a tag."""
        assert written_while('{"content": ', "one\ntwo </p three", key="content") == [
            *('"o', '"on', '"one', '"one', '"one\\nt', '"one\\ntw', '"one\\ntwo', '"one\\ntwo '),
            *['"one\\ntwo '] * 3,  # "</p" may be a tag
            '"one\\ntwo </p ',
            '"one\\ntwo </p t',
            '"one\\ntwo </p th',
            '"one\\ntwo </p thr',
            '"one\\ntwo </p thre',
            '"one\\ntwo </p three',
        ]

    def test_a_string_that_may_be_null_grows_as_soon_as_it_is_not(self):
        shown = written_while('{"note": ', "nuts", key="note")
        assert shown == ["", "", '"nut', '"nuts']

    def test_other_values_come_whole(self):
        assert written_while('{"mode": ', "123", key="mode") == ["", "", ""]
        assert arguments_of(call("write", mode="123")) == {"mode": 123}

    def test_the_name_comes_first(self):
        parser = ChatOutputParser("qwen3", tools=TOOLS)
        assert parser.feed("<tool_call>\n<function=write") == []
        assert parser.feed(">") == [ToolCallStart(0, "call_0", "write")]

    def test_ids_come_from_the_caller(self):
        text = call("ping") + "\n" + call("ping")
        events = events_of(text, call_id="request-7-{}".format)
        starts = [event for event in events if isinstance(event, ToolCallStart)]
        assert starts == [
            ToolCallStart(0, "request-7-0", "ping"),
            ToolCallStart(1, "request-7-1", "ping"),
        ]


class TestForm:
    def test_as_it_should_be(self):
        text = "Let me look.\n\n" + call("write", path="/a", mode="2") + "\n" + call("ping")
        assert read(text) == Reply(
            content="Let me look.", calls=[("write", {"path": "/a", "mode": 2}), ("ping", {})]
        )

    def test_text_behind_a_call_is_content(self):
        assert read(f"a\n{call('ping')}\n\n b\n").content == "ab\n"

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "\n",
            "\n\n",
            " x ",
            "a\n",
            "\na",
            "<div>\n  <b>x</b>\n</div>",
            "<parameter>x</parameter>",
            "<config>\n  <parameter>x</parameter>\n  <parameter>y</parameter>\n</config>",
            "a </function> b",
            "a </tool_call> b",
            "</function>\nmore",
            "</tool_call>\nmore",
            "see <parameter=mode and <parameter=other>\nx",
            "<tool_call>\n<function=ping>",
            "<think>x</think>",
            "< </ </p </para",
            "x" * 10_000,
        ],
    )
    def test_values_come_back(self, value):
        assert arguments_of(call("write", path=value, content="end")) == {
            "path": value,
            "content": "end",
        }

    @pytest.mark.parametrize("name", ["nobody", "write_", "функция", "a b", 'q"\\'])
    def test_a_name_that_does_not_exist_is_a_call(self, name):
        assert read(call(name, x="5")).calls == [(name, {"x": "5"})]

    @pytest.mark.parametrize("key", ["ünï", 'a"b', "a b", "a.b[0]", ""])
    def test_keys(self, key):
        assert arguments_of(call("write", **{key: "v"})) == {key: "v"}

    def test_the_first_value_of_a_key_counts(self):
        more = "<parameter=path>\nb\n</parameter>\n<parameter=mode>\n1\n</parameter>\n"
        events = events_of(call("write", path="a").replace("</function>", f"{more}</function>"))
        (arguments,) = [e.fragment for e in events if isinstance(e, ToolCallArguments)]
        assert arguments == '{"path": "a", "mode": 1}'


RECOVERED = {
    "white space in tags": (
        "<tool_call>  \n\n <function= write >\n\n<parameter= path >\nx\n</parameter>\n\n"
        "</function>\n\n\n</tool_call>  "
    ),
    "on one line": "<tool_call><function=write><parameter=path>x</parameter></function></tool_call>",
    "no </parameter>": "<tool_call>\n<function=write>\n<parameter=path>\nx\n</function>\n</tool_call>",
    "no </parameter>, on one line": (
        "<tool_call><function=write><parameter=path>x</function></tool_call>"
    ),
    "no </function>": (
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n</tool_call>"
    ),
    "no </tool_call>": (
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n</function>\n"
    ),
    "no </parameter> nor </function>": (
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</tool_call>"
    ),
    "no closing tag": "<tool_call>\n<function=write>\n<parameter=path>\nx\n",
    "half a closing tag": "<tool_call>\n<function=write>\n<parameter=path>\nx\n</param",
    "half a last tag": (
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_"
    ),
    "half a tag behind a tag": "<tool_call>\n<function=write>\n<parameter=path>x</parameter>\n</fun",
    "no <tool_call>": "<function=write>\n<parameter=path>\nx\n</parameter>\n</function>",
    "no <tool_call>, but its end": (
        "\n<function=write>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>\n"
    ),
    "a line break before the key": (
        "<tool_call>\n<function=write>\n<parameter=\npath>\nx\n</parameter>\n</function></tool_call>"
    ),
    "text between, and no closing tag": (
        "<tool_call>\n<function=write> so:\n<parameter=path>\nx\n"
    ),
    "no > behind the name": (
        "<tool_call>\n<function=write\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>"
    ),
    "no > behind the key": (
        "<tool_call>\n<function=write>\n<parameter=path\nx\n</parameter>\n</function>\n</tool_call>"
    ),
    "text between": (
        "<tool_call>\n<function=write> so:\n<parameter=path>\nx\n</parameter>,\n</function></tool_call>"
    ),
    "a closing tag twice": (
        "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n</parameter>\n"
        "</function>\n</function>\n</tool_call>"
    ),
}


class TestRecovery:
    @pytest.mark.parametrize("name", RECOVERED)
    def test_one_call(self, name):
        assert arguments_of(RECOVERED[name]) == {"path": "x"}

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>\n<function=write>\n<parameter=path>\nx\n<parameter=mode>\n1\n</parameter>\n"
            "</function>\n</tool_call>",
            "<tool_call><function=write><parameter=path>x<parameter=mode>1</function></tool_call>",
            "<function=write><parameter=path>x<parameter=mode>1",
        ],
    )
    def test_a_value_ends_where_the_next_begins(self, text):
        assert arguments_of(text) == {"path": "x", "mode": 1}

    def test_but_not_where_the_next_is_none_of_the_tool(self):
        text = "<function=write>\n<parameter=path>\nx\n<parameter=other>\n1\n</parameter>"
        assert arguments_of(text) == {"path": "x\n<parameter=other>\n1"}

    def test_without_a_schema_the_next_begins_a_line(self):
        for parameters, expected in (
            ("<parameter=a>\nx\n<parameter=b>\n1\n</parameter>", {"a": "x", "b": "1"}),
            ("<parameter=a>\nx <parameter=b>\n1\n</parameter>", {"a": "x <parameter=b>\n1"}),
        ):
            text = f"<tool_call>\n<function=ping>\n{parameters}\n</function>\n</tool_call>"
            assert read(text).calls == [("ping", expected)]

    @pytest.mark.parametrize(
        "between",
        ["", "\n", "</function>", "</tool_call>\n", "</function>\n</tool_call>", "</function>\n"],
    )
    @pytest.mark.parametrize("opening", ["<tool_call>\n<function=ping>", "<function=ping>"])
    def test_a_call_ends_where_the_next_begins(self, between, opening):
        text = f"<tool_call>\n<function=ping>\n{between}{opening}\n</function>\n</tool_call>"
        assert read(text) == Reply(calls=[("ping", {}), ("ping", {})])

    @pytest.mark.parametrize(
        "closing", ["</function>\n", "</tool_call>\n", "</function></tool_call>"]
    )
    def test_an_open_value_ends_where_the_next_call_begins(self, closing):
        text = f"<tool_call>\n<function=write>\n<parameter=path>\nx\n{closing}{call('ping')}"
        assert read(text) == Reply(calls=[("write", {"path": "x"}), ("ping", {})])

    @pytest.mark.parametrize("closing", ["</parameter>", "</parameter>\n\n", "</function>"])
    @pytest.mark.parametrize("opening", ["<tool_call><function=ping>", "<function=ping>"])
    def test_also_on_one_line(self, closing, opening):
        text = f"<tool_call><function=write><parameter=path>x{closing}{opening}</function>"
        assert read(text) == Reply(calls=[("write", {"path": "x"}), ("ping", {})])

    def test_a_value_may_end_with_what_could_begin_a_tag(self):
        for end in ("a <", "a </para", "a <parameter=mode"):
            assert arguments_of(f"<function=write>\n<parameter=path>\n{end}") == {"path": end}

    def test_text_in_a_call_that_does_not_go_on_is_content(self):
        start = "<tool_call>\n<function=ping>\n"
        assert read(start + "It is 5.").content == "It is 5."
        assert read(start + "It is 5.\n" + call("ping")) == Reply(
            content="It is 5.", calls=[("ping", {}), ("ping", {})]
        )

    def test_a_name_at_the_end_of_the_reply(self):
        text = "<tool_call>\n<function=ping"
        assert read(text).calls == [("ping", {})]
        assert read(text, truncated=True) == Reply(content=text)
        assert read(text[:-1]) == Reply(content=text[:-1])


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> for calls.",
        "<tool_call>\n\n",
        "<tool_call>",
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call><tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=\n\n",
        "<tool_call>\n<function=" + "x" * 300 + ">\n</function>",
        "Write <function=write> inline.",
        "<function=unknown>\n</function>\n",
        "\n<function=" + "y" * 300 + "\n",
        "</tool_call></function></parameter><parameter=x>",
        "a < b <= c <- d <",
        "a <tool_",
        "\n\n",
        "ends with newlines\n\n",
        "",
    ],
)
def test_what_is_no_call_is_content(text):
    assert read(text) == Reply(content=text)
    assert read(text, range(1, len(text))) == Reply(content=text)


class TestTruncation:
    def ends(self, text: str, *, truncated: bool) -> list[bool]:
        events = events_of(text, truncated=truncated)
        return [event.complete for event in events if isinstance(event, ToolCallEnd)]

    def test_a_call_that_was_cut_is_marked(self):
        text = call("write", path="/a", content="b", mode="12")
        whole = text.index("</function>") + len("</function>")
        for end in range(text.index("write>") + len("write>"), len(text) + 1):
            assert self.ends(text[:end], truncated=True) == [end >= whole]
            assert self.ends(text[:end], truncated=False) == [True]
            reply = read(text[:end], truncated=True)
            ((name, arguments),) = reply.calls
            assert name == "write" and not reply.content
            assert "/a".startswith(arguments.get("path", ""))

    def test_a_closing_tag_in_a_value_does_not_make_it_whole(self):
        text = "<function=write>\n<parameter=path>\na </function> b"
        assert self.ends(text, truncated=True) == [False]

    def test_the_calls_before_are_whole(self):
        assert self.ends(call("ping") + call("write", path="/a")[:40], truncated=True) == [
            True,
            False,
        ]


def test_tools_that_share_the_parser_do_not_share_schemas():
    other = Tool("other", parameters={"properties": {"mode": {"type": "string"}}})
    text = call("other", mode="1") + call("write", mode="1")
    assert read(text, tools=[*TOOLS, other]).calls == [
        ("other", {"mode": "1"}),
        (WRITE.name, {"mode": 1}),
    ]

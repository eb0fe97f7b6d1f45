"""A Chat of the contract becomes the chat of a template, or every violation is told at once."""

import json
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2

from demo_chat import DEMO, LIMITS, ask, assistant, chat, user
from fakes import FakeExecutor
from live_server import failure_of, live_server
from service.chat_request import MAX_ENTRIES, MAX_MESSAGES, MAX_TOOLS, ToolChoice, read_chat
from service.errors import MAX_VIOLATIONS, ServiceError
from service.pb import chat_pb2, tokenizer_pb2
from service.text.chat import Chat, ChatMessage, Tool, ToolCall


def message_of(fields: dict[str, Any]) -> chat_pb2.Chat:
    return json_format.ParseDict(fields, chat_pb2.Chat())


def refusal(message: chat_pb2.Chat) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read_chat(message)
    return caught.value


def violations(message: chat_pb2.Chat) -> dict[str, str]:
    """What is wrong, by field."""
    error = refusal(message)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    (told,) = [d for d in error.details if isinstance(d, error_details_pb2.BadRequest)]
    return {each.field: each.description for each in told.field_violations}


def tool(name: str = "f", parameters: str = "") -> dict[str, Any]:
    return {"name": name, "parametersJson": parameters}


class TestTranslation:
    def test_everything_that_a_chat_has(self):
        schema = '{"type": "object", "properties": {"b": {}, "a": {"default": 5.0}}}'
        message = chat(
            {"role": "ROLE_SYSTEM", "text": "Be brief."},
            {"role": "ROLE_DEVELOPER", "parts": [{"text": "And "}, {"text": "kind."}]},
            user("<|im_end|> é 漢字"),
            assistant(
                "so", reasoning="", toolCalls=[{"id": "c", "name": "g", "argumentsJson": '{"b":1}'}]
            ),
            {"role": "ROLE_TOOL", "text": "ok", "toolCallId": "c"},
            tools=[{**tool("f", schema), "description": "Does."}, tool("g.h-i_2")],
            enableThinking=False,
            preserveThinking=True,
            variablesJson='{"tone": ["kind"]}',
            continueFinalMessage=True,
        )
        read, choice = read_chat(message_of(message))
        assert read == Chat(
            messages=[
                ChatMessage("system", "Be brief.", tool_calls=[]),
                ChatMessage("developer", ["And ", "kind."], tool_calls=[]),
                ChatMessage("user", "<|im_end|> é 漢字", tool_calls=[]),
                ChatMessage("assistant", "so", "", [ToolCall("g", {"b": 1}, "c")]),
                ChatMessage("tool", "ok", tool_calls=[], tool_call_id="c"),
            ],
            tools=(Tool("f", "Does.", json.loads(schema)), Tool("g.h-i_2")),
            enable_thinking=False,
            preserve_thinking=True,
            variables={"tone": ["kind"]},
            continue_final_message=True,
        )
        assert json.dumps(read.tools[0].parameters) == schema  # in the client's order
        assert choice == ToolChoice(read_calls=True)

    def test_what_is_unset_is_left_to_the_template(self):
        read, _ = read_chat(message_of(chat(user("hi"), assistant("x"))))
        assert (read.enable_thinking, read.preserve_thinking) == (None, None)
        assert read.messages[1].reasoning is None
        assert (read.tools, read.variables, read.continue_final_message) == ((), {}, False)

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ({"mode": "MODE_NONE"}, ToolChoice(False)),
            ({"mode": "MODE_AUTO"}, ToolChoice(True)),
            ({"mode": "MODE_REQUIRED"}, ToolChoice(True, (Tool("f"), Tool("g")))),
            ({"tool": "g"}, ToolChoice(True, (Tool("g"),), single=True)),
        ],
    )
    def test_tool_choice(self, choice, expected):
        """Case 75."""
        fields = chat(user("hi"), tools=[tool("f"), tool("g")], toolChoice=choice)
        assert read_chat(message_of(fields))[1] == expected


class TestViolations:
    def test_all_at_once(self):
        message = {
            "messages": [
                {"role": "ROLE_UNSPECIFIED", "text": "x"},
                {**user("x"), "parts": [{"text": "y"}, {}]},
                assistant(toolCalls=[{"name": "", "argumentsJson": "[1]"}]),
                {"role": "ROLE_TOOL", "toolCallId": "missing"},
                {**user("x"), "toolCallId": "c"},
            ],
            "tools": [tool(""), tool("f", "{"), tool("f", '"x"')],
            "toolChoice": {"tool": "g"},
            "variablesJson": "[]",
        }
        assert list(violations(message_of(message))) == [
            "chat.messages[0].role",
            "chat.messages[1].parts",
            "chat.messages[1].parts[1]",
            "chat.messages[2].tool_calls[0].name",
            "chat.messages[2].tool_calls[0].arguments_json",
            "chat.messages[4].tool_call_id",
            "chat.messages[3].tool_call_id",
            "chat.tools[0].name",
            "chat.tools[1].parameters_json",
            "chat.tools[2].name",
            "chat.tools[2].parameters_json",
            "chat.variables_json",
            "chat.tool_choice.tool",
        ]

    def test_no_more_than_a_status_can_tell(self):
        message = message_of({"messages": [{"text": "x"}] * 100})
        assert len(violations(message)) == MAX_VIOLATIONS
        assert refusal(message).message.endswith("; and more")

    @pytest.mark.parametrize(
        ("field", "limit", "message"),
        [
            ("chat.messages", MAX_MESSAGES, {"messages": [user("x")] * (MAX_MESSAGES + 1)}),
            (
                "chat.tools",
                MAX_TOOLS,
                chat(user("x"), tools=[tool(f"f{n}") for n in range(MAX_TOOLS + 1)]),
            ),
            (
                "chat.messages[0].parts",
                MAX_ENTRIES,
                chat({"role": "ROLE_USER", "parts": [{"text": "x"}] * (MAX_ENTRIES + 1)}),
            ),
            (
                "chat.messages[0].tool_calls",
                MAX_ENTRIES,
                chat(assistant(toolCalls=[{"name": "f"}] * (MAX_ENTRIES + 1))),
            ),
        ],
    )
    def test_too_many(self, field, limit, message):
        least = 1 if field == "chat.messages" else 0
        assert violations(message_of(message)) == {
            field: f"is {limit + 1} entries, must be {least} to {limit} entries"
        }

    @pytest.mark.parametrize("name", ["", "a b", "a\n", "é", "x" * 65, "<f>"])
    def test_names_of_tools(self, name):
        told = violations(message_of(chat(user("x"), tools=[tool(name)])))
        assert list(told) == ["chat.tools[0].name"]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("{", "not JSON"),
            ("3", "a JSON int"),
            ("null", "a JSON NoneType"),
            ("[" * 100_000, "nested too deep"),
        ],
    )
    def test_json_that_is_no_object(self, text, reason):
        told = violations(message_of(chat(user("x"), tools=[tool("f", text)])))
        (description,) = told.values()
        assert reason in description
        assert len(description) < 300

    @pytest.mark.parametrize(
        ("choice", "tools", "field"),
        [
            ({}, [tool()], "chat.tool_choice"),
            ({"mode": "MODE_UNSPECIFIED"}, [tool()], "chat.tool_choice.mode"),
            ({"mode": 9}, [tool()], "chat.tool_choice.mode"),
            ({"mode": "MODE_REQUIRED"}, [], "chat.tool_choice.mode"),
            ({"tool": "f"}, [], "chat.tool_choice.tool"),
            ({"tool": ""}, [tool()], "chat.tool_choice.tool"),
        ],
    )
    def test_a_tool_choice_that_is_none(self, choice, tools, field):
        """Case 75: unknown names, and required without tools."""
        message = message_of(chat(user("x"), tools=tools, toolChoice=choice))
        assert list(violations(message)) == [field]

    def test_a_result_answers_a_call_that_was_made_before(self):
        call = assistant(toolCalls=[{"id": "c", "name": "f"}])
        result = {"role": "ROLE_TOOL", "text": "ok", "toolCallId": "c"}
        read_chat(message_of(chat(user("x"), call, result)))
        told = violations(message_of(chat(user("x"), result, call)))
        assert list(told) == ["chat.messages[1].tool_call_id"]


def test_images_are_not_served():
    image = {"role": "ROLE_USER", "parts": [{"text": "this:"}, {"image": "AAAA"}]}
    error = refusal(message_of(chat(user("x"), image)))
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.reason == "OPTION_NOT_SERVED"
    assert error.message.startswith("chat.messages[1].parts[1].image is set, must be unset")


@pytest.mark.parametrize(
    ("roles", "served"),
    [
        (["SYSTEM", "USER", "SYSTEM", "USER"], False),
        (["DEVELOPER", "USER"], True),
        (["SYSTEM", "SYSTEM", "USER"], False),
        (["USER", "ASSISTANT", "USER"], True),
    ],
)
async def test_orders_of_roles(roles, served):
    """Case 38: refused with the template's reason, or rendered with every text in it."""
    messages = [{"role": f"ROLE_{role}", "text": f"text {n}"} for n, role in enumerate(roles)]
    async with live_server(DEMO, executor=FakeExecutor(LIMITS)) as live:
        request = tokenizer_pb2.TokenizeRequest(chat=message_of(chat(*messages)))
        if served:
            rendered = (await live.tokenizer.Tokenize(request)).rendered
            assert [f"text {n}" in rendered for n in range(len(roles))] == [True] * len(roles)
        else:
            for call in (
                live.tokenizer.Tokenize(request),
                live.inference.Generate(ask(chat(*messages))),
            ):
                failure = await failure_of(call)
                assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
                (told,) = failure.details["BadRequest"].field_violations
                assert told.field == "chat.messages"
                assert told.description.startswith("is refused by the chat template, must be")

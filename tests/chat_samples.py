"""Chats as transformers takes them, and a chat template of our own in the style of Qwen3.6's."""

import dataclasses
from typing import Any

from service.text.chat import Chat, ChatMessage, ImagePart, Tool, ToolCall

TEMPLATE = """\
{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- '[image]' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tell_date and strftime_now is defined %}
    {{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\nFunctions:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\nCall them as <tool_call><function=name><parameter=key>value</parameter>' }}
    {{- '</function></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not text_of(message.content).startswith('<tool_response>') %}
        {%- set state.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = text_of(message.content) | trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('The system speaks first or not at all.') }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in text and message.reasoning_content is undefined %}
            {%- set reasoning = text.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set text = text.split('</think>')[-1] | trim %}
        {%- else %}
            {%- set reasoning = (message.reasoning_content or '') | trim %}
        {%- endif %}
        {%- if preserve_thinking or loop.index0 > state.last_user %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {% generation %}{{- text }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- text }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather & "climate" of a place <now>, für alle Städte',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
SEARCH = {"type": "function", "function": {"name": "search"}}


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def assistant(content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A chat in the form of transformers; `options` are its and ours by the same names."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def chat(self) -> Chat:
        return Chat(
            [message(data) for data in self.messages],
            tools=[Tool(**data["function"]) for data in self.tools],
            **self.options,
        )


def message(data: dict[str, Any]) -> ChatMessage:
    content = data["content"]
    if not isinstance(content, str):
        content = [part.get("text", ImagePart()) for part in content]
    calls = [each["function"] for each in data.get("tool_calls", [])]
    return ChatMessage(
        data["role"],
        content,
        reasoning=data.get("reasoning_content"),
        tool_calls=[ToolCall(each["name"], each["arguments"]) for each in calls],
    )


TWO_CALLS = [
    user("Weather in Zürich and Bern?"),
    assistant(
        "Let me look.",
        reasoning_content="need the tool",
        tool_calls=[
            call("get_weather", city="Zürich", days=2, exact=True, unit=None, at=[1.5, {"x": "ü"}]),
            call("get_weather", city="Bern\n2nd line"),
        ],
    ),
    tool('{"t": 3}'),
    tool("4 °C"),
]
REASONED = [
    user("a"),
    assistant("A1", reasoning_content="r1"),
    user("b"),
    assistant("B1", reasoning_content="r2\n\nmore"),
]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
KEPT = {"preserve_thinking": True}

SAMPLES = {
    "one user": Sample([user("hi")]),
    "thinking off": Sample([user("hi")], options=OFF),
    "thinking on": Sample([user("hi")], options=ON),
    "no generation prompt": Sample([user("hi")], options={"add_generation_prompt": False}),
    "system": Sample([system("Be brief."), user("hi")]),
    "empty system": Sample([system(""), user("hi")]),
    "empty user": Sample([user("")]),
    "white space": Sample([system("  \n"), user("\n  hi \t\n\n"), assistant("  x  "), user(" y")]),
    "languages": Sample(
        [
            system("Antworte auf Deutsch, s'il te plaît."),
            user("漢字かな混じり文 और हिन्दी — שלום عليكم"),
            assistant("👨\u200d👩\u200d👧\u200d👦 é e\u0301 \u00a0 ﷺ 𠜎"),
            user("Ещё раз? ¿Qué? naïve coöperation\r\n\ttab"),
        ]
    ),
    "html and quotes": Sample([user("<b>\"x\" & 'y'</b> <table> <|> |> <| \\n {{ x }} {% y %}")]),
    "history": Sample([*REASONED, user("c")]),
    "history kept": Sample([*REASONED, user("c")], options=KEPT),
    "history kept, off": Sample([*REASONED, user("c")], options=KEPT | OFF),
    "history not kept": Sample([*REASONED, user("c")], options={"preserve_thinking": False}),
    "ends with assistant": Sample(REASONED),
    "think tags in content": Sample(
        [user("a"), assistant("<think>\nr1\n</think>\n\nA1"), user("b")], options=KEPT
    ),
    "only an end tag in content": Sample([user("a"), assistant("r1\n</think>\n\nA1"), user("b")]),
    "think tags after the query": Sample([user("a"), assistant("<think>r1</think>A1")]),
    "empty reasoning": Sample([user("a"), assistant("A", reasoning_content="")]),
    "raw call in content": Sample(
        [user("a"), assistant("<tool_call>\n<function=f>\n</function>\n</tool_call>"), user("b")]
    ),
    "tool": Sample([user("hi")], [WEATHER]),
    "tools": Sample([system("Be brief."), user("hi")], [WEATHER, SEARCH]),
    "tools, empty system": Sample([system(" "), user("hi")], [SEARCH], OFF),
    "two calls, two results": Sample(TWO_CALLS, [WEATHER]),
    "calls, then an answer": Sample([*TWO_CALLS, assistant("3 and 4 °C.")], [WEATHER]),
    "calls, next turn": Sample([*TWO_CALLS, assistant("3 and 4."), user("Ok")], [WEATHER]),
    "calls, next turn, kept": Sample(
        [*TWO_CALLS, assistant("3 and 4.", reasoning_content="done"), user("Ok")], [WEATHER], KEPT
    ),
    "call without arguments": Sample(
        [user("a"), assistant(tool_calls=[call("search")]), tool("")], [SEARCH]
    ),
    "empty and odd arguments": Sample(
        [user("a"), assistant(tool_calls=[call("f", a="", b=[], c={}, d=0, e=1e5, f=False)])]
    ),
    "agent": Sample(
        [
            user("Do it."),
            assistant(reasoning_content="first", tool_calls=[call("search", q="x")]),
            tool("one"),
            assistant(reasoning_content="second", tool_calls=[call("search", q="y")]),
            tool("two"),
        ],
        [SEARCH],
    ),
    "tool response by the user": Sample(
        [
            user("Do it."),
            assistant(reasoning_content="first", tool_calls=[call("search", q="x")]),
            user("<tool_response>\none\n</tool_response>"),
        ],
        [SEARCH],
    ),
    "text parts": Sample([user([text("one "), text("two")]), assistant([text("three")])]),
    "image": Sample([user([{"type": "image"}, text("What is it?")])]),
    "two images": Sample(
        [
            system([text("Look "), text("well.")]),
            user([text("a"), {"type": "image"}, text("b"), {"type": "image"}]),
        ]
    ),
    "long": Sample([user("word " * 2000), assistant("\n".join(map(str, range(500)))), user("?")]),
}
"""Chats that both templates render, in which no client spells a control token."""

CONTINUED = {
    "plain": [user("a"), assistant("The answer is")],
    "trailing space": [user("a"), assistant("The answer is  ")],
    "with reasoning": [user("a"), assistant("It is\n4", reasoning_content="2 + 2")],
    "empty": [user("a"), assistant("")],
    "parts": [user("a"), assistant([text("one"), text("two ")])],
    "same words before": [user("The answer is"), assistant("no"), user("x"), assistant("no")],
}
"""Chats whose last message is to be continued."""

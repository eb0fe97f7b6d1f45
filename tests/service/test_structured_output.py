"""Real programs held to real grammars: every reply is valid, and drafts change none of them."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

import tiny
import tiny_tokenizer
from service.engine.engine import Engine
from service.engine.executor import load_executor
from service.engine.types import FinishReason, Request, SamplingParams
from service.model_card import ModelCard
from service.text.grammar import GrammarCompiler
from service.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # compiles a program per draft length

DEMO = Path(__file__).parents[2] / "model" / "demo"
CAPS = (0, 3)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "hot": {"type": "boolean"},
            "days": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["city", "hot", "days"],
        "additionalProperties": False,
    }
)


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"city", "hot", "days"}
        and isinstance(value["city"], str)
        and len(value["city"]) <= 8
        and isinstance(value["hot"], bool)
        and 1 <= len(value["days"]) <= 3
        and all(type(day) is int and 0 <= day <= 9 for day in value["days"])
    )


@dataclasses.dataclass
class Served:
    """An executor, and what its checkpoint says."""

    executor: object
    tokenizer: Tokenizer
    compiler: GrammarCompiler
    end_ids: tuple[int, ...]
    reasoning_end: int
    reasoning_bias: float
    """Makes the reasoning end after some tokens."""
    prompt: tuple[int, ...]

    def request(self, seed: int, **fields) -> Request:
        request = Request(
            f"{seed}",
            self.prompt,
            200,
            SamplingParams(temperature=0.0 if seed == 0 else 1.0, seed=seed),
            end_ids=self.end_ids,
            constraint=self.compiler.compile("json_schema", SCHEMA),
        )
        return dataclasses.replace(request, **fields)

    async def serve(self, requests: list[Request], cap: int, **options) -> list[tuple[int, ...]]:
        """The replies to all requests at once, each of which must have ended by itself."""
        engine = Engine(self.executor, **options)  # type: ignore[arg-type]
        await engine.start()
        try:
            streams = [
                engine.submit(dataclasses.replace(request, max_draft_tokens=cap))
                for request in requests
            ]

            async def read(stream) -> tuple[int, ...]:
                chunks = [chunk async for chunk in stream]
                if stream.request.constraint is not None:
                    assert chunks[-1].finish is FinishReason.END_OF_SEQUENCE
                return tuple(token for chunk in chunks for token in chunk.token_ids)

            replies = await asyncio.gather(*map(read, streams))
            engine.check_integrity()
            return replies
        finally:
            await engine.stop(10)

    def text(self, reply: tuple[int, ...]) -> str:
        assert reply[-1] in self.end_ids
        return b"".join(map(self.tokenizer.token_bytes, reply[:-1])).decode()


@pytest.fixture(scope="module", params=["tiny", "demo"])
def served(request, tmp_path_factory) -> Served:
    if request.param == "demo":
        directory = DEMO
        executor = load_executor(
            DEMO, slots=4, max_context=256, page_size=16, pages=None, draft_length=3,
            rounds_per_call=2, prefill_chunk=64, dtype="float32",
        )  # fmt: skip
        reasoning_end, bias = "</think>", 13.0
    else:
        directory = tiny_tokenizer.write_checkpoint(tmp_path_factory.mktemp("tiny"))
        executor = tiny.executor(
            tiny.model(tiny.config(vocab_size=384)), slots=4, addressable_tokens=380
        )
        reasoning_end, bias = "<tool call>", 6.0
    executor.warm_up()
    tokenizer, card = Tokenizer.from_directory(directory), ModelCard.from_directory(directory)
    rows = executor.limits.vocab_size
    return Served(
        executor,
        tokenizer,
        GrammarCompiler(directory / "tokenizer.json", rows, card.end_ids),
        card.end_ids,
        tokenizer.added_tokens[reasoning_end],
        bias,
        tokenizer.encode("def weather(city):\n    return "),
    )


async def test_json_is_valid_and_the_same_with_any_drafts(served):
    compiled = served.executor.compile_counts()
    requests = [served.request(seed) for seed in range(20)]
    replies = {cap: await served.serve(requests, cap) for cap in CAPS}
    assert replies[3] == replies[0]
    assert len(set(replies[0])) > 10
    assert [text for text in map(served.text, replies[0]) if not is_valid(text)] == []
    assert served.executor.compile_counts() == compiled


async def test_constrained_and_free_replies_do_not_touch_each_other(served):
    free = [
        dataclasses.replace(served.request(seed), constraint=None, request_id=f"free {seed}")
        for seed in range(30, 36)
    ]
    bound = [served.request(seed) for seed in range(20, 26)]
    alone = await served.serve(free, 0), await served.serve(bound, 0)
    mixed = [request for pair in zip(free, bound, strict=True) for request in pair]
    for cap, adaptive in ((0, False), (3, False), (3, True)):
        replies = await served.serve(mixed, cap, adaptive_drafts=adaptive)
        assert (replies[::2], replies[1::2]) == alone


async def test_json_behind_reasoning_that_ends_inside_a_round(served):
    """Case 32."""
    requests = [
        served.request(
            seed,
            reasoning_end=served.reasoning_end,
            max_reasoning_tokens=24,
            max_tokens=220,
            sampling=SamplingParams(
                temperature=1.0,
                seed=seed,
                logit_bias=((served.reasoning_end, served.reasoning_bias),),
            ),
        )
        for seed in range(1, 9)
    ]
    replies = {cap: await served.serve(requests, cap) for cap in CAPS}
    assert replies[3] == replies[0]
    ends = [reply.index(served.reasoning_end) for reply in replies[0]]
    assert len(set(ends)) > 2
    for reply, end in zip(replies[0], ends, strict=True):
        assert end <= 24
        assert is_valid(served.text(reply[end + 1 :]))


@pytest.mark.parametrize("cap", CAPS)
async def test_other_kinds(served, cap):
    words = ("fox", "foxes", "box", "brown fox")
    grammars = {
        "choices": served.compiler.compile("choices", words),
        "regex": served.compiler.compile("regex", "[a-c]{3}(-[0-9]{2}){2}"),
        "lark": served.compiler.compile(
            "lark", 'start: "(" NUMBER ("+" NUMBER)~2 ")"\nNUMBER: /[0-9]/'
        ),
    }
    requests = [
        served.request(1, constraint=grammar, request_id=kind) for kind, grammar in grammars.items()
    ]
    choice, match, sum_ = map(served.text, await served.serve(requests, cap))
    assert choice in words
    assert len(match) == 9
    assert match[3] == match[6] == "-"
    assert (len(sum_), sum_[0], sum_[2], sum_[4], sum_[6]) == (7, "(", "+", "+", ")")

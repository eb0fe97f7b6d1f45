"""The engine over the real programs: no option of serving changes a token, every parameter does."""

import asyncio
import dataclasses

import jax.numpy as jnp
import pytest

import tiny
from service.engine.engine import Engine
from service.engine.errors import NotFiniteError
from service.engine.executor import JaxExecutor
from service.engine.types import NOTHING_CONSTRAINED, FinishReason, Request, SamplingParams

pytestmark = pytest.mark.slow  # compiles a program per draft length

PROMPT = (5, 17, 5, 17, 5, 17, 80, 3)
GREEDY = Request("r", PROMPT, 24, SamplingParams(temperature=0.0))
SAMPLED = Request("r", PROMPT, 24, SamplingParams(temperature=0.8, seed=7))


def changed(request: Request, **sampling: object) -> Request:
    return dataclasses.replace(
        request,
        sampling=dataclasses.replace(request.sampling, **sampling),  # type: ignore[arg-type]
    )


REQUESTS = {
    "greedy": GREEDY,
    "logit_bias": changed(GREEDY, logit_bias=((11, 4.0), (12, -100.0))),
    "repetition": changed(GREEDY, repetition_penalty=1.8),
    "frequency": changed(GREEDY, frequency_penalty=1.5),
    "presence": changed(GREEDY, presence_penalty=1.5),
    "sampled": SAMPLED,
    "seed": changed(SAMPLED, seed=8),
    "min_p": changed(SAMPLED, min_p=0.5),
    "top_k": changed(SAMPLED, top_k=2),
    "top_p": changed(SAMPLED, top_p=0.3),
}


@pytest.fixture(scope="module")
def executor():
    """Shared by the engines of this file, one after the other: each leaves it empty."""
    built = tiny.executor(tiny.model(), draft_length=2, slots=2)
    built.warm_up()
    return built


async def serve(executor, requests: dict[str, Request], **options) -> dict[str, tuple[int, ...]]:
    """All requests at once, more than there are slots."""
    engine = Engine(executor, **options)
    await engine.start()
    try:
        named = [dataclasses.replace(r, request_id=name) for name, r in requests.items()]
        streams = [engine.submit(request) for request in named]

        async def read(stream) -> tuple[int, ...]:
            return tuple([token async for chunk in stream for token in chunk.token_ids])

        replies = await asyncio.gather(*map(read, streams))
        engine.check_integrity()
        return dict(zip(requests, replies, strict=True))
    finally:
        await engine.stop(10)


async def test_parameters_change_the_reply_and_the_way_of_serving_does_not(executor):
    compiled = executor.compile_counts()
    expected = {
        name: (await serve(executor, {name: request}))[name] for name, request in REQUESTS.items()
    }
    for name in ("logit_bias", "repetition", "frequency", "presence"):
        assert expected[name] != expected["greedy"]
    for name in ("seed", "min_p", "top_k", "top_p"):
        assert expected[name] != expected["sampled"]
    assert 12 not in expected["logit_bias"]
    for options in ({}, {"adaptive_drafts": True}, {"single_program": True}):
        assert await serve(executor, REQUESTS, **options) == expected
    for cap in (0, 1):
        capped = {
            name: dataclasses.replace(request, max_draft_tokens=cap if i % 3 else None)
            for i, (name, request) in enumerate(REQUESTS.items())
        }
        assert await serve(executor, capped, adaptive_drafts=True) == expected
    assert executor.compile_counts() == compiled


@pytest.mark.parametrize("cap", [0, 1, 2])
async def test_min_tokens_come_before_an_end_that_is_all_but_certain(executor, cap):
    """Case 10: exactly 20 ordinary tokens, and then the end."""
    request = dataclasses.replace(
        changed(GREEDY, logit_bias=((50, 100.0),)),
        end_ids=(50,),
        min_tokens=20,
        max_tokens=60,
        max_draft_tokens=cap,
    )
    reply = (await serve(executor, {"r": request}))["r"]
    assert len(reply) == 21
    assert reply.index(50) == 20


class Poisoning(JaxExecutor):
    """An executor that writes NaN into the recurrent state of slot 0 before its third decode call."""

    def __init__(self, executor: JaxExecutor) -> None:
        self.__dict__ = executor.__dict__ | {"_calls": 0}

    def decode(self, page_tables, draft_length, allowed=NOTHING_CONSTRAINED, held=()):
        self._calls += 1
        if self._calls == 3:
            state = self._state
            cache = dataclasses.replace(
                state.caches[0], state_BWPR=state.caches[0].state_BWPR.at[0].set(jnp.nan)
            )
            self._state = dataclasses.replace(state, caches=(cache, *state.caches[1:]))
        return super().decode(page_tables, draft_length, allowed, held)


async def test_a_request_whose_state_is_not_a_number_fails_alone(executor):
    """Case 31: the other requests, and the next in the slot, equal their solo runs; it is counted."""
    expected = (await serve(executor, {"a": SAMPLED}))["a"]
    poisoning = Poisoning(executor)
    engine = Engine(poisoning)
    await engine.start()
    sick = engine.submit(dataclasses.replace(SAMPLED, request_id="sick", max_tokens=200))
    others = [
        engine.submit(dataclasses.replace(SAMPLED, request_id=name)) for name in ("a", "b", "c")
    ]
    delivered: list[int] = []
    with pytest.raises(NotFiniteError, match="'sick' are not finite"):
        async for chunk in sick:
            delivered += chunk.token_ids
    assert 0 < len(delivered) < 24
    assert tuple(delivered) == expected[: len(delivered)]
    for stream in others:
        assert tuple([token async for chunk in stream for token in chunk.token_ids]) == expected
    assert engine.counters.finished[FinishReason.NOT_FINITE] == 1
    engine.check_integrity()
    await engine.stop(10)
    executor.__dict__ |= poisoning.__dict__  # the state it had was donated

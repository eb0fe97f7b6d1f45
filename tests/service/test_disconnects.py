"""Clients that leave or stop reading: slots come back, memory is bounded, others go on."""

import asyncio
import gc
import tracemalloc

import grpc

from fakes import FakeExecutor, expected_reply, small_limits
from live_server import live_server, message, rest_of, settled, until

FOUR_SLOTS = small_limits(
    slots=4, vocab_size=400, max_context=256, pages=1 + 4 * 64, max_stop_ids=4, draft_length=2
)
FOREVER = {"ignoreEos": True}


async def leave_in_phase(live, phase: str) -> None:
    """Opens a stream and cancels it in one of five phases."""
    stopping = {"maxTokens": 2, **FOREVER} if phase == "finished" else FOREVER
    prompt = "fox " * 60 if phase == "prefill" else "fox"
    call = live.inference.Generate(message(prompt, stopping=stopping))
    if phase == "queued":
        await until(lambda: live.engine.load().waiting)
    elif phase == "prefill":
        await until(lambda: live.engine.load().prefilling or live.engine.load().waiting)
    elif phase == "before the first message":
        await asyncio.sleep(0.02)
    elif phase == "after one message":
        await call.read()
    else:
        before = live.engine.counters.generated_tokens
        await until(lambda: live.engine.counters.generated_tokens >= before + 2)
    call.cancel()


async def test_a_hundred_streams_cancelled_in_five_phases_give_everything_back(checkpoint):
    """Case 13."""
    phases = ("queued", "prefill", "before the first message", "after one message", "finished")
    executor = FakeExecutor(FOUR_SLOTS, decode_delay_s=0.002)
    async with live_server(checkpoint, executor=executor) as live:
        await asyncio.gather(*(leave_in_phase(live, phases[n % 5]) for n in range(100)))
        await settled(live)
        assert live.engine.load().pages_used == 0
        requests = [
            message(tokens={"ids": [7 * n + 1, 5]}, include={"tokenIds": True}) for n in range(4)
        ]
        replies = await asyncio.gather(*(live.inference.Complete(request) for request in requests))
        got = sorted(tuple(reply.choices[0].delta.token_ids) for reply in replies)
        want = sorted(expected_reply(request, FOUR_SLOTS)[0] for request in executor.inserted[-4:])
        assert got == want
        await settled(live)


LONG = small_limits(
    slots=4, vocab_size=400, max_context=10_000, page_size=500, pages=1 + 4 * 20, rounds_per_call=16
)


async def test_a_client_that_stops_reading_holds_little_and_delays_nobody(checkpoint):
    """Case 58: 8,000 tokens with log-probabilities, of which five messages are read at first."""
    stopping = {"maxTokens": 8000, **FOREVER}
    include = {"tokenIds": True, "logprobs": True}
    # No flow-control window of the client's hides what the server must hold.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    async with live_server(checkpoint, executor=FakeExecutor(LONG)) as live:
        async with grpc.aio.insecure_channel(live.target, options=options) as channel:
            stub = type(live.inference)(channel)
            paused = stub.Generate(message(stopping=stopping, include=include))
            stream = [await paused.read() for _ in range(5)]
            gc.collect()
            tracemalloc.start()
            # The others get all they ask for while the first is not read.
            for _ in range(3):
                whole = await live.inference.Complete(message(stopping=stopping))
                assert whole.choices[0].finished.usage.completion_tokens == 8000
            await settled(live)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held < 20 << 20
            stream += await rest_of(paused)
        assert [event.sequence for event in stream] == list(range(len(stream)))
        ids = [token for event in stream for token in event.delta.token_ids]
        logprobs = [value for event in stream for value in event.delta.logprobs]
        assert len(ids) == len(logprobs) == 8000
        (request,) = [r for r in live.executor.inserted if r.logprobs]
        assert tuple(ids) == expected_reply(request, LONG)[0]

"""Measures what gRPC adds to the engine's own time per token.

One engine is read in two ways, in turn, several times over: by coroutines beside it, which take its
tokens as they are, and through gRPC by a client in a process of its own, which gets text. The engine
has a device that only takes time (`--round-ms`), and then the embedded checkpoint's. Quote the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable

import grpc
from paced_executor import PacedExecutor

from service.__main__ import load
from service.config import DEMO_CHECKPOINT, ServerConfig
from service.engine.engine import Engine
from service.engine.types import Executor, Limits, Request, SamplingParams
from service.pb import inference_pb2, inference_pb2_grpc
from service.process import read
from service.server import Server
from service.startup import StartupLog
from service.text.tokenizer import Tokenizer

PROMPT = "def main():\n    "
READY, GO = "ready", "go"


@dataclasses.dataclass(frozen=True)
class Times:
    """One measurement of all streams together."""

    per_token_s: float
    """From the first to the last token of a stream, per token behind the first; mean of all."""
    first_token_s: float
    """From the request to the first token; mean of all."""
    tokens_per_second: float


def times(begun_at: float, streams: list[list[tuple[float, int]]]) -> Times:
    """Adds up.

    Args:
      begun_at: when the requests were made.
      streams: of each stream, when tokens came, and how many.
    """
    per_token, first = [], []
    for deliveries in streams:
        (first_at, first_count), last_at = deliveries[0], deliveries[-1][0]
        behind = sum(count for _, count in deliveries) - first_count
        per_token.append((last_at - first_at) / behind)
        first.append(first_at - begun_at)
    tokens = sum(count for deliveries in streams for _, count in deliveries)
    ended_at = max(deliveries[-1][0] for deliveries in streams)
    return Times(statistics.mean(per_token), statistics.mean(first), tokens / (ended_at - begun_at))


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="per stream (default 256)")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each (default 7)")
    parser.add_argument(
        "--round-ms", type=float, nargs="*", default=[5.0, 20.0],
        help="time that a round of the paced device takes (default 5 20)",
    )  # fmt: skip
    parser.add_argument("--draft-cap", type=int, default=0, help="of the real engine (default 0)")
    parser.add_argument("--no-real", action="store_true", help="the paced device only")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--client", metavar="TARGET", help=argparse.SUPPRESS)
    return parser.parse_args()


async def through_engine(engine: Engine, prompt_ids: tuple[int, ...], options) -> Times:
    """Reads all streams beside the engine."""

    async def read(index: int) -> list[tuple[float, int]]:
        request = Request(
            f"engine-{index}",
            prompt_ids,
            options.tokens,
            SamplingParams(seed=index),
            max_draft_tokens=options.draft_cap,
        )
        return [(time.monotonic(), len(chunk.token_ids)) async for chunk in engine.submit(request)]

    begun_at = time.monotonic()
    return times(begun_at, await asyncio.gather(*map(read, range(options.streams))))


async def client(options) -> None:
    """The other process: measures once for every line that it reads, and prints figures."""
    async with grpc.aio.insecure_channel(options.client) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await channel.channel_ready()
        print(READY, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            begun_at = time.monotonic()
            streams = await asyncio.gather(
                *(read_stream(stub, index, options) for index in range(options.streams))
            )
            print(json.dumps(dataclasses.asdict(times(begun_at, streams))), flush=True)


async def read_stream(stub, index: int, options) -> list[tuple[float, int]]:
    """Reads one stream; the number of tokens in a message is told by its marks."""
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        sampling={"temperature": 1, "top_k": 0, "top_p": 1, "seed": index},
        stopping={"max_tokens": options.tokens, "ignore_eos": True},
        speculation={"max_draft_tokens": options.draft_cap},
        include={"token_ids": True},
    )
    deliveries = []
    async for message in stub.Generate(request):
        if count := len(message.delta.token_ids):
            deliveries.append((time.monotonic(), count))
    return deliveries


@contextlib.asynccontextmanager
async def client_process(target: str, options) -> AsyncIterator[Callable]:
    """Yields what measures once through gRPC."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", target, "--streams", f"{options.streams}",
        "--tokens", f"{options.tokens}", "--draft-cap", f"{options.draft_cap}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    reader, writer = process.stdout, process.stdin

    async def measure() -> Times:
        writer.write(f"{GO}\n".encode())
        return Times(**json.loads(await reader.readline()))

    try:
        assert (await reader.readline()).decode().strip() == READY
        yield measure
    finally:
        writer.close()
        await process.wait()


async def compare(executor: Executor, options) -> list[tuple[Times, Times]]:
    """Measures pairs (engine, gRPC) on one server, after one that does not count."""
    config = ServerConfig(
        port=0, slots=options.streams, adaptive_drafts=False, compilation_cache=None
    )
    tokenizer = Tokenizer.from_directory(config.checkpoint)
    server = Server(config, *read(config))
    target = f"127.0.0.1:{await server.listen()}"
    await server.serve(executor)
    pairs = []
    try:
        assert server.engine is not None
        prompt_ids = tokenizer.encode(PROMPT)
        async with client_process(target, options) as through_grpc:
            for number in range(options.pairs + 1):
                pair = (
                    await through_engine(server.engine, prompt_ids, options),
                    await through_grpc(),
                )
                pairs += [pair] if number else []
    finally:
        await server.drain(0)
    return pairs


def paced(round_ms: float, options) -> Executor:
    """The device that only takes time."""
    vocab_size = Tokenizer.from_directory(DEMO_CHECKPOINT).vocab_size
    context = 2 * options.tokens + 256
    limits = Limits(
        slots=options.streams, max_context=context, vocab_size=vocab_size, draft_length=0,
        rounds_per_call=4, page_size=16, pages=1 + options.streams * (context // 16 + 1),
        prefill_chunk=128, max_stop_ids=16,
    )  # fmt: skip
    return PacedExecutor(limits, round_ms / 1000)


def real(options) -> Executor:
    """The embedded checkpoint, warm."""
    config = ServerConfig(
        slots=options.streams, draft_length=options.draft_cap, max_context=options.tokens + 256
    )
    return load(config, StartupLog())


def row(name: str, pairs: list[tuple[Times, Times]]) -> dict[str, object]:
    """The figures of one device."""
    ratios = sorted(grpc_.per_token_s / own.per_token_s for own, grpc_ in pairs)
    return {
        "device": name,
        "engine_ms": 1000 * statistics.median(own.per_token_s for own, _ in pairs),
        "grpc_ms": 1000 * statistics.median(grpc_.per_token_s for _, grpc_ in pairs),
        "engine_first_ms": 1000 * statistics.median(own.first_token_s for own, _ in pairs),
        "grpc_first_ms": 1000 * statistics.median(grpc_.first_token_s for _, grpc_ in pairs),
        "engine_tokens_per_second": statistics.median(own.tokens_per_second for own, _ in pairs),
        "grpc_tokens_per_second": statistics.median(grpc_.tokens_per_second for _, grpc_ in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
    }


def table(rows: list[dict[str, object]]) -> str:
    """The figures as text."""
    lines = [
        f"{'device':<16}{'engine ms/token':>17}{'gRPC ms/token':>15}{'ratio':>8}"
        f"{'lowest':>9}{'highest':>9}{'first token ms':>18}{'tokens/s':>18}"
    ]
    for r in rows:
        first = f"{r['engine_first_ms']:.1f} / {r['grpc_first_ms']:.1f}"
        speed = f"{r['engine_tokens_per_second']:.0f} / {r['grpc_tokens_per_second']:.0f}"
        lines.append(
            f"{r['device']:<16}{r['engine_ms']:>17.3f}{r['grpc_ms']:>15.3f}{r['ratio']:>8.3f}"
            f"{r['ratio_low']:>9.3f}{r['ratio_high']:>9.3f}{first:>18}{speed:>18}"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    options = parse_arguments()
    if options.client:
        asyncio.run(client(options))
        return
    devices: list[tuple[str, Callable[[], Executor]]] = [
        (f"{ms:g} ms a round", lambda ms=ms: paced(ms, options)) for ms in options.round_ms
    ]
    if not options.no_real:
        devices.append(("demo checkpoint", lambda: real(options)))
    rows = [row(name, asyncio.run(compare(make(), options))) for name, make in devices]
    print(f"{options.streams} streams of {options.tokens} tokens, {options.pairs} pairs each")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

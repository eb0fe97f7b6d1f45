"""One load test from its first call to its verdict."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import grpc

from load_testing.arrivals import closed_loop, open_loop
from load_testing.client import LoadClient
from load_testing.drain import DrainReport, drain_under_load
from load_testing.monitor import MUST_BE_ZERO, Series, scrape, settle, watched
from load_testing.own_server import OwnServer
from load_testing.prompts import make_prompts
from load_testing.report import MemoryBound, memory_growth, summarise
from load_testing.tally import End, Tally
from load_testing.workload import Mix, Workload
from service.pb import model_pb2, model_pb2_grpc

PROMPTS = 24
DRAIN_TOKENS = 96
"""Length of the replies that run while the server is told to end."""
BACK_OFF_S = 0.2
"""Pause of a client whose call failed in an unexpected way, as when nobody listens any more."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do, and what to hold the server to."""

    seconds: float
    warm_up_s: float
    streams: int
    rate: float | None
    """Calls per second at random moments; None: `streams` calls are in flight at all times."""
    prompt_tokens: int
    """Of the longest prompt; less where the context is short, and so is the next."""
    reply_tokens: int
    seed: int
    mix: Mix
    memory_bound: MemoryBound
    title: str = ""


class Session:
    """Puts one server under load."""

    def __init__(self, plan: Plan, server: OwnServer | None, metrics_url: str | None) -> None:
        """Prepares a session; `server` is what the test itself has started, if it has."""
        self._plan = plan
        self._server = server
        self._metrics_url = metrics_url
        self._model = model_pb2.Model()
        self._problems: list[str] = []
        self._memory: dict[str, float] = {}
        self._drained = DrainReport()
        self._settle_s, self._held = 0.0, ""
        self._ended_at = 0.0
        self.begun_at = self.warm_at = 0.0
        self.series = Series()
        self.tally = Tally()

    async def run(self, target: str) -> dict[str, Any]:
        """Goes through the test; returns its summary, verdict included."""
        async with grpc.aio.insecure_channel(target) as channel:
            models: Any = model_pb2_grpc.ModelServiceStub(channel)
            self._model = (await models.GetModel(model_pb2.GetModelRequest())).model
            client = LoadClient(target, self.tally)
            try:
                await self._put_under_load(channel, client)
                await self._look_for_leaks(channel)
                if self._server is not None:
                    streams = min(self._plan.streams, self._model.slots)
                    tokens = min(DRAIN_TOKENS, self._reply_tokens)
                    self._drained = await drain_under_load(
                        self._server, client.stub, streams, tokens
                    )
            except (grpc.aio.AioRpcError, OSError) as error:
                self._problems.append(f"the server does not answer: {error!r:.500}")
            finally:
                await client.close()
        if self._server is not None:
            self._server.process.terminate()  # unless it has been
            self._problems += self._drained.problems + self._server.problems_at_end()
        if self._model.configuration["strict"] and self.tally.differing:
            self._problems.append(f"{self.tally.differing} replies were not the same as before")
        return self._summary()

    @property
    def _reply_tokens(self) -> int:
        return min(self._plan.reply_tokens, self._model.context_length // 2)

    async def _put_under_load(self, channel: grpc.aio.Channel, client: LoadClient) -> None:
        plan = self._plan
        prompts = await make_prompts(channel, self._model, PROMPTS, plan.prompt_tokens)
        workload = Workload(plan.seed, plan.mix, self._model, prompts, self._reply_tokens)

        async def call(number: int, arrived_at: float) -> None:
            if await client.run(workload.case(number), arrived_at) is End.UNEXPECTED:
                await asyncio.sleep(BACK_OFF_S)

        self.begun_at = time.monotonic()
        self.warm_at = self.begun_at + plan.warm_up_s
        async with watched(channel, self._metrics_url, self.series):
            if plan.rate is None:
                await closed_loop(plan.streams, plan.seconds, call)
            else:
                await open_loop(plan.rate, plan.seconds, plan.seed, call)
            self._ended_at = time.monotonic()

    async def _look_for_leaks(self, channel: grpc.aio.Channel) -> None:
        self._settle_s, self._held = await settle(channel)
        if self._held:
            self._problems.append(f"leaked: {self._held}")
        if self._metrics_url is not None:
            figures = await asyncio.to_thread(scrape, self._metrics_url)
            self._problems += [
                f"{name} is {figures[name]:g}" for name in MUST_BE_ZERO if figures[name]
            ]
        self._memory, grown = memory_growth(
            self.series, self.warm_at, self._ended_at, self._plan.memory_bound
        )
        self._problems += grown

    def _summary(self) -> dict[str, Any]:
        plan, server = self._plan, self._server
        rate = f"{plan.rate:g} calls per second on average" if plan.rate else ""
        return {
            "server": describe(self._model, plan.title),
            "load": rate or f"{plan.streams} streams at all times",
            "seed": plan.seed,
            "mix": dataclasses.asdict(plan.mix),
            **summarise(self.tally, max(self._ended_at - self.begun_at, 1e-9)),
            "memory": self._memory,
            "held": self._held,
            "settle_s": self._settle_s,
            "drain": dataclasses.asdict(self._drained) if server else {},
            "integrity": server.integrity if server else "",
            "problem_count": len(self._problems) + self.tally.total(End.UNEXPECTED),
            "problems": self._problems + self.tally.problems,
        }


def describe(model: model_pb2.Model, title: str) -> str:
    """Returns what was tested, in words."""
    configuration = model.configuration
    return ", ".join(
        [
            *([title] if title else []),
            f"checkpoint {model.name} ({model.fingerprint[:12]})",
            f"{model.slots} slots of {model.context_length} tokens",
            f"{model.pages} pages",
            f"{configuration['dtype']}, draft length {model.draft_length}",
            "strict" if configuration["strict"] else "not strict",
        ]
    )

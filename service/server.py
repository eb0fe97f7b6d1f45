"""The gRPC server: what listens, with which options, when it is healthy, and how it drains."""

# The health package and the generated registration functions have no types.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

import asyncio
import logging
import time
from typing import Any

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from service.chats import Chats
from service.config import ServerConfig
from service.constraint import Constraints
from service.engine.counters import EngineCounters
from service.engine.engine import Engine
from service.engine.errors import EngineFailedError
from service.engine.supervisor import Supervisor
from service.engine.types import Executor
from service.interceptors import DrainInterceptor, ParseInterceptor, StatusInterceptor
from service.model_card import ModelCard
from service.pb import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from service.reflection import REFLECTION_SERVICES, Reflection, described, served_files
from service.resume import ResumeStore
from service.security.access import AccessInterceptor
from service.security.tls import server_credentials
from service.security.tokens import TokenFile
from service.servicer import InferenceServicer, ModelServicer, ServedModel, TokenizerServicer
from service.telemetry.telemetry import Telemetry
from service.text.tokenizer import TOKENIZER_FILE, Tokenizer

logger = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
TOKENIZER = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name
MODEL = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
WHOLE_SERVER = ""
"""Name under which health checks ask for the server as a whole."""

WATCH_LAG_S = 0.1
"""How long health watchers have to read that the server drains, before their calls end."""
LAST_WORDS_S = 1.0
"""How long calls that were given up have to tell their clients."""


def options(config: ServerConfig) -> list[tuple[str, int]]:
    """Returns the options of the transport."""
    chosen = [
        # Several servers on one port are on by default, and share its calls in silence.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Ping clients that are silent, to notice those that are gone.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Let clients ping every 10 s, idle or not, and never cut them off for it: the default
        # allows one ping in 5 minutes, and common clients send one in 30 s.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # A connection that never says hello holds a socket: this is enough for the slowest.
        ("grpc.server_handshake_timeout_ms", 20_000),
        ("grpc.enable_channelz", int(config.channelz)),
    ]
    if config.max_connection_age_seconds is not None:
        # Its grace is unlimited by default: calls that run on an old connection go on.
        age_ms = round(config.max_connection_age_seconds * 1000)
        chosen.append(("grpc.max_connection_age_ms", age_ms))
    return chosen


def interceptors(
    config: ServerConfig, telemetry: Telemetry, draining: asyncio.Event
) -> list[grpc.aio.ServerInterceptor]:
    """Returns what every call passes through, the outermost first."""
    chosen: list[grpc.aio.ServerInterceptor] = []
    if telemetry.tracing is not None:
        chosen.append(telemetry.tracing)
    chosen.append(StatusInterceptor(telemetry.observers))
    if config.token_file is not None:
        chosen.append(AccessInterceptor(TokenFile(config.token_file)))
    return [*chosen, DrainInterceptor(draining), telemetry.load_reports, ParseInterceptor()]


class Server:
    """One model behind gRPC, from listening to drained."""

    def __init__(
        self, config: ServerConfig, card: ModelCard, tokenizer: Tokenizer, chats: Chats
    ) -> None:
        """Registers the services; must run inside an event loop. Nothing listens yet."""
        self._config = config
        constraints = Constraints(config.checkpoint / TOKENIZER_FILE, card.end_ids)
        self._served = ServedModel(card, tokenizer, chats, constraints)
        self._kept = ResumeStore(config.max_resume_bytes)
        self._draining = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._health: Any = health.aio.HealthServicer()
        self._telemetry = Telemetry(config, card, lambda: self.engine)
        self._served.observers = self._telemetry.observers
        self._server = grpc.aio.server(
            interceptors=interceptors(config, self._telemetry, self._draining),
            options=options(config),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self._served, self._kept, config.max_resume_seconds), self._server
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(tokenizer, chats), self._server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self._served, config), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = [INFERENCE, TOKENIZER, MODEL, HEALTH, *REFLECTION_SERVICES]
        files = served_files()
        if config.channelz:
            channelz.add_channelz_servicer(self._server)
            services.append(CHANNELZ)
            files += described(channelz_pb2.DESCRIPTOR)
        Reflection(services, files).add_to(self._server)

    @property
    def engine(self) -> Engine | None:
        """The engine that serves, once one does."""
        return self._served.engine

    @property
    def metrics_port(self) -> int | None:
        """Where /metrics is served; None while it is not."""
        return self._telemetry.metrics_port

    async def listen(self) -> int:
        """Starts to answer; only the tokenizer is healthy yet. Returns the port.

        Raises:
          ValueError: TLS that is asked for cannot be given.
          RuntimeError, OSError: a port is taken.
        """
        await self._set_health(False, WHOLE_SERVER, INFERENCE, MODEL)
        await self._set_health(True, TOKENIZER)
        address = f"{self._config.host}:{self._config.port}"
        credentials = server_credentials(self._config)
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self._telemetry.listen()
        await self._server.start()
        return port

    async def serve(self, executor: Executor) -> None:
        """Takes requests from now on. The executor is warm: health must not promise too early."""
        config = self._config

        def build(counters: EngineCounters) -> Engine:
            return Engine(
                executor,
                max_waiting_requests=config.max_waiting_requests,
                max_waiting_tokens=config.max_waiting_tokens,
                adaptive_drafts=config.adaptive_drafts,
                single_program=config.strict,
                counters=counters,
            )

        async def report(serves: bool) -> None:
            self._served.engine = supervisor.engine
            await self._set_health(serves, WHOLE_SERVER, INFERENCE)

        supervisor = Supervisor(
            executor,
            build,
            stall_s=config.stall_seconds,
            restarts=config.engine_restarts,
            report=report,
        )
        await supervisor.start()
        await self._set_health(True, MODEL)
        self._watching = asyncio.create_task(supervisor.watch())

    async def engine_lost(self) -> None:
        """Waits until the engine has failed and will not be made anew."""
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def drain(self, grace_s: float) -> None:
        """Turns health red, refuses new calls, lets running requests finish, and stops.

        May be called again, also while it waits: the shorter grace wins.

        Args:
          grace_s: seconds for the requests already taken. Those beyond it end with UNAVAILABLE.
        """
        ends_at = time.monotonic() + grace_s
        await self._health.enter_graceful_shutdown()
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.sleep(WATCH_LAG_S)
        self._draining.set()
        self._kept.drop_detached()
        if (engine := self._served.engine) is not None:
            try:
                await engine.stop(grace_s)
            except EngineFailedError:
                logger.exception("the device is left as it is")
        # The engine is done with its requests; slow readers may not have taken all of it yet.
        await self._server.stop(max(ends_at - time.monotonic(), LAST_WORDS_S))
        await self._telemetry.close()

    async def _set_health(self, healthy: bool, *services: str) -> None:
        response = health_pb2.HealthCheckResponse
        for service in services:
            await self._health.set(service, response.SERVING if healthy else response.NOT_SERVING)

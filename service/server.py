"""The gRPC server: what listens, with which options, when it is healthy, and how it ends."""

# The health package and the generated registration functions have no types.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

import asyncio
import concurrent.futures
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from service.config import ServerConfig
from service.engine.engine import Engine
from service.engine.loop import EngineState
from service.engine.types import Executor
from service.interceptors import DrainInterceptor, StatusInterceptor
from service.model_card import ModelCard
from service.pb import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from service.reflection import REFLECTION_SERVICES, Reflection, served_files
from service.servicer import InferenceServicer, ModelServicer, ServedModel, TokenizerServicer
from service.text.tokenizer import Tokenizer
from service.validation import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
TOKENIZER = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name
MODEL = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE_SERVER = ""
"""Name under which health checks ask for the server as a whole."""

OPTIONS = (
    # Several servers on one port are on by default, and share its calls in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Ping clients that are silent, to notice those that are gone.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Let clients ping every 10 s, idle or not, and never cut them off for it: the default allows
    # one ping in 5 minutes, and common clients send one in 30 s.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)

WATCH_LAG_S = 0.1
"""How long health watchers have to read that the server drains, before their calls end."""
STATE_POLL_S = 0.5
"""How often the engine's state is looked at."""


class Server:
    """One model behind gRPC, from listening to drained."""

    def __init__(self, config: ServerConfig, card: ModelCard, tokenizer: Tokenizer) -> None:
        """Registers the services; must run inside an event loop. Nothing listens yet."""
        self._config = config
        self._served = ServedModel(card, tokenizer)
        self._draining = asyncio.Event()
        self._health: Any = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=(StatusInterceptor(), DrainInterceptor(self._draining)), options=OPTIONS
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self._served), self._server
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(tokenizer), self._server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self._served, config.max_waiting_requests), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = (INFERENCE, TOKENIZER, MODEL, HEALTH, *REFLECTION_SERVICES)
        Reflection(services, served_files()).add_to(self._server)

    @property
    def engine(self) -> Engine | None:
        """The engine, once it serves."""
        return self._served.engine

    async def listen(self) -> int:
        """Starts to answer; only the tokenizer is healthy yet. Returns the port."""
        await self._set_health(False, WHOLE_SERVER, INFERENCE, MODEL)
        await self._set_health(True, TOKENIZER)
        port = self._server.add_insecure_port(f"{self._config.host}:{self._config.port}")
        await self._server.start()
        return port

    async def serve(self, executor: Executor) -> None:
        """Takes requests from now on. The executor is warm: health must not promise too early."""
        engine = Engine(
            executor,
            max_waiting_requests=self._config.max_waiting_requests,
            adaptive_drafts=self._config.adaptive_drafts,
            single_program=self._config.strict,
        )
        await engine.start()
        self._served.engine = engine
        await self._set_health(True, WHOLE_SERVER, INFERENCE, MODEL)

    async def engine_lost(self) -> None:
        """Waits until the engine fails; health tells so at once."""
        while (engine := self._served.engine) is None or engine.state is not EngineState.FAILED:
            await asyncio.sleep(STATE_POLL_S)
        await self._set_health(False, WHOLE_SERVER, INFERENCE)

    async def drain(self, grace_s: float) -> None:
        """Turns health red, lets running requests finish, and stops."""
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(WATCH_LAG_S)
        self._draining.set()
        await self._server.stop(grace_s)
        if self._served.engine is not None:
            await self._served.engine.stop(0)

    async def _set_health(self, healthy: bool, *services: str) -> None:
        response = health_pb2.HealthCheckResponse
        for service in services:
            await self._health.set(service, response.SERVING if healthy else response.NOT_SERVING)


async def run(config: ServerConfig, load: Callable[[], Executor]) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine is lost.

    Args:
      config: where to listen, and within which bounds.
      load: loads the checkpoint and compiles its programs; called on a thread of its own, while the
        server already listens and says that it is not ready.

    Returns:
      The exit code: 0 after a signal, 1 when the model could not be loaded or its engine failed.
    """
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    card = ModelCard.from_directory(config.checkpoint)
    server = Server(config, card, Tokenizer.from_directory(config.checkpoint))
    port = await server.listen()
    print(f"tandem listening on {config.host}:{port}", flush=True)
    serving = asyncio.create_task(serve_until_lost(server, load))
    stop = asyncio.create_task(signalled.wait())
    await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        logger.error("cannot serve %s", card.name, exc_info=serving.exception())
    serving.cancel()
    logger.info("draining for at most %g s", config.grace_seconds)
    await server.drain(config.grace_seconds)
    return 1 if serving.done() and not serving.cancelled() else 0


async def serve_until_lost(server: Server, load: Callable[[], Executor]) -> None:
    """Loads, serves, and returns when the engine has failed."""
    await server.serve(await in_daemon_thread(load))
    print("tandem ready", flush=True)
    await server.engine_lost()


def in_daemon_thread(work: Callable[[], Executor]) -> asyncio.Future[Executor]:
    """Runs work that cannot be interrupted where it does not keep the process alive."""
    future: concurrent.futures.Future[Executor] = concurrent.futures.Future()

    def settle() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=settle, name="load", daemon=True).start()
    return asyncio.wrap_future(future)

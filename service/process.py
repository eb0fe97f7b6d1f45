"""One process that serves: from the first stage of its start to its exit code."""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

from service.chats import Chats
from service.config import ServerConfig
from service.engine.engine import Engine
from service.engine.loop import EngineState
from service.engine.supervisor import in_daemon_thread
from service.engine.types import Executor
from service.model_card import ModelCard
from service.server import Server
from service.startup import StartupLog
from service.text.chat_template import ChatTemplate
from service.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Signals:
    """SIGTERM and SIGINT: the first asks to drain, another one not to wait for anybody."""

    def __init__(self) -> None:
        """Takes the signals over; must run inside an event loop, on the main thread."""
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        again = " again" if self.drain.is_set() else ""
        logger.info("%s%s", signal.Signals(number).name, again)
        (self.hurry if again else self.drain).set()


async def run(
    config: ServerConfig, load: Callable[[], Executor], log: StartupLog | None = None
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine is lost.

    Args:
      config: where to listen, and within which bounds.
      load: loads the checkpoint and compiles its programs; called on a thread of its own, while the
        server already listens and says that it is not ready.
      log: hears of the stages of the start.

    Returns:
      The exit code: 0 after a signal, 1 when the model could not be loaded, its engine was lost, or
      something is still held once it has been drained.

    Raises:
      OSError, RuntimeError, ValueError: the checkpoint is not one, or the port is taken.
    """
    log = log or StartupLog()
    signals = Signals()
    reading = in_daemon_thread("read", lambda: read(config))
    if not await comes_before(reading, signals.drain):
        return 0
    server = Server(config, *await reading)
    address = f"{config.host}:{await server.listen()}"
    log.stage(f"listening on {address}")
    print(f"tandem listening on {address}", flush=True)
    serving = asyncio.create_task(serve_until_lost(server, load, log))
    lost = await comes_before(serving, signals.drain)
    if lost:
        logger.error("cannot serve %s", config.checkpoint, exc_info=serving.exception())
    serving.cancel()
    logger.info("draining for at most %g s", config.grace_seconds)
    draining = asyncio.create_task(server.drain(config.grace_seconds))
    if not await comes_before(draining, signals.hurry):
        await server.drain(0)
    await draining
    logger.info("drained")
    return 0 if not lost and left_nothing(server.engine) else 1


def read(config: ServerConfig) -> tuple[ModelCard, Tokenizer, Chats]:
    """Reads what the server tells of the checkpoint before it is loaded."""
    tokenizer = Tokenizer.from_directory(config.checkpoint)
    template = ChatTemplate.from_directory(config.checkpoint)
    output_format = None if config.chat_format == "auto" else config.chat_format
    card = ModelCard.from_directory(config.checkpoint)
    return card, tokenizer, Chats(template, tokenizer, output_format)


def left_nothing(engine: Engine | None) -> bool:
    """Proves that a stopped engine holds nothing any more, and says so in the log."""
    if engine is None or engine.state is not EngineState.STOPPED:
        return True
    load = engine.load()
    try:
        engine.check_integrity()
        if held := load.running + load.prefilling + load.waiting + load.pages_used:
            raise RuntimeError(f"{held} slots, waiting requests and pages are held: {load}")
    except RuntimeError as error:
        logger.error("integrity: %s", error)
        return False
    logger.info("integrity: all %d slots and %d pages are free", load.slots, load.pages)
    return True


async def serve_until_lost(server: Server, load: Callable[[], Executor], log: StartupLog) -> None:
    """Loads, serves, and returns when the engine is lost."""
    await server.serve(await in_daemon_thread("load", load))
    log.ready()
    print("tandem ready", flush=True)
    await server.engine_lost()


async def comes_before(work: "asyncio.Future[Any]", event: asyncio.Event) -> bool:
    """Waits for the first of two; returns whether the work is done."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()

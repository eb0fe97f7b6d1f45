"""`python -m service`: serves a checkpoint until SIGTERM or SIGINT."""

import asyncio
import json
import logging
import os
import sys

from service import memory
from service.config import ServerConfig, effective, read_config
from service.engine.types import Executor
from service.process import run
from service.startup import StartupLog
from service.telemetry.logs import configure_logging
from service.text.tokenizer import Tokenizer


def load(config: ServerConfig, log: StartupLog) -> Executor:
    """Loads the checkpoint and compiles every program."""
    machine = memory.read_machine(os.environ)
    usable = None
    if machine is not None:
        usable = memory.usable_bytes(machine, config.memory_gib)
        memory.limit_jax(machine, usable, os.environ)
    # Imported here, so that the server listens before the seconds that JAX takes to start.
    from service.engine.executor import load_executor, use_compilation_cache

    if config.compilation_cache is not None:
        use_compilation_cache(config.compilation_cache)
    before = memory.resident_bytes()
    executor = load_executor(
        config.checkpoint,
        slots=config.slots,
        max_context=config.max_context,
        page_size=config.page_size,
        pages=config.pages,
        draft_length=config.draft_length,
        rounds_per_call=config.rounds_per_call,
        prefill_chunk=config.prefill_chunk,
        dtype=config.dtype,
        kv_dtype=None if config.kv_dtype == "auto" else config.kv_dtype,
        addressable_tokens=Tokenizer.from_directory(config.checkpoint).vocab_size,
        usable_bytes=usable,
        log=log,
    )
    executor.self_test(strict=config.strict, log=log)
    executor.warm_up(single_program=config.strict, log=log)
    growth = memory.resident_bytes() - before
    memory.compare(executor.planned_bytes, executor.peak_bytes(), growth, usable)
    return executor


def main() -> None:
    """Parses the command line, serves, and ends the process."""
    log = StartupLog()
    config, given = read_config()
    configure_logging(config)
    logging.captureWarnings(True)
    logging.info("configuration: %s", json.dumps(effective(config)))
    logging.info("given: %s", json.dumps(given))
    try:
        code = asyncio.run(run(config, lambda: load(config, log), log))
    except (OSError, RuntimeError, ValueError) as error:
        # The checkpoint is not one, or the port is taken: nothing that a trace would explain.
        logging.error("cannot start: %s", error)
        code = 1
    # A load that is still compiling cannot be interrupted and must not delay the exit.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""`python -m service`: serves a checkpoint until SIGTERM or SIGINT."""

import asyncio
import logging
import os
import sys

from service.config import ServerConfig, parse_config
from service.engine.types import Executor
from service.server import run
from service.text.tokenizer import Tokenizer


def load(config: ServerConfig) -> Executor:
    """Loads the checkpoint and compiles every program."""
    # Imported here, so that the server listens before the seconds that JAX takes to start.
    from service.engine.executor import load_executor

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
        addressable_tokens=Tokenizer.from_directory(config.checkpoint).vocab_size,
    )
    executor.warm_up(single_program=config.strict)
    return executor


def main() -> None:
    """Parses the command line, serves, and ends the process."""
    config = parse_config()
    logging.basicConfig(
        level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # It reports at INFO every platform that is not there.
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        code = asyncio.run(run(config, lambda: load(config)))
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

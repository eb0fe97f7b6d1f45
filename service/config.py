"""Settings of a server: one frozen dataclass, filled from the command line."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import model

DEMO_CHECKPOINT = Path(model.__file__).parent / "demo"
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """What one server serves, where, and within which bounds."""

    checkpoint: Path = DEMO_CHECKPOINT
    host: str = "127.0.0.1"
    port: int = 50051
    slots: int = 4
    max_context: int | None = None
    page_size: int = 16
    pages: int | None = None
    draft_length: int = 3
    rounds_per_call: int = 4
    prefill_chunk: int = 128
    dtype: str = "float32"
    adaptive_drafts: bool = True
    strict: bool = False
    max_waiting_requests: int = 256
    grace_seconds: float = 120.0
    log_level: str = "INFO"


def integer_from(minimum: int, maximum: int = 2**31 - 1):
    """Returns an argparse type: an integer in [minimum, maximum]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not in [{minimum}, {maximum}]")
        return value

    return parse


def seconds(text: str) -> float:
    """Parses a duration of an argparse option: a finite number that is not negative."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


def directory(text: str) -> Path:
    """Parses a checkpoint directory."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path


def parse_config(arguments: Sequence[str] | None = None) -> ServerConfig:
    """Reads the command line; ends the process with a message when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m service",
        description="Serves a Qwen3.6-class checkpoint over gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = ServerConfig()

    def option(name: str, **settings: object) -> None:
        value = getattr(default, name)
        parser.add_argument("--" + name.replace("_", "-"), default=value, **settings)  # pyright: ignore[reportArgumentType]

    option(
        "checkpoint",
        type=directory,
        help="directory with config.json, tokenizer.json and safetensors",
    )
    option("host", help="address to listen on")
    option("port", type=integer_from(0, 65535), help="port to listen on; 0 takes any free one")
    option("slots", type=integer_from(1), help="requests that decode together")
    option(
        "max_context",
        type=integer_from(2),
        help="tokens of prompt and reply; unset: the model's own maximum",
    )
    option("page_size", type=integer_from(1), help="tokens in one page of the KV caches")
    option(
        "pages",
        type=integer_from(1),
        help="pages of the KV caches for all slots together; unset: all that the slots could fill",
    )
    option(
        "draft_length", type=integer_from(0), help="draft tokens per round; 0 turns drafting off"
    )
    option("rounds_per_call", type=integer_from(1), help="rounds in one decode call")
    option("prefill_chunk", type=integer_from(1), help="prompt tokens in one prefill call")
    option("dtype", choices=DTYPES, help="type of parameters, keys and values")
    option(
        "adaptive_drafts",
        action=argparse.BooleanOptionalAction,
        help="draft fewer tokens, up to the default cap, while more do not pay",
    )
    option(
        "strict",
        action="store_true",
        help="one decode program: replies equal bit by bit whatever the draft cap, company and load",
    )
    option("max_waiting_requests", type=integer_from(1), help="waiting requests; more are refused")
    option("grace_seconds", type=seconds, help="how long running requests may go on after SIGTERM")
    option(
        "log_level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="least severe lines to log"
    )
    return ServerConfig(**vars(parser.parse_args(arguments)))

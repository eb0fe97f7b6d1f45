"""Drives a real server with a mixed load, checks every reply, and reports.

Without --target it starts a server of its own on the embedded checkpoint. Clients read, read slowly,
cancel, break and resume, set deadlines and send bad requests. At the end nothing may be held, memory
must not have grown after warm-up, and, of an own server, SIGTERM while streams run must lose none of
them. Writes report.md, report.json and report.png; exit code 1 when anything was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from load_testing.own_server import COMMAND, own_server
from load_testing.picture import draw
from load_testing.report import MemoryBound, markdown
from load_testing.session import Plan, Session
from load_testing.workload import Mix
from local_server import ServerEndedError

SOAK_S = 1800.0
WARM_UP_SHARE = 0.2
"""Of the duration, in which memory may still grow."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="host:port of a running server; default: start one")
    parser.add_argument("--metrics-url", help="/metrics of the running server, for its memory")
    parser.add_argument("--streams", type=int, default=16, help="calls in flight (default 16)")
    parser.add_argument("--rate", type=float, help="calls per second at random moments instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--soak", action="store_true", help="for 30 minutes")
    parser.add_argument(
        "--warm-up", type=float, help="seconds before memory is judged; default 20%%"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="at most (default 512)")
    parser.add_argument("--reply-tokens", type=int, default=128, help="at most (default 128)")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Mix):
        parser.add_argument(
            f"--{field.name}", type=float, default=field.default, metavar="SHARE",
            help=f"of calls, in [0, 1] (default {field.default})",
        )  # fmt: skip
    parser.add_argument("--max-growth-mb", type=float, default=50.0)
    parser.add_argument("--max-growth-percent", type=float, default=2.0)
    parser.add_argument(
        "--out", type=Path, default=Path("load-report"), help="folder for the report"
    )
    parser.add_argument(
        "--server-log", type=Path, help="of the own server; default: in that folder"
    )
    parser.add_argument("--title", default="", help="words about the machine, for the report")
    parser.add_argument(
        "server",
        nargs="*",
        metavar="-- SERVER OPTIONS",
        help="for the own server: see service --help",
    )
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    """Returns what was asked for.

    Raises:
      ValueError: the shares of the mixture are not shares.
    """
    seconds = SOAK_S if options.soak else options.seconds
    return Plan(
        seconds=seconds,
        warm_up_s=WARM_UP_SHARE * seconds if options.warm_up is None else options.warm_up,
        streams=options.streams,
        rate=options.rate,
        prompt_tokens=options.prompt_tokens,
        reply_tokens=options.reply_tokens,
        seed=options.seed,
        mix=Mix(*(getattr(options, field.name) for field in dataclasses.fields(Mix))),
        memory_bound=MemoryBound(options.max_growth_mb, options.max_growth_percent),
        title=options.title,
    )


def run(options: argparse.Namespace, command: Sequence[str] = COMMAND) -> int:
    """Runs the test, writes the report and returns the exit code; `command` starts a server."""
    plan, out = plan_of(options), options.out
    log_path = options.server_log or out / "server.log"
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        server, target, metrics_url = None, options.target, options.metrics_url
        if target is None:
            slots = ("--slots", f"{options.streams}", *options.server)
            server = stack.enter_context(own_server(log_path, slots, command))
            target, metrics_url = server.target, server.metrics_url
        session = Session(plan, server, metrics_url)
        summary = asyncio.run(session.run(target))
    (out / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    picture = "report.png"
    try:
        draw(out / picture, session.series, session.tally, session.begun_at, session.warm_at)
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        picture = None
    text = markdown(summary, picture)
    (out / "report.md").write_text(text)
    print(text)
    return int(summary["problem_count"] > 0)


def main() -> int:
    """Runs the tool; returns its exit code."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an own server is ended, too
    try:
        return run(options)
    except (OSError, ServerEndedError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

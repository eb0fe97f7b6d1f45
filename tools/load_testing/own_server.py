"""The server that a load test starts: what it logs, where its metrics are, how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from local_server import server_process

COMMAND = (sys.executable, "-m", "service", "--port", "0")
LOGGING = ("--log-level", "INFO", "--log-format", "text", "--metrics-port", "0")
METRICS_LINE = re.compile(r"metrics on (http://\S+)")
INTEGRITY_LINE = re.compile(r"integrity: .*")
GRACE_S = 120.0


@dataclasses.dataclass(frozen=True)
class OwnServer:
    """A server that runs."""

    target: str
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text()

    @property
    def metrics_url(self) -> str:
        """Where it serves /metrics."""
        found = METRICS_LINE.search(self.log)
        if found is None:
            raise RuntimeError(f"{self.log_path} does not say where the metrics are")
        return found[1]

    @property
    def integrity(self) -> str:
        """What the check of integrity found, which the server makes when it has been drained."""
        found = INTEGRITY_LINE.search(self.log)
        return found[0] if found else "integrity: not checked"

    def problems_at_end(self) -> list[str]:
        """What its exit code and its log say against it, once it has ended."""
        code, log = self.process.wait(GRACE_S), self.log
        problems = [] if code == 0 else [f"the server's exit code is {code}"]
        if "are free" not in self.integrity:
            problems.append(self.integrity)
        errors = [line for line in log.splitlines() if " ERROR " in line]
        problems += [f"log: {line}" for line in errors[:5]]
        return problems


@contextlib.contextmanager
def own_server(
    log_path: Path, arguments: Sequence[str] = (), command: Sequence[str] = COMMAND
) -> Iterator[OwnServer]:
    """Runs a server for the length of a block; it may end before that.

    Args:
      log_path: file for its log.
      arguments: further options of `python -m service`.
      command: what to run in place of it, with the same options.

    Raises:
      ServerEndedError: it ended before it was ready.
    """
    grace = ("--grace-seconds", f"{GRACE_S:g}")
    with (
        log_path.open("w") as log,
        server_process([*command, *LOGGING, *grace, *arguments], log) as (target, process),
    ):
        yield OwnServer(target, process, log_path)

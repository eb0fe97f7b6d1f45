"""A server of a tool's own: started on a free port, ready when yielded, ended afterwards."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

COMMAND = (sys.executable, "-m", "service", "--port", "0", "--log-level", "WARNING")
LISTENING = "tandem listening on "
INFERENCE = "tandem.v1.InferenceService"


class ServerEndedError(Exception):
    """The server ended before it was ready; its own words are on stderr."""


def wait_until_serving(target: str) -> None:
    """Waits until a server's inference is healthy, however long it compiles.

    Raises:
      ServerEndedError: it drained or was lost before.
    """
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        watch = stub.Watch(request, wait_for_ready=True)
        try:
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise ServerEndedError(f"the server at {target} is gone") from error
        finally:
            watch.cancel()
    raise ServerEndedError(f"the server at {target} ended before it was ready")


@contextlib.contextmanager
def local_server(arguments: Sequence[str] = (), command: Sequence[str] = COMMAND) -> Iterator[str]:
    """Runs a server for the length of a block.

    Args:
      arguments: further options of `python -m service`; the embedded checkpoint is served without.
      command: what to run; prints the line that `service` prints.

    Yields:
      The target, `host:port`, once inference is healthy.

    Raises:
      ServerEndedError: it ended before that.
    """
    with server_process([*command, *arguments]) as (target, _):
        yield target


@contextlib.contextmanager
def server_process(
    command: Sequence[str], log: IO[str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Does what `local_server` does, and yields the process too; `log` gets what it logs."""
    # A session of its own: Ctrl-C is for the tool, which ends the server itself.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(LISTENING):
                raise ServerEndedError(f"the server did not start (exit code {process.wait()})")
            target = line.removeprefix(LISTENING).strip()
            wait_until_serving(target)
            yield target, process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

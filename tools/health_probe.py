"""Exits 0 when the service at an address reports SERVING, 1 otherwise; for containers.

Usage: python tools/health_probe.py [ADDRESS [SERVICE]]
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def probe(address: str, service: str = "") -> str:
    """Asks `grpc.health.v1.Health/Check`.

    Args:
      address: host and port.
      service: full name of a service; empty asks about the whole server.

    Returns:
      "SERVING", another state's name, or the status code of a call that failed.
    """
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stub file names no methods
            reply = stub.Check(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


if __name__ == "__main__":
    state = probe(*(sys.argv[1:] or ["localhost:50051"]))
    print(state)
    sys.exit(state != "SERVING")

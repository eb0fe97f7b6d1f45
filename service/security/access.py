"""Who calls: every method but those of health checks needs a bearer token with room for the call."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from service.errors import RETRY_AFTER_S, ServiceError, quota_exceeded, unauthenticated
from service.interceptors import (
    GENERATING_METHODS,
    Behaviour,
    Context,
    Continuation,
    Handler,
    current_caller,
    with_behaviour,
)
from service.security.tokens import Token, TokenFile

OPEN_PREFIX = "/grpc.health.v1.Health/"
"""Methods that need no token: probes have none."""
SCHEME = "bearer"


class Usage:
    """What one token has used of its limits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._room = math.inf
        """Calls that may come at once; refilled at the token's rate, up to as many as it names."""
        self._refilled_at = clock()

    def enter(self, token: Token) -> None:
        """Counts a call that begins.

        Raises:
          ServiceError: RESOURCE_EXHAUSTED: too many calls run, or they come too fast.
        """
        if token.concurrency is not None and self._running >= token.concurrency:
            actual, limit = f"{self._running + 1}", f"{token.concurrency}"
            raise quota_exceeded(
                "TOO_MANY_CALLS",
                token.name,
                f"{actual} calls at the same time; at most {limit}",
                {"actual": actual, "limit": limit},
                RETRY_AFTER_S,
            )
        self._take(token)
        self._running += 1

    def leave(self) -> None:
        """Counts a call that ends."""
        self._running -= 1

    def _take(self, token: Token) -> None:
        """Takes one call out of the token's bucket."""
        if (rate := token.rate) is None:
            return
        now = self._clock()
        refill = (now - self._refilled_at) * rate.per_second
        self._room, self._refilled_at = min(self._room + refill, rate.calls), now
        if self._room < 1:
            wait_s = math.ceil((1 - self._room) / rate.per_second * 1000) / 1000
            description = f"calls come faster than {rate}"
            limit = {"limit": f"{rate}"}
            raise quota_exceeded("RATE_LIMITED", token.name, description, limit, wait_s)
        self._room -= 1


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token before their request is read; limits those with one.

    The limits are for methods that generate. ServiceError is raised within the call: this belongs
    inside of `StatusInterceptor`.
    """

    def __init__(self, tokens: TokenFile, clock: Callable[[], float] = time.monotonic) -> None:
        """Guards with the tokens of a file; `clock` gives seconds."""
        self._tokens = tokens
        self._clock = clock
        self._usage: dict[str, Usage] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call, or puts a refusal in its place."""
        method, handler = handler_call_details.method, await continuation(handler_call_details)
        # What does not exist is not refused: names that callers make up must not reach metrics.
        if handler is None or method.startswith(OPEN_PREFIX):
            return handler
        try:
            token = self._authenticate(handler_call_details.invocation_metadata or ())
        except ServiceError as failure:
            return refusal(failure)
        current_caller.set(token.name)
        if method not in GENERATING_METHODS:
            return handler
        return with_behaviour(handler, self._within_limits(token))

    def _authenticate(self, metadata: Sequence[tuple[str, str | bytes]]) -> Token:
        headers = [value for key, value in metadata if key == "authorization"]
        if not headers:
            raise unauthenticated(
                "TOKEN_MISSING", "metadata has no authorization, must have: Bearer and a token"
            )
        scheme, _, secret = str(headers[0]).partition(" ")
        token = self._tokens.find(secret.strip())
        if token is None or len(headers) > 1 or scheme.lower() != SCHEME:
            raise unauthenticated(
                "TOKEN_UNKNOWN", "metadata authorization must be Bearer and a token of this server"
            )
        return token

    def _within_limits(self, token: Token) -> Callable[[Behaviour], Behaviour]:
        usage = self._usage.setdefault(token.name, Usage(self._clock))

        def wrap(behaviour: Behaviour) -> Behaviour:
            async def limited(request: Any, context: Context) -> Any:
                usage.enter(token)
                try:
                    return await behaviour(request, context)
                finally:
                    usage.leave()

            return limited

        return wrap


def refusal(failure: ServiceError) -> "Handler":
    """Returns a handler that ends the call unread: of a stream of requests it reads none."""

    async def refuse(request: Any, context: Context) -> None:
        raise failure

    return grpc.stream_stream_rpc_method_handler(refuse)

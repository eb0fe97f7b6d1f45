"""What every call passes through: exceptions become statuses, calls leave a log line, watches end.

Handlers are coroutines that answer with `return` or `context.write`, never async generators: a call
that is cancelled while a message is written then raises inside the handler, whose `finally` runs at
once. A generator would be left suspended until it is collected.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
from grpc_status import rpc_status

from service.errors import ServiceError, from_exception

logger = logging.getLogger(__name__)

OWN_PREFIX = "/tandem."
"""Methods of our own services; health and reflection are quiet."""

current_request_id: contextvars.ContextVar[str] = contextvars.ContextVar(
    "current_request_id", default=""
)
"""Set by the handler once the request has an id; each call runs in a context of its own."""

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation = Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"]


def with_behaviour(handler: "Handler", wrap: Callable[[Behaviour], Behaviour]) -> "Handler":
    """Returns the handler with its coroutine wrapped, whichever of the four kinds it is."""
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        behaviour: Behaviour | None = getattr(handler, kind)
        if behaviour is not None:
            build: Any = getattr(grpc, f"{kind}_rpc_method_handler")
            return build(
                wrap(behaviour),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
    raise ValueError("the handler has no behaviour")


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses with details, and logs one line per call of our services."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if not method.startswith(OWN_PREFIX) or handler is None:
            return handler

        def wrap(behaviour: Behaviour) -> Behaviour:
            async def guarded(request: Any, context: Context) -> Any:
                return await guard(method, behaviour, request, context)

            return guarded

        return with_behaviour(handler, wrap)


async def guard(method: str, behaviour: Behaviour, request: Any, context: Context) -> Any:
    """Runs one call; see `StatusInterceptor`."""
    started_at = time.monotonic()
    outcome = "OK"
    try:
        return await behaviour(request, context)
    except asyncio.CancelledError:
        remaining = cast("float | None", context.time_remaining())
        outcome = "CANCELLED" if remaining is None or remaining > 0 else "DEADLINE_EXCEEDED"
        raise
    except Exception as error:
        failure = from_exception(error, current_request_id.get())
        outcome = f"{failure.code.name} {failure.message}"
        if failure.code is grpc.StatusCode.INTERNAL:
            logger.exception("request_id=%s failed", current_request_id.get())
        await abort(context, failure)
    finally:
        elapsed_ms = (time.monotonic() - started_at) * 1000
        logger.info(
            "%s request_id=%s ms=%.0f %s", method, current_request_id.get(), elapsed_ms, outcome
        )


async def abort(context: Context, failure: ServiceError) -> None:
    """Ends a call with a status, its details, and the retry hint that gRPC clients obey."""
    status = rpc_status.to_status(failure.status())  # pyright: ignore[reportUnknownMemberType]
    trailers = [*status.trailing_metadata]
    if failure.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(failure.retry_after_s * 1000))))
    await context.abort(status.code, status.details, tuple(trailers))


class DrainInterceptor(grpc.aio.ServerInterceptor):
    """Ends open calls of other services (health watches, reflection) when the server drains.

    They never end by themselves, so the server would wait for its whole grace period.
    """

    def __init__(self, draining: asyncio.Event) -> None:
        """Watches the event that the server sets when it drains."""
        self._draining = draining

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(OWN_PREFIX) or handler is None:
            return handler
        return with_behaviour(handler, self._until_draining)

    def _until_draining(self, behaviour: Behaviour) -> Behaviour:
        async def bounded(request: Any, context: Context) -> Any:
            call = asyncio.ensure_future(behaviour(request, context))
            drain = asyncio.ensure_future(self._draining.wait())
            try:
                await asyncio.wait({call, drain}, return_when=asyncio.FIRST_COMPLETED)
                return call.result() if call.done() else None
            finally:
                call.cancel()
                drain.cancel()

        return bounded

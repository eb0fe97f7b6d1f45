"""What every call passes through: exceptions become statuses, calls leave a log line, watches end.

Handlers are coroutines that answer with `return` or `context.write`, never async generators: a call
that is cancelled while a message is written then raises inside the handler, whose `finally` runs at
once. A generator would be left suspended until it is collected.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from service.errors import ServiceError, from_exception, malformed, unavailable

logger = logging.getLogger(__name__)

OWN_PREFIX = "/tandem."
"""Methods of our own services; health and reflection are quiet."""

SERVED_WHILE_DRAINING = frozenset(
    f"{OWN_PREFIX}v1.InferenceService/{method}" for method in ("Cancel", "Resume")
)
"""Methods about requests that run."""
GENERATING_METHODS = frozenset(
    f"{OWN_PREFIX}v1.InferenceService/{method}" for method in ("Generate", "Complete", "Resume")
)
"""Methods that answer with what the model generates."""
ENDLESS = frozenset({f"{OWN_PREFIX}v1.ModelService/WatchLoad"})
"""Methods of ours that only the client or the end of the server ends."""

current_request_id: contextvars.ContextVar[str] = contextvars.ContextVar(
    "current_request_id", default=""
)
"""Set by the handler once the request has an id; each call runs in a context of its own."""
current_caller: contextvars.ContextVar[str] = contextvars.ContextVar("current_caller", default="")
"""Name of the token that the call came with; empty where none is needed."""

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation = Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"]


def with_behaviour(
    handler: "Handler", wrap: Callable[[Behaviour], Behaviour], *, raw: bool = False
) -> "Handler":
    """Returns the handler with its coroutine wrapped, whichever of the four kinds it is.

    With `raw`, what is passed to it are the bytes of the requests.
    """
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        behaviour: Behaviour | None = getattr(handler, kind)
        if behaviour is not None:
            build: Any = getattr(grpc, f"{kind}_rpc_method_handler")
            return build(
                wrap(behaviour),
                request_deserializer=None if raw else handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
    raise ValueError("the handler has no behaviour")


class CallObserver(Protocol):
    """Is told how calls end."""

    def call_ended(self, method: str, code: grpc.StatusCode, reason: str, seconds: float) -> None:
        """A call has ended; still in its context.

        Args:
          method: with its service, as in "/tandem.v1.InferenceService/Generate".
          code: what it ended with.
          reason: ErrorInfo.reason of its status; empty when it has none.
          seconds: how long it took.
        """
        ...


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses with details, and logs one line per call.

    Calls of services that are not our own (health, reflection) are logged at DEBUG.
    """

    def __init__(self, observers: Sequence[CallObserver] = ()) -> None:
        """Takes who is told of each call."""
        self._observers = observers

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None

        def wrap(behaviour: Behaviour) -> Behaviour:
            async def guarded(request: Any, context: Context) -> Any:
                return await guard(method, behaviour, request, context, self._observers)

            return guarded

        return with_behaviour(handler, wrap)


async def guard(
    method: str,
    behaviour: Behaviour,
    request: Any,
    context: Context,
    observers: Sequence[CallObserver],
) -> Any:
    """Runs one call; see `StatusInterceptor`."""
    started_at = time.monotonic()
    code, reason, text = grpc.StatusCode.OK, "", ""
    try:
        return await behaviour(request, context)
    except asyncio.CancelledError:
        remaining = cast("float | None", context.time_remaining())
        in_time = remaining is None or remaining > 0
        code = grpc.StatusCode.CANCELLED if in_time else grpc.StatusCode.DEADLINE_EXCEEDED
        raise
    except grpc.aio.AbortError:  # the handler has said the status itself
        code, text = context.code(), context.details()
        raise
    except Exception as error:
        failure = from_exception(error, current_request_id.get())
        code, reason, text = failure.code, failure.reason, failure.message
        if failure.code is grpc.StatusCode.INTERNAL:
            logger.exception("request_id=%s failed", current_request_id.get())
        await abort(context, failure)
    finally:
        seconds = time.monotonic() - started_at
        for observer in observers:
            observer.call_ended(method, code, reason, seconds)
        level = logging.INFO if method.startswith(OWN_PREFIX) else logging.DEBUG
        outcome = f"{code.name} {text}".rstrip()
        request_id = current_request_id.get()
        logger.log(
            level, "%s request_id=%s ms=%.0f %s", method, request_id, seconds * 1000, outcome
        )


async def abort(context: Context, failure: ServiceError) -> None:
    """Ends a call with a status, its details, and the retry hint that gRPC clients obey."""
    status = rpc_status.to_status(failure.status())  # pyright: ignore[reportUnknownMemberType]
    trailers: list[tuple[str, str | bytes]] = [
        *context.trailing_metadata(),  # they would be replaced
        *status.trailing_metadata,
    ]
    if failure.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(failure.retry_after_s * 1000))))
    await context.abort(status.code, status.details, tuple(trailers))


class DrainInterceptor(grpc.aio.ServerInterceptor):
    """When the server drains, refuses new calls of our services and ends those that go on for ever.

    Without that the server would wait for health watches and the like for its whole grace period.
    """

    def __init__(self, draining: asyncio.Event) -> None:
        """Watches the event that the server sets when it drains."""
        self._draining = draining

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method in SERVED_WHILE_DRAINING:
            return handler
        if method.startswith(OWN_PREFIX) and method not in ENDLESS:
            return with_behaviour(handler, self._unless_draining)
        endless = handler.response_streaming
        return with_behaviour(handler, self._until_draining) if endless else handler

    def _unless_draining(self, behaviour: Behaviour) -> Behaviour:
        async def refusing(request: Any, context: Context) -> Any:
            if self._draining.is_set():
                raise draining()
            return await behaviour(request, context)

        return refusing

    def _until_draining(self, behaviour: Behaviour) -> Behaviour:
        async def bounded(request: Any, context: Context) -> Any:
            call = asyncio.ensure_future(behaviour(request, context))
            drain = asyncio.ensure_future(self._draining.wait())
            try:
                await asyncio.wait({call, drain}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    raise draining()
                return call.result()
            finally:
                call.cancel()
                drain.cancel()

        return bounded


def draining() -> ServiceError:
    """The server takes no more calls. Another one may."""
    return unavailable("DRAINING", "the server drains: it finishes running requests, and then ends")


class ParseInterceptor(grpc.aio.ServerInterceptor):
    """Parses requests inside the call: bytes that are no message are the client's mistake.

    gRPC by itself would parse them before, and end the call with UNKNOWN and words of Python.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or (deserialize := handler.request_deserializer) is None:
            return handler
        streaming = handler.request_streaming

        def parse(raw: bytes) -> Any:
            try:
                return deserialize(raw)
            except DecodeError as error:
                raise malformed(len(raw), str(error)) from None

        async def parse_each(requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
            async for raw in requests:
                yield parse(raw)

        def wrap(behaviour: Behaviour) -> Behaviour:
            async def parsed(request: Any, context: Context) -> Any:
                message = parse_each(request) if streaming else parse(request)
                return await behaviour(message, context)

            return parsed

        return with_behaviour(handler, wrap, raw=True)

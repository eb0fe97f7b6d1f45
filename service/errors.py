"""Failures as clients see them: a status code, one sentence, and google.rpc details.

ErrorInfo (domain "tandem") is always there, so that programs never parse the sentence. Statuses
stay small and hold no trace: details travel in trailers, which have a size limit.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]

from service.engine.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    QueueFullError,
    RequestTooLargeError,
)

DOMAIN = "tandem"
MAX_VIOLATIONS = 16
"""Field violations told for one request."""
RETRY_AFTER_S = 1.0
"""When to retry where nothing better is known."""
FIELD_OF_ENGINE_FIELD = {
    "prompt_ids": "prompt",
    "max_tokens": "stopping.max_tokens",
    "stop_ids": "stopping.stop_token_ids",
    "logit_bias": "sampling.logit_bias",
    "choices": "choices",
    "request_id": "request_id",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that cannot be accepted."""

    field: str
    """Path of the field, for example `stopping.stop_token_ids[2]`."""
    actual: str
    """The value, or its size."""
    limit: str
    """What would be accepted, to follow "must be"."""

    @property
    def description(self) -> str:
        """The violation as a sentence without its subject, which is the field."""
        return f"is {self.actual}, must be {self.limit}"


class ServiceError(Exception):
    """A failure with the status that the client gets."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        details: Sequence[Message] = (),
        retry_after_s: float | None = None,
    ) -> None:
        """Describes a failure.

        Args:
          code: status code of the call.
          reason: UPPER_SNAKE_CASE constant for programs (ErrorInfo.reason).
          message: one sentence for people.
          metadata: facts for programs (ErrorInfo.metadata).
          details: further google.rpc messages.
          retry_after_s: when a retry may succeed; adds RetryInfo.
        """
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.details: list[Message] = [
            error_details_pb2.ErrorInfo(
                reason=reason, domain=DOMAIN, metadata=dict(metadata or {})
            ),
            *details,
        ]
        if retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(retry_after_s * 1000))
            self.details.append(error_details_pb2.RetryInfo(retry_delay=delay))

    def status(self) -> status_pb2.Status:
        """Returns the failure as google.rpc.Status, for `grpc_status.rpc_status.to_status`."""
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


def invalid_argument(violations: Sequence[Violation]) -> ServiceError:
    """All bad fields of one request, at once."""
    told, first = violations[:MAX_VIOLATIONS], violations[0]
    message = "; ".join(f"{violation.field} {violation.description}" for violation in told)
    if len(violations) > len(told):
        message += "; and more"
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        message,
        metadata={"field": first.field, "actual": first.actual, "limit": first.limit},
        details=[
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=violation.field, description=violation.description
                    )
                    for violation in told
                ]
            )
        ],
    )


def unavailable(reason: str, message: str, retry_after_s: float = RETRY_AFTER_S) -> ServiceError:
    """The service cannot take requests now: warming up, draining, or its engine is lost."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s)


def internal(request_id: str) -> ServiceError:
    """Anything unexpected. The log has the trace under the same request id."""
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        f"internal error in request {request_id or '(no id)'}; the server's log says more",
        details=[error_details_pb2.RequestInfo(request_id=request_id)],
    )


def from_exception(error: Exception, request_id: str) -> ServiceError:
    """Returns how a failure of any kind is told to the client."""
    match error:
        case ServiceError():
            return error
        case QueueFullError():
            return queue_full(error)
        case DuplicateRequestError():
            return ServiceError(
                grpc.StatusCode.ALREADY_EXISTS,
                "REQUEST_ID_RUNNING",
                f"request_id {error.request_id} is running; it may be used again afterwards",
                metadata={"request_id": error.request_id},
            )
        case RequestTooLargeError():
            field = FIELD_OF_ENGINE_FIELD.get(error.field, error.field)
            return invalid_argument([Violation(field, f"{error.value}", f"at most {error.limit}")])
        case EngineUnavailableError():
            return unavailable("ENGINE_UNAVAILABLE", str(error))
        case _:
            return internal(request_id)


def queue_full(error: QueueFullError) -> ServiceError:
    """The waiting queue has no room."""
    description = f"{error.actual} waiting {error.kind}; at most {error.limit}"
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=f"waiting_{error.kind}", description=description
    )
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"the waiting queue is full: {description}; retry in {error.retry_after_s:g} s",
        metadata={"actual": f"{error.actual}", "limit": f"{error.limit}", "kind": error.kind},
        details=[error_details_pb2.QuotaFailure(violations=[violation])],
        retry_after_s=error.retry_after_s,
    )

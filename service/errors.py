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
    ConstraintError,
    DeadlineError,
    DuplicateRequestError,
    EngineUnavailableError,
    NotFiniteError,
    QueueFullError,
    RequestTooLargeError,
)

DOMAIN = "tandem"
MAX_VIOLATIONS = 16
"""Field violations told for one request."""
MAX_TOLD_CHARACTERS = 60
"""Of a client's text in a message about it."""
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


def told(text: str) -> str:
    """Returns a client's text, short and in ASCII, for a message about it."""
    if not text:
        return "empty"
    return ascii(text[:MAX_TOLD_CHARACTERS]) + ("..." if len(text) > MAX_TOLD_CHARACTERS else "")


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
        self.reason = reason
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


def malformed(size: int, why: str) -> ServiceError:
    """Bytes of a request that are not a message of its type."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_REQUEST",
        f"the request of {size} bytes cannot be parsed: {why}",
        metadata={"actual": f"{size} bytes"},
    )


def unavailable(reason: str, message: str, retry_after_s: float = RETRY_AFTER_S) -> ServiceError:
    """The service cannot take requests now: warming up, draining, or its engine is lost."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s)


def unauthenticated(reason: str, message: str) -> ServiceError:
    """The caller did not show a token, or one that nobody has."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, message)


def quota_exceeded(
    reason: str, caller: str, description: str, metadata: Mapping[str, str], retry_after_s: float
) -> ServiceError:
    """A caller asks for more than its token allows."""
    violation = error_details_pb2.QuotaFailure.Violation(
        subject=f"token:{caller}", description=description
    )
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        reason,
        f"the limit of token {caller} is reached: {description}; retry in {retry_after_s:g} s",
        metadata={"token": caller, **metadata},
        details=[error_details_pb2.QuotaFailure(violations=[violation])],
        retry_after_s=retry_after_s,
    )


def resume_unknown(request_id: str) -> ServiceError:
    """There is no such reply to continue."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "RESUME_UNKNOWN",
        f"request_id {request_id} is not kept: it never had resume_window, or its window has passed",
        metadata={"request_id": request_id},
        details=[
            error_details_pb2.ResourceInfo(
                resource_type="tandem.v1.GenerateRequest", resource_name=request_id
            )
        ],
    )


def resume_out_of_range(request_id: str, after: int, first_kept: int, sent: int) -> ServiceError:
    """The messages behind `after` are not, or no more, those that could follow."""
    limit = f"in [{first_kept - 1}, {sent - 1}]" if first_kept else f"unset or at most {sent - 1}"
    return ServiceError(
        grpc.StatusCode.OUT_OF_RANGE,
        "RESUME_OUT_OF_RANGE",
        f"after_sequence is {after if after >= 0 else 'not set'}, must be {limit}: the reply of"
        f" request_id {request_id} has {sent} messages so far, kept from {first_kept} on",
        metadata={
            "request_id": request_id,
            "field": "after_sequence",
            "actual": f"{after}",
            "limit": limit,
        },
    )


def resume_superseded(request_id: str) -> ServiceError:
    """Another call has taken the reply over."""
    return ServiceError(
        grpc.StatusCode.ABORTED,
        "RESUMED_ELSEWHERE",
        f"a later Resume of request_id {request_id} took the reply over",
        metadata={"request_id": request_id},
    )


def internal(request_id: str) -> ServiceError:
    """Anything unexpected. The log has the trace under the same request id."""
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        f"internal error in request {request_id or '(no id)'}; the server's log says more",
        details=[error_details_pb2.RequestInfo(request_id=request_id)],
    )


def not_finite(error: NotFiniteError) -> ServiceError:
    """The model failed on one request: what was sent stands, nothing can follow."""
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "NOT_FINITE",
        f"the model has no finite output behind what was sent of request {error.request_id}",
        details=[error_details_pb2.RequestInfo(request_id=error.request_id)],
    )


def constraint_unmet(error: ConstraintError) -> ServiceError:
    """A constraint has led where no token of the vocabulary may follow."""
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "CONSTRAINT_UNMET",
        f"constraint cannot be met with this vocabulary behind what was sent: {error.reason}",
        metadata={"field": "constraint", "actual": error.reason},
    )


def from_exception(error: Exception, request_id: str) -> ServiceError:
    """Returns how a failure of any kind is told to the client."""
    match error:
        case ServiceError():
            return error
        case QueueFullError():
            return queue_full(error)
        case DeadlineError():
            return deadline_exceeded(error)
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
        case NotFiniteError():
            return not_finite(error)
        case ConstraintError():
            return constraint_unmet(error)
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


def deadline_exceeded(error: DeadlineError) -> ServiceError:
    """The first token cannot come within first_token_deadline or the deadline of the call."""
    metadata = {"deadline": f"{error.deadline_s:.3f}s"}
    if error.estimated_wait_s is not None:
        reason, metadata["estimated_wait"] = "DEADLINE_TOO_SHORT", f"{error.estimated_wait_s:.3f}s"
    else:
        reason, metadata["waited"] = "DEADLINE_PASSED", f"{error.waited_s or 0.0:.3f}s"
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        reason,
        f"first_token_deadline: {error}",
        metadata=metadata,
    )

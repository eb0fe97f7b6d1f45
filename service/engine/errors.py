"""What the engine refuses or fails with: plain exceptions that carry their facts as attributes.

Nothing here knows gRPC; `service/errors.py` maps each class to a status code and its details.
"""

from __future__ import annotations

from typing import Literal


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class QueueFullError(EngineError):
    """The waiting queue has no room for the request; trying again later may succeed.

    Attributes:
      kind: which bound was met: waiting requests, or the prompt tokens of waiting requests.
      limit: the bound, in requests or in tokens.
      actual: what the queue would have held with this request, in the same unit.
      retry_after_s: seconds until there is room, as far as is known.
    """

    def __init__(
        self, kind: Literal["requests", "tokens"], limit: int, actual: int, retry_after_s: float
    ) -> None:
        super().__init__(f"the waiting queue is full: {actual} {kind} would exceed {limit}")
        self.kind: Literal["requests", "tokens"] = kind
        self.limit = limit
        self.actual = actual
        self.retry_after_s = retry_after_s


class DeadlineError(EngineError):
    """The first token cannot come in time: refused at once, or dropped from the waiting queue.

    Attributes:
      deadline_s: seconds that the request had for its first token when it was submitted; not above
        0 when it came too late.
      estimated_wait_s: seconds after which the first token was expected, when that is why it was
        refused; else None.
      waited_s: seconds that it has waited, when the deadline has passed; else None.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        estimated_wait_s: float | None = None,
        waited_s: float | None = None,
    ) -> None:
        outcome = (
            f"the request has waited {waited_s:.2f} s"
            if estimated_wait_s is None
            else f"it is expected in {estimated_wait_s:.2f} s"
        )
        super().__init__(f"the first token was wanted within {deadline_s:.2f} s; {outcome}")
        self.deadline_s = deadline_s
        self.estimated_wait_s = estimated_wait_s
        self.waited_s = waited_s


class RequestTooLargeError(EngineError):
    """The request could never be served within the executor's limits, however long it waited.

    Attributes:
      field: the field of `Request` that is too large.
      value: its size: ids for the id lists, tokens for `max_tokens`.
      limit: the largest size that this server takes, the other fields being what they are.
    """

    def __init__(self, field: str, value: int, limit: int) -> None:
        super().__init__(f"{field} is {value}, and this server takes at most {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class DuplicateRequestError(EngineError):
    """A request with the same id is being served.

    Attributes:
      request_id: the id.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"a request with id {request_id!r} is being served")
        self.request_id = request_id


class RequestAbortedError(EngineError):
    """The request was aborted by its id (`Engine.abort`), not by the reader of its stream.

    Attributes:
      request_id: the id.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} was aborted")
        self.request_id = request_id


class NotFiniteError(EngineError):
    """The model's logits for the next token of the request were not finite numbers.

    Attributes:
      request_id: the id.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the logits of request {request_id!r} are not finite")
        self.request_id = request_id


class ConstraintError(EngineError):
    """The constraint of a request cannot be met behind the tokens that were delivered.

    Attributes:
      reason: what is in the way, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the constraint cannot be met: {reason}")
        self.reason = reason


class EngineUnavailableError(EngineError):
    """The engine takes no requests, or gave this one up because it stops.

    Attributes:
      reason: 'not started', 'stopping', 'stopped' or 'failed'.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is unavailable: {reason}")
        self.reason = reason


class EngineFailedError(EngineError):
    """The executor raised while this request was being served; `__cause__` is what it raised.

    Attributes:
      reason: the cause in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine failed: {reason}")
        self.reason = reason

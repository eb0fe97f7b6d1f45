"""What a failed call says, and whether that was to be expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from load_testing.workload import Behaviour, Case

DETAILS_TRAILER = "grpc-status-details-bin"
CODE = grpc.StatusCode


@dataclasses.dataclass(frozen=True)
class Failure:
    """The status of a call."""

    code: grpc.StatusCode
    text: str
    details: dict[str, Message]
    """By name: "ErrorInfo", "RetryInfo" and so on."""

    @property
    def reason(self) -> str:
        """ErrorInfo.reason; empty when there is none."""
        info: Any = self.details.get("ErrorInfo")
        return info.reason if info is not None else ""

    @property
    def fields(self) -> set[str]:
        """The fields that BadRequest names."""
        bad_request: Any = self.details.get("BadRequest")
        return {each.field for each in bad_request.field_violations} if bad_request else set()

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason or '(no reason)'}: {self.text}"


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    """Reads code, sentence and details."""
    details: dict[str, Message] = {}
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_TRAILER and isinstance(value, bytes):
            for packed in status_pb2.Status.FromString(value).details:
                name = packed.TypeName().removeprefix("google.rpc.")
                details[name] = getattr(error_details_pb2, name).FromString(packed.value)
    return Failure(error.code(), error.details() or "", details)


def is_expected(case: Case, failure: Failure) -> bool:
    """Whether the failure is one that this case may meet, and is explained as it must be."""
    match failure.code:
        case CODE.INVALID_ARGUMENT:
            return (
                case.behaviour is Behaviour.BAD
                and failure.reason == "INVALID_FIELD"
                and case.bad_field in failure.fields
            )
        case CODE.RESOURCE_EXHAUSTED:
            return failure.reason == "QUEUE_FULL" and {"RetryInfo", "QuotaFailure"} <= set(
                failure.details
            )
        case CODE.DEADLINE_EXCEEDED:
            # The client's own clock may be the first to notice: then there are no details.
            reasons = {"DEADLINE_TOO_SHORT", "DEADLINE_PASSED"}
            if case.timeout_s is not None:
                reasons.add("")
            return case.behaviour is Behaviour.DEADLINE and failure.reason in reasons
    return False


def is_refused_by_drain(failure: Failure) -> bool:
    """Whether a call was refused because the server ends; at last nobody is left to say why."""
    return failure.code is CODE.UNAVAILABLE and failure.reason in ("DRAINING", "")

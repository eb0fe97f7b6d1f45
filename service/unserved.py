"""What the contract has and this version does not serve: refused, never ignored."""

import grpc

from service.errors import ServiceError


def not_served(field: str) -> ServiceError:
    """A request sets a field that is not served."""
    return ServiceError(
        grpc.StatusCode.UNIMPLEMENTED,
        "OPTION_NOT_SERVED",
        f"{field} is set, must be unset: this version does not serve it",
        metadata={"field": field},
    )

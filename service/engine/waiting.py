"""The waiting queue: first come, first served, bounded in requests and in prompt tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.engine.types import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not taken."""

    field: str
    """'requests' or 'tokens' of the waiting queue, or what of the request is too large: a field of
    `Request`, or 'choices'."""
    value: int
    """What it would be: requests, tokens, ids or choices."""
    limit: int
    """The most that it may be."""
    queue_full: bool
    """True: there may be room later. False: it can never be served."""


class WaitingQueue:
    """Requests without a slot, in the order of arrival."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        """Starts empty.

        Args:
          max_requests: requests that may wait, at least 1.
          max_tokens: prompt tokens that may wait, at least 1. An empty queue takes any prompts, or
            one longer than this could never be served.

        Raises:
          ValueError: a bound is below 1.
        """
        if max_requests < 1:
            raise ValueError(f"max_waiting_requests is {max_requests}, must be at least 1")
        if max_tokens < 1:
            raise ValueError(f"max_waiting_tokens is {max_tokens}, must be at least 1")
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests: dict[int, Request] = {}  # by ticket; a dict keeps the order of arrival
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._requests

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    def refusal(self, requests: Sequence[Request]) -> Refusal | None:
        """Why requests that belong together cannot be appended now; None if they can."""
        if len(requests) > self._max_requests:
            return Refusal("choices", len(requests), self._max_requests, queue_full=False)
        waiting = len(self._requests) + len(requests)
        if waiting > self._max_requests:
            return Refusal("requests", waiting, self._max_requests, queue_full=True)
        tokens = self._tokens + sum(len(request.prompt_ids) for request in requests)
        if self._requests and tokens > self._max_tokens:
            return Refusal("tokens", tokens, self._max_tokens, queue_full=True)
        return None

    def append(self, ticket: int, request: Request) -> None:
        """Puts a request at the end; the caller has asked for a `refusal`."""
        self._requests[ticket] = request
        self._tokens += len(request.prompt_ids)

    def head(self) -> tuple[int, Request] | None:
        """The request that is next, with its ticket; None when nobody waits."""
        return next(iter(self._requests.items()), None)

    def remove(self, ticket: int) -> bool:
        """Takes a request out; False if it does not wait."""
        request = self._requests.pop(ticket, None)
        if request is None:
            return False
        self._tokens -= len(request.prompt_ids)
        return True

    def clear(self) -> None:
        """Forgets every request."""
        self._requests.clear()
        self._tokens = 0

    def check_integrity(self) -> None:
        """Proves that the count of tokens is right.

        Raises:
          RuntimeError: it is not; the text names both sides.
        """
        tokens = sum(len(request.prompt_ids) for request in self._requests.values())
        if tokens != self._tokens:
            raise RuntimeError(f"{tokens} prompt tokens wait != {self._tokens} counted")

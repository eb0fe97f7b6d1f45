"""Who may join the waiting queue, and how long they will wait there.

Joins what the scheduler knows of the order to what the estimates know of time. No clock: the caller
tells the time, and serialises the calls as for the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.engine.errors import DeadlineError, QueueFullError, RequestTooLargeError
from service.engine.estimates import Estimates
from service.engine.scheduler import Scheduler
from service.engine.types import Priority, QueueStatus, Request
from service.engine.waiting import Refusal

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0


class Intake:
    """Looks at the scheduler's queue and changes nothing in it."""

    def __init__(self, scheduler: Scheduler, estimates: Estimates, retry_after_s: float) -> None:
        """Joins the two.

        Args:
          scheduler: whose queue it is.
          estimates: of the same engine.
          retry_after_s: seconds that a client is told to wait when the queue is full and nothing is
            known of how fast it moves.
        """
        self._scheduler = scheduler
        self._estimates = estimates
        self._retry_after_s = retry_after_s

    def check(self, choices: Sequence[Request], now: float) -> None:
        """Refuses the choices of one client call unless the scheduler can take them now.

        A deadline is compared with the estimate for the first choice. What is not known is no reason
        to refuse.

        Raises:
          RequestTooLargeError: they can never be served.
          QueueFullError: there is no room in the waiting queue.
          DeadlineError: the first token is not expected in time.
        """
        if (refusal := self._scheduler.refusal(choices)) is not None:
            raise self._as_error(refusal)
        first = choices[0]
        if first.first_token_deadline is None:
            return
        deadline_s = first.first_token_deadline - now
        if deadline_s <= 0:
            raise DeadlineError(deadline_s, waited_s=0.0)
        behind_all_s = self._first_token_s(self._scheduler.load().waiting, first)
        if behind_all_s is not None and behind_all_s <= deadline_s:
            return  # without looking for its place, which takes a while in a long queue
        estimate_s = self._first_token_s(self._scheduler.arrival_position(first.priority), first)
        if estimate_s is not None and estimate_s > deadline_s:
            raise DeadlineError(deadline_s, estimated_wait_s=estimate_s)

    def status(self, ticket: int) -> QueueStatus | None:
        """Where a request stands in the waiting queue; None when it does not wait."""
        position = self._scheduler.position(ticket)
        return None if position is None else QueueStatus(position, self._wait_s(position))

    def arrival_wait_s(self, priority: Priority) -> float | None:
        """Seconds that a request which arrived now would wait; None while nothing is known."""
        return self._wait_s(self._scheduler.arrival_position(priority))

    def _wait_s(self, position: int) -> float | None:
        return self._estimates.wait_s(position, self._scheduler.free_slots)

    def _first_token_s(self, position: int, request: Request) -> float | None:
        free_slots, prompt_tokens = self._scheduler.free_slots, len(request.prompt_ids)
        return self._estimates.first_token_s(position, free_slots, prompt_tokens)

    def _as_error(self, refusal: Refusal) -> QueueFullError | RequestTooLargeError:
        if not refusal.queue_full:
            return RequestTooLargeError(refusal.field, refusal.value, refusal.limit)
        kind = "requests" if refusal.field == "requests" else "tokens"
        # There is room when so many requests have got slots; how many tokens go with one is open.
        leave = refusal.value - refusal.limit if kind == "requests" else 1
        retry_after_s = self._wait_s(leave - 1)
        if retry_after_s is None:
            retry_after_s = self._retry_after_s
        clamped = min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        return QueueFullError(kind, refusal.limit, refusal.value, clamped)

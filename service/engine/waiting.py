"""The waiting queue: priority classes, no starvation, bounded in requests and in prompt tokens.

What is served is a client call: its choices follow each other, and count once in these rules.

- Within a class it is first come, first served.
- A class that waits counts the calls of higher classes that are served meanwhile, and begins anew
  when it is served itself. At `MAX_PASSES` it is due.
- Next is the lowest class that is due; when none is, the highest that waits.
- What was chosen stays next, whoever arrives, until it is served or given up.

So a class lets at most `MAX_PASSES` calls of higher classes pass before each call of its own. A
deadline changes nothing in this order; it only takes a call out.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from service.engine.types import Priority, Request

MAX_PASSES = 4
"""Calls of higher classes that are served, at most, while a class waits for its turn."""


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


@dataclasses.dataclass(slots=True, eq=False)
class _Choices:
    """The choices of one client call that wait."""

    priority: Priority
    deadline: float
    """When the call is given up unless a choice was served; infinite for never."""
    requests: dict[int, Request]
    """By ticket, in order."""
    begun: bool = False
    """A choice was served."""


class _Turns:
    """The rule between the classes."""

    def __init__(self, passes: dict[Priority, int] | None = None) -> None:
        self.passes = passes or dict.fromkeys(Priority, 0)

    def choose(self, waiting: Collection[Priority]) -> Priority:
        """Returns which of these classes is next."""
        due = [priority for priority in waiting if self.passes[priority] >= MAX_PASSES]
        return min(due) if due else max(waiting)

    def served(self, priority: Priority, still_waiting: Collection[Priority]) -> None:
        """Counts a call of a class, given the classes that wait on."""
        self.passes[priority] = 0
        for lower in still_waiting:
            if lower < priority:
                self.passes[lower] += 1


class WaitingQueue:
    """Requests without a slot."""

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
        self.clear()

    def clear(self) -> None:
        """Forgets every request."""
        # Each class in the order of arrival; a class in which nobody waits has no entry.
        self._classes: dict[Priority, deque[_Choices]] = {}
        self._choices: dict[int, _Choices] = {}  # by ticket
        self._chosen: _Choices | None = None
        self._turns = _Turns()
        self._tokens = 0
        self._next_deadline = math.inf  # no later than the earliest of those that wait
        self._positions: dict[int, int] | None = None  # by ticket; None when out of date

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._choices

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return self._tokens

    @property
    def is_held_up(self) -> bool:
        """Whether somebody was chosen and could not be served yet."""
        return self._chosen is not None

    def refusal(self, requests: Sequence[Request]) -> Refusal | None:
        """Why requests that belong together cannot be appended now; None if they can."""
        if len(requests) > self._max_requests:
            return Refusal("choices", len(requests), self._max_requests, queue_full=False)
        waiting = len(self._choices) + len(requests)
        if waiting > self._max_requests:
            return Refusal("requests", waiting, self._max_requests, queue_full=True)
        tokens = self._tokens + sum(len(request.prompt_ids) for request in requests)
        if self._choices and tokens > self._max_tokens:
            return Refusal("tokens", tokens, self._max_tokens, queue_full=True)
        return None

    def append(self, entries: Sequence[tuple[int, Request]]) -> None:
        """Puts the choices of one client call, by ticket, at the end of their class.

        They have priority and deadline in common, and the caller has asked for a `refusal`.
        """
        first = entries[0][1]
        deadline = math.inf if first.first_token_deadline is None else first.first_token_deadline
        choices = _Choices(first.priority, deadline, dict(entries))
        self._classes.setdefault(choices.priority, deque()).append(choices)
        self._choices.update(dict.fromkeys(choices.requests, choices))
        self._tokens += sum(len(request.prompt_ids) for _, request in entries)
        self._next_deadline = min(self._next_deadline, deadline)
        self._positions = None

    def choose(self) -> tuple[int, Request] | None:
        """Returns the request that is next, with its ticket; None when nobody waits.

        From now on it stays next, whoever arrives.
        """
        if self._chosen is None and self._classes:
            self._chosen = self._classes[self._turns.choose(self._classes)][0]
        return next(iter(self._chosen.requests.items())) if self._chosen else None

    def take(self) -> None:
        """Takes out the chosen request, which is being served."""
        chosen = self._chosen
        assert chosen is not None, "nobody was chosen"
        begins, chosen.begun = not chosen.begun, True
        self.remove(next(iter(chosen.requests)))
        if begins:
            self._turns.served(chosen.priority, self._classes)

    def remove(self, ticket: int) -> bool:
        """Takes a request out; False if it does not wait."""
        choices = self._choices.pop(ticket, None)
        if choices is None:
            return False
        self._tokens -= len(choices.requests.pop(ticket).prompt_ids)
        self._positions = None
        if not choices.requests:
            self._remove_call(choices)
        return True

    def drop_expired(self, now: float) -> list[int]:
        """Takes out the calls of which no choice was served by their deadline.

        Returns:
          Their tickets.
        """
        if now < self._next_deadline:
            return []
        unserved = [c for calls in self._classes.values() for c in calls if not c.begun]
        tickets = [t for choices in unserved if choices.deadline <= now for t in choices.requests]
        for ticket in tickets:
            self.remove(ticket)
        later = (choices.deadline for choices in unserved if choices.deadline > now)
        self._next_deadline = min(later, default=math.inf)
        return tickets

    def position(self, ticket: int) -> int | None:
        """How many requests would be served before this one if none arrived; None if it is not here."""
        if self._positions is None:
            order = (ticket for choices in self._order() for ticket in choices.requests)
            self._positions = {ticket: position for position, ticket in enumerate(order)}
        return self._positions.get(ticket)

    def arrival_position(self, priority: Priority) -> int:
        """What the position of a request that arrived now would be."""
        arriving = _Choices(priority, math.inf, {})
        position = 0
        for choices in self._order(arriving):
            if choices is arriving:
                break
            position += len(choices.requests)
        return position

    def check_integrity(self) -> None:
        """Proves that the count of tokens is right.

        Raises:
          RuntimeError: it is not; the text names both sides.
        """
        waiting = [request for c in self._order() for request in c.requests.values()]
        tokens = sum(len(request.prompt_ids) for request in waiting)
        if (len(waiting), tokens) != (len(self._choices), self._tokens):
            raise RuntimeError(
                f"{len(waiting)} requests and {tokens} prompt tokens wait != "
                f"{len(self._choices)} and {self._tokens} counted"
            )

    def _order(self, arriving: _Choices | None = None) -> Iterator[_Choices]:
        """Yields the calls as they would be served if none arrived but, now, this one."""
        classes = {priority: deque(calls) for priority, calls in self._classes.items()}
        if arriving is not None:
            classes.setdefault(arriving.priority, deque()).append(arriving)
        turns, chosen = _Turns(dict(self._turns.passes)), self._chosen
        while classes:
            priority = chosen.priority if chosen else turns.choose(classes)
            chosen = None
            served = classes[priority].popleft()
            if not classes[priority]:
                del classes[priority]
            if not served.begun:
                turns.served(priority, classes)
            yield served

    def _remove_call(self, choices: _Choices) -> None:
        calls = self._classes[choices.priority]
        calls.remove(choices)
        if not calls:
            del self._classes[choices.priority]
            self._turns.passes[choices.priority] = 0
        if self._chosen is choices:
            self._chosen = None

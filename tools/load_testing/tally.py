"""Adds up how calls ended and how long tokens took."""

from __future__ import annotations

import collections
import dataclasses
import enum
from array import array

from load_testing.failures import Failure
from load_testing.workload import Behaviour, Case

MAX_PROBLEMS = 50
"""Problems that are kept in words; all are counted."""


class End(enum.Enum):
    """How a call ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    DEADLINE = "deadline passed"
    REFUSED = "refused"
    UNEXPECTED = "unexpected"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One call, after its end."""

    case: Case
    end: End
    failure: Failure | None = None
    """The status, of a call that did not end with OK."""
    problem: str = ""
    """Of UNEXPECTED."""
    tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    digest: bytes = b""
    """Of the token ids, of a reply that came whole."""


class Tally:
    """What a load test has seen."""

    def __init__(self) -> None:
        """Starts empty."""
        self.ends: collections.Counter[tuple[Behaviour, End]] = collections.Counter()
        self.statuses: collections.Counter[tuple[str, str]] = collections.Counter()
        """Of calls that did not end with OK, by code and reason."""
        self.finish_reasons: collections.Counter[str] = collections.Counter()
        self.tokens = 0
        self.problems: list[str] = []
        self.first_tokens_s = array("d")
        """Seconds from the arrival of a call to its first token."""
        self.token_times_at = array("d")
        """When tokens behind the first came, in seconds of `time.monotonic`."""
        self.token_times_s = array("d")
        """Seconds per token since the delivery before, of each of them."""
        self.token_counts = array("l")
        """How many tokens came then."""
        self.compared = 0
        """Replies that had been asked for before."""
        self.differing = 0
        """Those of them that had other tokens than the first time."""
        self._digests: dict[bytes, bytes] = {}

    @property
    def calls(self) -> int:
        """Calls that have ended."""
        return self.ends.total()

    def total(self, end: End) -> int:
        """Calls that ended so."""
        return sum(count for (_, ended), count in self.ends.items() if ended is end)

    def delivery(self, at: float, seconds: float, tokens: int) -> None:
        """Counts tokens that came `seconds` behind those before them."""
        self.token_times_at.append(at)
        self.token_times_s.append(seconds / tokens)
        self.token_counts.append(tokens)

    def add(self, outcome: Outcome) -> None:
        """Counts a call."""
        case = outcome.case
        self.ends[case.behaviour, outcome.end] += 1
        self.tokens += outcome.tokens
        self.finish_reasons.update(outcome.finish_reasons)
        if outcome.failure is not None:
            self.statuses[outcome.failure.code.name, outcome.failure.reason] += 1
        if outcome.end is End.UNEXPECTED and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(
                f"call {case.number}, which {case.behaviour.value}: {outcome.problem}"
            )
        if outcome.digest:
            before = len(self._digests)
            first = self._digests.setdefault(case.key(), outcome.digest)
            self.compared += len(self._digests) == before
            self.differing += first != outcome.digest

"""What a reply to a chat consists of, in the order in which it is generated."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; calls never overlap."""

    index: int
    """Counts the calls of one reply from 0."""
    call_id: str
    name: str
    """As the model wrote it: it need not be the name of a tool."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: all fragments joined are one JSON object."""

    index: int
    fragment: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over."""

    index: int
    complete: bool = True
    """False if the reply was cut inside the call: the arguments are JSON, but not all are there."""


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd

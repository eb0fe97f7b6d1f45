"""What is asked for: a seeded mixture of requests, and how the client of each behaves."""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections.abc import Sequence

from google.protobuf import duration_pb2

from load_testing.bad_requests import BAD_REQUESTS
from service.pb import inference_pb2, model_pb2

RESUME_WINDOW_S = 10.0
EARLIEST_CANCEL_S, LATEST_CANCEL_S = 0.0005, 8.0
STOP_STRINGS = ("return", "\n\n", "self.", "raise ")
SAMPLINGS = (
    inference_pb2.Sampling(temperature=0, seed=0),
    inference_pb2.Sampling(temperature=0.8, seed=1),
    inference_pb2.Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=2),
    inference_pb2.Sampling(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, seed=3),
)
PRIORITIES = (
    inference_pb2.PRIORITY_UNSPECIFIED,
    inference_pb2.PRIORITY_LOW,
    inference_pb2.PRIORITY_NORMAL,
    inference_pb2.PRIORITY_HIGH,
)


class Behaviour(enum.Enum):
    """What a client does with its call."""

    READ = "reads to the end"
    CANCEL = "cancels at a random moment"
    SLOW = "reads slowly"
    RESUME = "breaks and resumes"
    DEADLINE = "has a short deadline"
    BAD = "sends a bad request"


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of the behaviours; the rest reads to the end."""

    cancel: float = 0.20
    slow: float = 0.05
    resume: float = 0.05
    deadline: float = 0.05
    bad: float = 0.05

    def __post_init__(self) -> None:
        shares = dataclasses.astuple(self)
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError(
                f"shares of behaviours are {shares}, must be >= 0 and at most 1 in all"
            )

    def choose(self, rng: random.Random) -> Behaviour:
        """Returns a behaviour by its share."""
        left = rng.random()
        for field in dataclasses.fields(self):
            left -= getattr(self, field.name)
            if left < 0:
                return Behaviour[field.name.upper()]
        return Behaviour.READ


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text and its tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to make, with all that its client will do."""

    number: int
    behaviour: Behaviour
    request: inference_pb2.GenerateRequest
    cancel_after_s: float = 0.0
    """When CANCEL cancels, from the arrival on."""
    cancel_by_id: bool = False
    """CANCEL calls Cancel, in place of cancelling the call."""
    pauses_s: float = 0.0
    """How long SLOW waits before each read."""
    breaks: tuple[int, ...] = ()
    """After how many messages RESUME breaks each time."""
    break_s: float = 0.0
    """How long RESUME stays away."""
    timeout_s: float | None = None
    """Deadline of the call, for some of DEADLINE."""
    bad_field: str = ""
    """What the refusal of BAD must name."""

    @property
    def choices(self) -> int:
        """Replies that are due."""
        return self.request.choices if self.request.HasField("choices") else 1

    def key(self) -> bytes:
        """What the reply is a function of, for a given checkpoint."""
        request = self.request
        bare = inference_pb2.GenerateRequest(
            sampling=request.sampling, stopping=request.stopping, choices=self.choices
        )
        if request.HasField("tokens"):
            bare.tokens.CopyFrom(request.tokens)
        else:
            bare.text = request.text
        return bare.SerializeToString(deterministic=True)


class Workload:
    """Makes the cases; the case of a number depends on the seed and the number alone."""

    def __init__(
        self,
        seed: int,
        mix: Mix,
        model: model_pb2.Model,
        prompts: Sequence[Prompt],
        max_reply_tokens: int,
    ) -> None:
        """Draws from `prompts`; no reply is longer than `max_reply_tokens`."""
        self._seed = seed
        self._mix = mix
        self._model = model
        self._prompts = prompts
        self._budgets = sorted({max(1, max_reply_tokens // part) for part in (16, 4, 2, 1)})

    def case(self, number: int) -> Case:
        """Returns one case."""
        rng = random.Random(f"{self._seed}/{number}")
        behaviour = self._mix.choose(rng)
        case = Case(number, behaviour, self._request(rng, f"load-{self._seed}-{number}"))
        match behaviour:
            case Behaviour.CANCEL:
                span = math.log(LATEST_CANCEL_S / EARLIEST_CANCEL_S)
                return dataclasses.replace(
                    case,
                    cancel_after_s=EARLIEST_CANCEL_S * math.exp(rng.random() * span),
                    cancel_by_id=rng.random() < 0.25,
                )
            case Behaviour.SLOW:
                return dataclasses.replace(case, pauses_s=rng.uniform(0.05, 0.5))
            case Behaviour.RESUME:
                return self._resuming(case, rng)
            case Behaviour.DEADLINE:
                return self._hurried(case, rng)
            case Behaviour.BAD:
                field, spoil = rng.choice(BAD_REQUESTS)
                spoil(case.request, self._model)
                return dataclasses.replace(case, bad_field=field)
            case Behaviour.READ:
                return case

    def _request(self, rng: random.Random, request_id: str) -> inference_pb2.GenerateRequest:
        """A good request. Few different ones in all, so that many are made again."""
        index = rng.randrange(len(self._prompts))
        prompt = self._prompts[index]
        request = inference_pb2.GenerateRequest(
            sampling=rng.choice(SAMPLINGS),
            stopping=inference_pb2.Stopping(max_tokens=rng.choice(self._budgets)),
            include=inference_pb2.Include(token_ids=True, logprobs=rng.random() < 0.1),
            request_id=request_id,
            priority=rng.choice(PRIORITIES),
        )
        if index % 2:
            request.text = prompt.text
        else:
            request.tokens.ids.extend(prompt.token_ids)
        if rng.random() < 0.15:
            request.stopping.stop_strings.extend(STOP_STRINGS)
        if rng.random() < 0.1:
            request.choices = 2
        request.include.queue = rng.random() < 0.1
        return request

    def _resuming(self, case: Case, rng: random.Random) -> Case:
        window = min(RESUME_WINDOW_S, self._model.limits.max_resume_window.ToTimedelta().seconds)
        if window <= 0:  # the server keeps nothing
            return dataclasses.replace(case, behaviour=Behaviour.READ)
        case.request.resume_window.CopyFrom(duration_pb2.Duration(seconds=int(window)))
        breaks = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        return dataclasses.replace(case, breaks=breaks, break_s=rng.uniform(0, 0.5))

    def _hurried(self, case: Case, rng: random.Random) -> Case:
        if rng.random() < 0.5:
            return dataclasses.replace(case, timeout_s=rng.uniform(0.02, 3))
        case.request.first_token_deadline.FromMilliseconds(rng.randint(5, 1000))
        return case

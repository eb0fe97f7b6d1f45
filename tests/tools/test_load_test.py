"""The load test itself: it passes a good server, and finds what is wrong with a bad one."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

import tiny_tokenizer
from fakes import FakeExecutor
from live_server import LIMITS, live_server, server_command
from service.pb import inference_pb2, model_pb2

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import load_test
from load_testing import failures, monitor, report, tally
from load_testing.arrivals import open_loop
from load_testing.stream_check import StreamCheck
from load_testing.workload import Behaviour, Case, Mix, Prompt, Workload

LOAD = (
    "import collections, dataclasses;"
    "limits = dataclasses.replace(LIMITS, slots=16, pages=1 + 16 * 64);"
    "executor = FakeExecutor(limits, decode_delay_s=0.002, seeded=True);"
    "executor.log = executor.inserted = executor.draft_lengths = collections.deque(maxlen=0);"
    "{extra} return executor"
)
FORMAT = "%(asctime)s %(levelname)s %(message)s"
LOGGING = f"import logging; logging.basicConfig(level=20, format={FORMAT!r})\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_tokenizer.write_checkpoint(tmp_path_factory.mktemp("tiny"))


def command(checkpoint: Path, extra: str = "") -> list[str]:
    """A server with an executor that keeps no diary, and a log."""
    python, flag, script, *arguments = server_command(checkpoint, LOAD.format(extra=extra))
    return [python, flag, LOGGING + script, *arguments]


def options(out: Path, *arguments: str):
    few = ("--seconds", "3", "--warm-up", "1", "--reply-tokens", "32", "--out", str(out))
    return load_test.parse_arguments([*few, "--max-growth-percent", "50", *arguments])


def summary_in(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def test_a_good_server_passes(checkpoint, tmp_path):
    more = ("--resume", "0.15", "--bad", "0.15", "--deadline", "0.1", "--reply-tokens", "16")
    code = load_test.run(options(tmp_path, *more), command(checkpoint))
    summary = summary_in(tmp_path)
    assert (code, summary["problems"]) == (0, [])
    for name in ("completed", "cancelled", "refused"):
        assert summary["ends"][name] > 0
    assert set(summary["behaviours"]) == {behaviour.value for behaviour in Behaviour}
    assert summary["behaviours"][Behaviour.RESUME.value]["completed"] > 0
    assert summary["statuses"]["INVALID_ARGUMENT INVALID_FIELD"] > 0
    again = summary["replies_asked_for_again"]
    assert again["compared"] > 0
    assert again["differing"] == 0
    assert summary["first_token_s"]["p50"] > 0
    assert summary["inter_token_s"]["p99"] >= summary["inter_token_s"]["p50"] > 0
    assert summary["memory"] == {} or summary["memory"]["begin_mb"] > 0
    drain = summary["drain"]
    assert drain["finished"] == drain["accepted"] == 16
    assert drain["refused"] > 0
    assert summary["integrity"] == "integrity: all 16 slots and 1024 pages are free"
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Load test: passed")
    assert "16 of 16 accepted streams came whole" in text


def test_arrivals_at_random_moments_overload_and_refusals_are_explained(checkpoint, tmp_path):
    arguments = ("--rate", "120", "--seconds", "2", "--cancel", "0", "--slow", "0")
    arguments += ("--", "--max-waiting-requests", "8")
    code = load_test.run(options(tmp_path, *arguments), command(checkpoint))
    summary = summary_in(tmp_path)
    assert (code, summary["problems"]) == (0, [])
    assert summary["statuses"]["RESOURCE_EXHAUSTED QUEUE_FULL"] > 0
    assert summary["calls"] > 100


def test_a_server_that_fails_does_not_pass(checkpoint, tmp_path):
    """The engine fails once, and is made anew: some calls got INTERNAL."""
    extra = (
        "import itertools; calls, decode = itertools.count(), executor.decode;"
        "executor.decode = lambda *a, **k: 1 / 0 if next(calls) == 20 else decode(*a, **k);"
    )
    arguments = ("--seconds", "1", "--bad", "0", "--slow", "0")
    code = load_test.run(options(tmp_path, *arguments), command(checkpoint, extra))
    summary = summary_in(tmp_path)
    assert code == 1
    assert "INTERNAL INTERNAL" in summary["statuses"]
    assert summary["ends"]["unexpected"] > 0
    assert any("tandem_requests_failed_total" in problem for problem in summary["problems"])
    assert any(problem.startswith("log: ") for problem in summary["problems"])
    assert (tmp_path / "report.md").read_text().startswith("# Load test: ")


def test_a_leaked_page_makes_the_exit_code_1(checkpoint, tmp_path):
    """The server's own check, when it has been drained."""
    leak = (
        "from service.engine.pages import PageAllocator;"
        "free = PageAllocator.free;"
        "PageAllocator.free = lambda self, pages: free(self, pages[1:]);"
    )
    arguments = ("--seconds", "1", "--slow", "0")
    code = load_test.run(options(tmp_path, *arguments), command(checkpoint, leak))
    problems = summary_in(tmp_path)["problems"]
    assert code == 1
    assert any(problem.startswith("leaked: pages_used") for problem in problems)
    assert "the server's exit code is 1" in problems
    assert any(problem.startswith("integrity: ") for problem in problems)


async def test_a_running_server_is_left_running(checkpoint, tmp_path):
    executor = FakeExecutor(LIMITS, seeded=True)
    async with live_server(checkpoint, executor=executor, metrics_port=0) as live:
        arguments = ("--target", live.target, "--seconds", "1", "--slow", "0", "--streams", "4")
        metrics = ("--metrics-url", f"http://127.0.0.1:{live.server.metrics_port}/metrics")
        asked = options(tmp_path, *arguments, *metrics)
        assert await asyncio.to_thread(load_test.run, asked) == 0
        assert await live.inference.Complete(inference_pb2.GenerateRequest(text="fox"))
    assert summary_in(tmp_path)["drain"] == {}


async def test_settle_names_what_is_held(checkpoint, monkeypatch):
    monkeypatch.setattr(monitor, "SETTLE_S", 0.2)
    async with live_server(checkpoint) as live:
        seconds, held = await monitor.settle(live.channel)
        assert (seconds < 2, held) == (True, "")
        load = live.engine.load()
        held_load = dataclasses.replace(load, running=1, pages_used=3)
        monkeypatch.setattr(live.engine, "load", lambda: held_load)
        _, held = await monitor.settle(live.channel)
        assert held.startswith("running 1, pages_used 3, ")


# The parts


def workload(seed: int = 0, **shares: float) -> Workload:
    model = model_pb2.Model(vocab_size=400, context_length=64)
    model.limits.max_resume_window.seconds = 60
    prompts = [Prompt("fox", (5, 6)), Prompt("dog", (7,))]
    return Workload(seed, Mix(**shares), model, prompts, 32)


def test_a_case_depends_on_seed_and_number_alone():
    first, again, other = workload(), workload(), workload(seed=1)
    assert [first.case(n) for n in range(50)] == [again.case(n) for n in reversed(range(50))][::-1]
    assert [first.case(n) for n in range(50)] != [other.case(n) for n in range(50)]


def test_the_mixture_is_as_asked():
    cases = [workload(cancel=0.2, bad=0.05).case(n) for n in range(2000)]
    share = {b: sum(case.behaviour is b for case in cases) / 2000 for b in Behaviour}
    assert share[Behaviour.CANCEL] == pytest.approx(0.2, abs=0.03)
    assert share[Behaviour.BAD] == pytest.approx(0.05, abs=0.02)
    with pytest.raises(ValueError, match="shares"):
        Mix(cancel=0.9, bad=0.2)


async def test_random_arrivals_have_the_rate():
    arrivals: list[float] = []

    async def call(number: int, arrived_at: float) -> None:
        arrivals.append(arrived_at)

    await open_loop(500, 1.0, 0, call)
    assert 400 < len(arrivals) < 600
    assert arrivals == sorted(arrivals)


def message(sequence: int, **kind) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(sequence=sequence, **kind)


STARTED = message(0, started={"seed": 1})
DELTA = message(1, delta={"token_ids": [3, 4]})
FINISHED = message(2, finished={"usage": {"completion_tokens": 2}})


def problem_of(*messages: inference_pb2.GenerateResponse) -> str:
    check = StreamCheck(1)
    for each in messages:
        check.take(each)
    check.check_end()
    return check.problem


def test_a_whole_stream_has_no_problem():
    assert problem_of(STARTED, DELTA, FINISHED) == ""


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([STARTED, FINISHED], "message 2 came where 1 was due"),
        ([STARTED, DELTA, DELTA, FINISHED], "message 1 came where 2 was due"),
        ([STARTED, DELTA], "without Finished of choices [0]"),
        ([], "without Started"),
        (
            [STARTED, message(1, finished={"usage": {"completion_tokens": 2}})],
            "choice 0 has 2 tokens, 0 were delivered",
        ),
        ([STARTED, message(1, started={})], "Started came twice"),
    ],
)
def test_a_broken_stream_has_one(messages, problem):
    assert problem in problem_of(*messages)


def failure(code: grpc.StatusCode, reason: str = "", *details) -> failures.Failure:
    told = [*details, *([error_details_pb2.ErrorInfo(reason=reason)] if reason else [])]
    return failures.Failure(code, "", {type(each).__name__: each for each in told})


def case(behaviour: Behaviour, **fields) -> Case:
    return Case(0, behaviour, inference_pb2.GenerateRequest(), **fields)


def bad_request(field: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field)
    return error_details_pb2.BadRequest(field_violations=[violation])


CODE = grpc.StatusCode
RETRY, QUOTA = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
BAD = case(Behaviour.BAD, bad_field="choices")
READ, HURRIED = case(Behaviour.READ), case(Behaviour.DEADLINE, timeout_s=1.0)


@pytest.mark.parametrize(
    ("asked", "got", "expected"),
    [
        (BAD, failure(CODE.INVALID_ARGUMENT, "INVALID_FIELD", bad_request("choices")), True),
        (BAD, failure(CODE.INVALID_ARGUMENT, "INVALID_FIELD", bad_request("text")), False),
        (BAD, failure(CODE.INVALID_ARGUMENT), False),
        (READ, failure(CODE.INVALID_ARGUMENT, "INVALID_FIELD", bad_request("text")), False),
        (READ, failure(CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", RETRY, QUOTA), True),
        (READ, failure(CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", RETRY), False),
        (READ, failure(CODE.DEADLINE_EXCEEDED), False),
        (HURRIED, failure(CODE.DEADLINE_EXCEEDED), True),
        (HURRIED, failure(CODE.DEADLINE_EXCEEDED, "DEADLINE_PASSED"), True),
        (case(Behaviour.DEADLINE), failure(CODE.DEADLINE_EXCEEDED), False),
        (READ, failure(CODE.INTERNAL, "INTERNAL"), False),
        (READ, failure(CODE.UNKNOWN), False),
        (READ, failure(CODE.UNAVAILABLE, "DRAINING", RETRY), False),
    ],
)
def test_what_is_expected_of_a_failure(asked, got, expected):
    assert failures.is_expected(asked, got) is expected


def test_growth_of_memory_is_judged_after_warm_up():
    bound = report.MemoryBound(megabytes=50, percent=2)

    def judged(*megabytes: float):
        sizes = [1e6 * size for size in megabytes]
        series = monitor.Series(memory_at=list(range(len(sizes))), memory_bytes=sizes)
        return report.memory_growth(series, 4, 100, bound)

    warm_up = [100, 400, 700, 900]
    figures, problems = judged(*warm_up, *[1000, 1005] * 8)
    assert problems == []
    assert figures["growth_mb"] == pytest.approx(0)
    _, problems = judged(*warm_up, *range(1000, 1160, 10))
    assert problems[0].startswith("memory grew by 120.0 MB")
    _, problems = judged(*warm_up, *([1000] * 8), *([1030] * 8))
    assert "(3.0%)" in problems[0]
    assert judged(*warm_up, 1000, 1100) == ({}, [])


def test_a_value_counts_as_often_as_it_weighs():
    assert report.percentiles([1.0, 9.0], [99, 1])["p50"] == 1.0
    assert report.percentiles([1.0, 9.0], [1, 99])["p50"] == 9.0
    assert report.percentiles([]) == {}


def test_a_reply_that_is_not_the_same_again_is_counted():
    counted = tally.Tally()
    for digest in (b"a", b"a", b"b"):
        counted.add(tally.Outcome(case(Behaviour.READ), tally.End.COMPLETED, digest=digest))
    assert (counted.compared, counted.differing) == (2, 1)

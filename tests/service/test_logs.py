"""The log: one line of JSON for each record, which says of whose call it speaks."""

import datetime
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from live_server import failure_of, live_server, message
from service.interceptors import current_caller, current_request_id
from service.telemetry.logs import JsonFormatter, current_trace_id

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lines():
    """Returns a function that returns the lines which the service has logged in the test."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("service")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_line(lines):
    before = datetime.datetime.now(datetime.UTC)
    logging.getLogger("service.test").warning("%d pages\nof %s\u2028", 3, "日本")
    (line,) = lines()
    time = datetime.datetime.fromisoformat(line.pop("time"))
    assert line == {
        "level": "WARNING",
        "logger": "service.test",
        "message": "3 pages\nof 日本\u2028",
    }
    assert time.utcoffset() == datetime.timedelta()
    assert abs(time - before) < datetime.timedelta(seconds=10)


def test_what_is_known_of_the_call(lines):
    variables = {
        current_request_id: "r-1", current_caller: "alice", current_trace_id: "0" * 31 + "1"
    }  # fmt: skip
    tokens = [(variable, variable.set(value)) for variable, value in variables.items()]
    logging.getLogger("service.test").info("inside")
    for variable, token in tokens:
        variable.reset(token)
    logging.getLogger("service.test").info("outside")
    inside, outside = lines()
    assert (inside["request_id"], inside["caller"]) == ("r-1", "alice")
    assert inside["trace_id"] == "00000000000000000000000000000001"
    assert set(outside) == {"time", "level", "logger", "message"}


def test_an_exception_stays_on_its_line(lines):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("service.test").exception("lost")
    (line,) = lines()
    assert line["message"] == "lost"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: two\nlines")


async def test_calls_leave_lines_with_their_request_ids(checkpoint, lines):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-00"),)
    endpoint = "http://127.0.0.1:1"  # nothing is sampled, so nothing is sent
    async with live_server(checkpoint, otlp_endpoint=endpoint) as live:
        served = message(requestId="served")
        await live.inference.Complete(served, metadata=metadata)
        wrong = message(requestId="wrong", sampling={"temperature": -1})
        await failure_of(live.inference.Complete(wrong, metadata=metadata))
    method = "/tandem.v1.InferenceService/Complete"
    said = [line for line in lines() if method in line["message"]]
    assert [line["request_id"] for line in said] == ["served", "wrong"]
    assert {line["trace_id"] for line in said} == {trace_id}
    assert said[0]["message"].endswith(" OK")
    assert " INVALID_ARGUMENT sampling.temperature is " in said[1]["message"]


SCRIPT = """
import logging, warnings
from service.config import ServerConfig
from service.telemetry.logs import configure_logging
configure_logging(ServerConfig(log_level="INFO", log_format={form!r}))
logging.getLogger("service").debug("hidden")
logging.getLogger("service").info("shown")
logging.getLogger("jax").info("hidden")
warnings.warn("careful")
"""


def log_of(form: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT.format(form=form)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert not done.stdout
    return done.stderr.splitlines()


def test_json_is_a_setting():
    shown, careful = map(json.loads, log_of("json"))
    assert (shown["level"], shown["logger"], shown["message"]) == ("INFO", "service", "shown")
    assert careful["logger"] == "py.warnings"
    assert "careful" in careful["message"]


def test_text_is_for_people():
    shown, careful, *_ = log_of("text")
    assert shown.endswith(" INFO service: shown")
    assert " WARNING py.warnings: " in careful

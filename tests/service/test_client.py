"""The command line client, as a person runs it."""

import asyncio
import importlib
import signal
import sys
from pathlib import Path

import pytest

from fakes import FakeExecutor
from live_server import LIMITS, live_server, server_command

ROOT = Path(__file__).resolve().parents[2]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tools" / "client.py"),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
    )


async def run(*arguments: str, stdin: str = "") -> tuple[int | None, str, str]:
    process = await start(*arguments)
    out, errors = await process.communicate(stdin.encode())
    return process.returncode, out.decode(), errors.decode()


@pytest.fixture
async def live(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.01)
    async with live_server(checkpoint, executor=executor) as server:
        yield server


async def test_text_goes_to_stdout_and_one_line_of_figures_to_stderr(live, tokenizer, tmp_path):
    last = tokenizer.encode("fox")[-1]
    text = tokenizer.decode(range(last + 1, last + 13))
    (tmp_path / "prompt").write_text("fox")
    for prompt in (["fox"], ["--prompt", "fox"], ["--file", str(tmp_path / "prompt")], []):
        code, out, errors = await run(
            *prompt, "--target", live.target, "--max-tokens", "12", stdin="fox"
        )
        assert (code, out) == (0, text + "\n")
        (line,) = errors.splitlines()
        figures = line.split(" | ")
        assert figures[0] == "12 tokens"
        assert figures[1].endswith(" tokens/s")
        assert figures[2].startswith("first token ")
        assert figures[3].startswith("accepted ")
        assert figures[4].endswith(" tokens/round")
        assert figures[5] == "MAX_TOKENS"


async def test_options_reach_the_request(live):
    code, out, errors = await run(
        "fox",
        *("--target", live.target, "--stop", "b", "--max-draft-tokens", "0"),
        *("--temperature", "0", "--top-k", "0", "--top-p", "1", "--seed", "0"),
    )
    assert code == 0
    assert "b" not in out
    assert "accepted" not in errors
    assert errors.endswith("| STOP\n") or errors.endswith("| END_OF_SEQUENCE\n")


async def test_every_sampling_option_reaches_the_engine(live):
    code, _, errors = await run(
        "fox",
        *("--target", live.target, "--min-tokens", "3", "--max-tokens", "5", "--min-p", "0.1"),
        *("--repetition-penalty", "1.1", "--frequency-penalty", "-0.5", "--seed", "3"),
        *("--presence-penalty", "1.5", "--logit-bias", "3=-100", "--logit-bias", "4=2.5"),
    )
    assert (code, errors[:8]) == (0, "5 tokens")
    (asked,) = live.executor.inserted
    assert asked.min_tokens == 3
    sampling = asked.sampling
    assert sampling.logit_bias == ((3, -100.0), (4, 2.5))
    assert sampling.min_p == pytest.approx(0.1)
    assert sampling.repetition_penalty == pytest.approx(1.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 1.5)
    code, _, errors = await run("fox", "--target", live.target, "--logit-bias", "3")
    assert code == 2
    assert errors.endswith("argument --logit-bias: '3' is not id=value\n")


async def test_choices_are_printed_one_after_the_other(live):
    code, out, errors = await run(
        *("fox", "--target", live.target, "--choices", "3", "--max-tokens", "6", "--receipt")
    )
    assert code == 0
    assert [out.count(f"--- choice {n} ---\n") for n in range(3)] == [1, 1, 1]
    lines = errors.splitlines()
    assert sorted(line[:10] for line in lines[:3]) == [f"choice {n} |" for n in range(3)]
    assert all(" 6 tokens " in line for line in lines[:3])
    assert len({line.split()[1] for line in lines[3:]}) == 3
    assert all(line.endswith(" | computed here: equal") for line in lines[3:])


async def test_a_receipt_that_does_not_fit_is_an_error(live, monkeypatch):
    monkeypatch.setattr("service.reply.receipt_digest", lambda *_: "0" * 64)
    code, _, errors = await run(*("fox", "--target", live.target, "--max-tokens", "2", "--receipt"))
    assert code == 1
    assert f"receipt 0 is {'0' * 64}, computed here: " in errors


async def test_errors_are_readable(live):
    code, out, errors = await run(
        *("fox", "--target", live.target, "--temperature", "3", "--max-tokens", "0")
    )
    assert (code, out) == (1, "")
    assert errors.splitlines() == [
        "INVALID_ARGUMENT:",
        "  sampling.temperature is 3, must be in [0, 2]",
        "  stopping.max_tokens is 0, must be at least 1",
    ]


async def test_a_server_that_is_not_there(tmp_path):
    code, _, errors = await run("fox", "--target", f"unix:{tmp_path}/nobody")
    assert code == 1
    assert errors.startswith("UNAVAILABLE: ")


async def test_ctrl_c_cancels_the_call(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.1)
    async with live_server(checkpoint, executor=executor) as live:
        process = await start("fox", "--target", live.target)
        assert process.stdout is not None
        assert await process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert (process.returncode, errors.decode()) == (130, "\ncancelled\n")
        async with asyncio.timeout(5):
            while live.engine.load().running:
                await asyncio.sleep(0.005)
        assert live.engine.counters.aborted == 1


@pytest.fixture
def local_server(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("local_server")


async def test_a_server_of_its_own_is_ready_and_then_gone(checkpoint, local_server):
    command = server_command(checkpoint, "time.sleep(0.5)")
    with local_server.local_server(["--slots", "2"], command) as target:
        code, _, errors = await run("fox", "--target", target, "--max-tokens", "2")
        assert (code, errors[:8]) == (0, "2 tokens")
    code, _, errors = await run("fox", "--target", target)
    assert (code, errors[:11]) == (1, "UNAVAILABLE")


@pytest.mark.parametrize("broken", [["--slots", "0"], ["--checkpoint", "nowhere"]])
def test_a_server_that_does_not_start(checkpoint, local_server, broken, capfd):
    message = r"did not start \(exit code 2\)"
    with (
        pytest.raises(local_server.ServerEndedError, match=message),
        local_server.local_server(broken, server_command(checkpoint)),
    ):
        pass
    assert f"error: {broken[0]} is '{broken[1]}', must be " in capfd.readouterr().err


def test_a_model_that_cannot_be_loaded(checkpoint, local_server):
    command = server_command(checkpoint, "time.sleep(0.2); raise ValueError('no weights')")
    with (
        pytest.raises(local_server.ServerEndedError, match=r"is gone|before it was ready"),
        local_server.local_server((), command),
    ):
        pass

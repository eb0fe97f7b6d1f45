"""Bearer tokens: their file, the command that makes one, and who gets in over a real server."""

import asyncio
import contextlib
import hashlib
import hmac
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fakes import FakeExecutor
from live_server import LIMITS, failure_of, health_stub, live_server, message, rest_of
from service.errors import ServiceError
from service.interceptors import current_caller
from service.pb import inference_pb2, model_pb2, tokenizer_pb2
from service.reflection import REFLECTION_SERVICES
from service.security.access import Usage
from service.security.tokens import Rate, Token, TokenFile, main, parse_tokens

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = {"ignoreEos": True}


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def line(name: str, secret: str | None = None, limits: str = "") -> str:
    """A line of a token file; the secret is the name unless told otherwise."""
    return f"{name} {digest_of(secret or name)} {limits}\n"


def bearing(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# The file


def test_a_token_file():
    tokens = parse_tokens(
        "# who may call\n\n"
        + line("alice")
        + line("bob", limits="rate=5/s concurrency=3")
        + f"  batch\t{digest_of('x').upper()}  concurrency=1 rate=90/min  \r\n"
        + "   # the end"
    )
    assert tokens == (
        Token("alice", bytes.fromhex(digest_of("alice"))),
        Token("bob", bytes.fromhex(digest_of("bob")), Rate(5, "s"), 3),
        Token("batch", bytes.fromhex(digest_of("x")), Rate(90, "min"), 1),
    )
    assert [token.rate and token.rate.per_second for token in tokens] == [None, 5, 1.5]
    assert parse_tokens("\n".join(token.line() for token in tokens)) == tokens
    assert digest_of("alice") not in repr(tokens)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no token"),
        ("# nobody\n", "holds no token"),
        ("alice\n", "line 1: the second word is 0 characters, must be 64 hex digits"),
        ("\nalice secret", "line 2: the second word is 6 characters, must be 64 hex digits"),
        (f"alice {'g' * 64}", "line 1: the second word is 64 characters, must be 64 hex digits"),
        (line("é"), "line 1: name is '\\xe9', must be 1 to 64 printable ASCII characters"),
        (line("x" * 65), f"line 1: name is '{'x' * 65}', must be 1 to 64 printable ASCII"),
        (line("a") + line("a", "b"), "line 2: the name a occurs twice"),
        (line("a") + line("b", "a"), "line 2: the token occurs twice"),
        (line("a", limits="rate=5"), "line 1: rate is 5, must be N/s or N/min with N in [1, "),
        (line("a", limits="rate=0/s"), "line 1: rate is 0/s, must be N/s or N/min"),
        (line("a", limits="rate=-1/s"), "line 1: rate is -1/s, must be N/s or N/min"),
        (line("a", limits="rate=1e3/s"), "line 1: rate is 1e3/s, must be N/s or N/min"),
        (line("a", limits="rate=5/h"), "line 1: rate is 5/h, must be N/s or N/min"),
        (line("a", limits="rate=9999999999/s"), "line 1: rate is 9999999999/s, must be"),
        (line("a", limits="concurrency=0"), "line 1: concurrency is 0, must be in [1, "),
        (line("a", limits="concurrency=two"), "line 1: concurrency is two, must be in [1, "),
        (line("a", limits="rate=1/s rate=2/s"), "line 1: rate is not a limit, or twice"),
        (line("a", limits="admin"), "line 1: admin is not a limit, or twice; limits are rate"),
    ],
)
def test_a_token_file_with_a_mistake(text, reason, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError) as failure:
        TokenFile(path)
    assert str(failure.value).startswith(f"token_file {path}: {reason}")


def test_a_token_file_that_is_not_there(tmp_path):
    path = tmp_path / "tokens"
    with pytest.raises(ValueError, match=f"^token_file {path}: No such file or directory$"):
        TokenFile(path)


def test_a_changed_file_is_in_force_after_a_second(tmp_path, caplog):
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(line("alice"))
    tokens = TokenFile(path, clock)
    path.write_text(line("alice", limits="rate=1/s") + line("bob"))
    assert tokens.find("bob") is None  # not looked at twice in one second
    clock.now += 1
    assert tokens.find("bob") == Token("bob", bytes.fromhex(digest_of("bob")))
    assert getattr(tokens.find("alice"), "rate", None) == Rate(1, "s")
    for broken in ("alice", None):
        caplog.clear()
        path.write_text(broken) if broken else path.unlink()
        for _ in range(3):
            clock.now += 1
            assert tokens.find("bob") is not None
        (complaint,) = caplog.messages
        assert complaint.startswith(f"not reloaded, the old one stays in force: token_file {path}")
    path.write_text(line("alice"))
    clock.now += 1
    assert tokens.find("bob") is None


def test_every_token_is_compared(tmp_path, monkeypatch):
    """So that the time a refusal takes says nothing of the file."""
    path = tmp_path / "tokens"
    names = ("alice", "bob", "carol")
    path.write_text("".join(map(line, names)))
    tokens = TokenFile(path)
    compared, compare = [], hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for secret in (*names, "mallory", "", "é" * 10_000):
        compared.clear()
        found = tokens.find(secret)
        assert (found.name if found else None) == (secret if secret in names else None)
        assert compared == [(32, 32)] * 3


# The command


def test_the_command_makes_a_token(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "service.security.tokens"]
    process = subprocess.run(
        [*command, "alice", "--rate", "5/s", "--concurrency", "3"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    (tmp_path / "tokens").write_text(process.stdout)
    found = re.fullmatch(r"token of alice, shown once: ([\w-]{43})\n", process.stderr)
    assert found is not None
    assert found[1] not in process.stdout
    token = TokenFile(tmp_path / "tokens").find(found[1])
    assert token is not None
    assert (token.name, token.rate, token.concurrency) == ("alice", Rate(5, "s"), 3)


def test_the_command_makes_a_new_one_every_time(capsys):
    for _ in range(2):
        main(["alice"])
    shown = capsys.readouterr()
    assert len(set(shown.out.splitlines())) == len(set(shown.err.splitlines())) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a b"], "name is 'a b', must be 1 to 64 printable ASCII characters"),
        (["#a"], "name is '#a', must be 1 to 64 printable ASCII characters, not # first"),
        (["a", "--rate", ""], "rate is , must be N/s or N/min"),
        (["a", "--concurrency", "0"], "concurrency is 0, must be in [1, "),
    ],
)
def test_the_command_refuses_what_the_file_would(arguments, reason, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


# Limits


def test_the_bucket_of_a_token():
    clock = Clock()
    usage, token = Usage(clock), Token("a", b"", Rate(3, "min"))
    for _ in range(3):
        usage.enter(token)
    for passed, wait in ((0, 20), (5, 15), (14.5, 0.5), (0.4999, 0.001)):
        clock.now += passed
        with pytest.raises(ServiceError) as failure:
            usage.enter(token)
        assert failure.value.retry_after_s == wait
    clock.now += wait
    usage.enter(token)
    clock.now += 1e6  # a long rest fills the bucket and no more
    for _ in range(3):
        usage.enter(token)
    with pytest.raises(ServiceError):
        usage.enter(token)


def test_a_refused_call_costs_nothing():
    clock = Clock()
    usage, token = Usage(clock), Token("a", b"", Rate(2, "min"), concurrency=1)
    usage.enter(token)
    for _ in range(5):
        with pytest.raises(ServiceError, match="2 calls at the same time; at most 1"):
            usage.enter(token)
    usage.leave()
    usage.enter(token)
    usage.leave()
    with pytest.raises(ServiceError, match="calls come faster than 2/min"):
        usage.enter(token)
    usage.enter(Token("a", b""))  # the file has changed: no limits any more


# Over a real server


@pytest.fixture
async def live(checkpoint, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(
        line("alice") + line("slow", limits="rate=2/min") + line("narrow", limits="concurrency=1")
    )
    executor = FakeExecutor(LIMITS, decode_delay_s=0.01)
    async with live_server(checkpoint, executor=executor, token_file=path, channelz=True) as server:
        yield server


def reflect(live, metadata):
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(live.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    return stub.ServerReflectionInfo(iter([request]), metadata=metadata)


def every_method(live, metadata) -> list[Any]:
    return [
        live.inference.Generate(message(), metadata=metadata),
        live.inference.Complete(message(), metadata=metadata),
        live.inference.Cancel(inference_pb2.CancelRequest(request_id="x"), metadata=metadata),
        live.inference.Resume(inference_pb2.ResumeRequest(request_id="x"), metadata=metadata),
        live.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="fox"), metadata=metadata),
        live.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(), metadata=metadata),
        live.model.GetModel(model_pb2.GetModelRequest(), metadata=metadata),
        live.model.WatchLoad(model_pb2.WatchLoadRequest(), metadata=metadata),
        live.model.UpdateSpeculation(model_pb2.UpdateSpeculationRequest(), metadata=metadata),
        reflect(live, metadata),
        live.channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")(b"", metadata=metadata),
    ]


def test_every_method_is_tried():
    """Those below are all that there are."""
    ours = [
        method
        for file in (inference_pb2, tokenizer_pb2, model_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(ours) + len(REFLECTION_SERVICES) == 11


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", "Bearer"),), "TOKEN_UNKNOWN"),
        ((("authorization", ""),), "TOKEN_UNKNOWN"),
        ((("authorization", "alice"),), "TOKEN_UNKNOWN"),
        ((("authorization", "Basic alice"),), "TOKEN_UNKNOWN"),
        (bearing("Alice"), "TOKEN_UNKNOWN"),
        (bearing(digest_of("alice")), "TOKEN_UNKNOWN"),
        (bearing("alice") * 2, "TOKEN_UNKNOWN"),
        ((*bearing("alice"), *bearing("mallory")), "TOKEN_UNKNOWN"),
        ((("x-authorization", "Bearer alice"),), "TOKEN_MISSING"),
    ],
)
async def test_without_a_token_nothing_but_health_answers(live, metadata, reason):
    for call in every_method(live, metadata):
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.UNAUTHENTICATED
        assert failure.details["ErrorInfo"].reason == reason
        assert failure.details["ErrorInfo"].domain == "tandem"
        assert "alice" not in failure.text
    health = await health_stub(live.channel).Check(
        health_pb2.HealthCheckRequest(), metadata=metadata
    )
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_with_a_token_everything_answers(live, scheme):
    metadata = (("authorization", f"{scheme} alice"),)
    for call in every_method(live, metadata):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await (call.read() if hasattr(call, "read") else call)
        if not call.done():
            call.cancel()
            continue
        assert await call.code() is not grpc.StatusCode.UNAUTHENTICATED
    reply = await live.inference.Complete(message(stopping={"maxTokens": 2}), metadata=metadata)
    assert reply.choices[0].finished.usage.completion_tokens == 2


async def test_methods_that_do_not_exist(live, caplog):
    """They make no entry in the log or in the metrics, which a stranger could fill with them."""
    caplog.set_level("DEBUG", logger="service")
    for method in ("/tandem.v1.InferenceService/Nothing", "/grpc.health.v1.Healthy/Check", "x"):
        failure = await failure_of(live.channel.unary_unary(method)(b""))
        assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert caplog.messages == []


async def test_requests_of_strangers_are_not_parsed(live, caplog):
    caplog.set_level("INFO")
    call = live.channel.unary_unary("/tandem.v1.InferenceService/Complete")
    failure = await failure_of(call(b"\xff" * (8 << 20)))
    assert failure.code is grpc.StatusCode.UNAUTHENTICATED
    failure = await failure_of(call(b"\xff", metadata=bearing("alice")))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    (refused, *_) = caplog.messages
    assert refused.startswith("/tandem.v1.InferenceService/Complete request_id= ")
    assert " UNAUTHENTICATED metadata has no authorization" in refused


async def test_a_rate_is_kept(live):
    def complete(who: str):
        return live.inference.Complete(message(stopping={"maxTokens": 1}), metadata=bearing(who))

    for _ in range(2):
        await complete("slow")
    failure = await failure_of(complete("slow"))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.details["ErrorInfo"].reason == "RATE_LIMITED"
    assert dict(failure.details["ErrorInfo"].metadata) == {"token": "slow", "limit": "2/min"}
    (violation,) = failure.details["QuotaFailure"].violations
    assert violation.subject == "token:slow"
    assert violation.description == "calls come faster than 2/min"
    wait_ms = failure.details["RetryInfo"].retry_delay.ToMilliseconds()
    assert 0 < wait_ms <= 30_000
    assert failure.trailers["grpc-retry-pushback-ms"] == f"{wait_ms}"
    # Other methods, and other tokens, are not limited by it.
    await live.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(), metadata=bearing("slow"))
    for _ in range(3):
        await complete("alice")


async def test_running_calls_are_counted(live):
    def generate(who: str):
        return live.inference.Generate(message(stopping=ENDLESS), metadata=bearing(who))

    running = generate("narrow")
    await running.read()
    for call in (
        generate("narrow"),
        live.inference.Complete(message(), metadata=bearing("narrow")),
        live.inference.Resume(
            inference_pb2.ResumeRequest(request_id="x"), metadata=bearing("narrow")
        ),
    ):
        failure = await failure_of(call)
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert failure.details["ErrorInfo"].reason == "TOO_MANY_CALLS"
        metadata = {"token": "narrow", "actual": "2", "limit": "1"}
        assert dict(failure.details["ErrorInfo"].metadata) == metadata
        (violation,) = failure.details["QuotaFailure"].violations
        assert violation.description == "2 calls at the same time; at most 1"
        assert failure.details["RetryInfo"].retry_delay.ToSeconds() == 1
    cancel = inference_pb2.CancelRequest(request_id="unknown")
    await live.inference.Cancel(cancel, metadata=bearing("narrow"))
    other = generate("alice")
    await other.read()
    other.cancel()
    await rest_of(running)
    assert await generate("narrow").read()


@pytest.mark.parametrize("body", [b"\xff", message("").SerializeToString()])
async def test_calls_that_fail_are_not_counted_for_ever(live, body):
    complete = live.channel.unary_unary("/tandem.v1.InferenceService/Complete")
    for _ in range(3):
        failure = await failure_of(complete(body, metadata=bearing("narrow")))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_call_makes_room(live):
    call = live.inference.Generate(message(stopping=ENDLESS), metadata=bearing("narrow"))
    await call.read()
    call.cancel()

    async def until_admitted() -> None:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        while code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            call = live.inference.Complete(
                message(stopping={"maxTokens": 1}), metadata=bearing("narrow")
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call
            code = await call.code()
        assert code is grpc.StatusCode.OK

    await asyncio.wait_for(until_admitted(), 10)


async def test_a_new_token_is_taken_without_a_restart(live, tmp_path, monkeypatch):
    monkeypatch.setattr("service.security.tokens.LOOK_EVERY_S", 0)
    tokenize = live.tokenizer.Tokenize
    failure = await failure_of(tokenize(tokenizer_pb2.TokenizeRequest(), metadata=bearing("new")))
    assert failure.code is grpc.StatusCode.UNAUTHENTICATED
    (tmp_path / "tokens").write_text(line("new"))
    await tokenize(tokenizer_pb2.TokenizeRequest(), metadata=bearing("new"))
    failure = await failure_of(tokenize(tokenizer_pb2.TokenizeRequest(), metadata=bearing("alice")))
    assert failure.code is grpc.StatusCode.UNAUTHENTICATED


async def test_the_caller_is_known_inside_the_call(live, monkeypatch):
    callers, submit = [], live.engine.submit_choices

    def noted(*arguments: Any, **named: Any):
        callers.append(current_caller.get())
        return submit(*arguments, **named)

    monkeypatch.setattr(live.engine, "submit_choices", noted)
    for who in ("alice", "narrow"):
        await live.inference.Complete(message(stopping={"maxTokens": 1}), metadata=bearing(who))
    assert callers == ["alice", "narrow"]
    assert current_caller.get() == ""

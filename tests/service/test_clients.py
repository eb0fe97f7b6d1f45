"""Clients that know nothing of us but the protos: grpcurl, buf, Python's own, Node, k6."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from fakes import FakeExecutor
from live_server import LIMITS, live_server, message, settled, until
from service.pb import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
INFERENCE = "tandem.v1.InferenceService"
REQUEST = {"text": "fox", "stopping": {"maxTokens": 12}, "include": {"tokenIds": True}}
BAD = {"text": "fox", "stopping": {"maxTokens": 0}, "choices": 0}
ENDLESS = {"text": "fox", "stopping": {"ignoreEos": True}}
NODE_PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.0")


def tool(name: str) -> str:
    """A program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


async def output_of(*command: str, **options) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, **options
    )
    async with asyncio.timeout(60):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


def objects_in(text: str) -> list[dict]:
    """JSON objects that follow each other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def assert_whole(messages: list[dict], *, whole: list[int]) -> None:
    """A stream as JSON: zeros are left out."""
    assert [each.get("sequence", 0) for each in messages] == list(range(len(messages)))
    assert "started" in messages[0]
    assert messages[-1]["finished"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    ids = [token for each in messages for token in each.get("delta", {}).get("tokenIds", ())]
    assert ids == whole


@pytest.fixture
async def live(checkpoint):
    async with live_server(
        checkpoint, executor=FakeExecutor(LIMITS, decode_delay_s=0.002)
    ) as server:
        yield server


@pytest.fixture
async def whole(live) -> list[int]:
    """The token ids of the reply to REQUEST."""
    response = await live.inference.Complete(message(**REQUEST))
    return list(response.choices[0].delta.token_ids)


# grpcurl


async def grpcurl(live, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    return await output_of(tool("grpcurl"), "-plaintext", *options, live.target, *arguments)


async def test_grpcurl_lists_and_describes(live):
    code, out, _ = await grpcurl(live, "list")
    assert code == 0
    assert {INFERENCE, "grpc.health.v1.Health"} <= set(out.split())
    code, out, _ = await grpcurl(live, "describe", f"{INFERENCE}.Generate")
    assert code == 0
    assert "rpc Generate ( .tandem.v1.GenerateRequest )" in out
    assert "// Streams a reply" in out


async def test_grpcurl_streams(live, whole):
    options = ("-d", json.dumps(REQUEST))
    code, out, errors = await grpcurl(live, f"{INFERENCE}/Generate", options=options)
    assert (code, errors) == (0, "")
    assert_whole(objects_in(out), whole=whole)


async def test_grpcurl_shows_the_details_of_a_refusal(live):
    options = ("-d", json.dumps(BAD))
    code, out, errors = await grpcurl(live, f"{INFERENCE}/Generate", options=options)
    assert (code, out) == (64 + grpc.StatusCode.INVALID_ARGUMENT.value[0], "")
    assert "Code: InvalidArgument" in errors
    assert "stopping.max_tokens is 0, must be at least 1" in errors
    for detail in ("google.rpc.ErrorInfo", "google.rpc.BadRequest", '"field":"choices"'):
        assert detail in errors


async def test_grpcurl_that_gives_up_frees_its_slot(live):
    options = ("-max-time", "0.2", "-d", json.dumps(ENDLESS | {"requestId": "mine"}))
    await grpcurl(live, f"{INFERENCE}/Generate", options=options)
    await settled(live)


# buf


async def buf_curl(live, protocol: str, request: dict) -> tuple[int, str, str]:
    return await output_of(
        tool("buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge",
        "--reflect-protocol", protocol, "-d", json.dumps(request),
        f"http://{live.target}/{INFERENCE}/Generate",
        cwd="/", env={"HOME": "/nonexistent", "BUF_CACHE_DIR": os.environ.get("TMPDIR", "/tmp")},
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_streams(live, whole, protocol):
    code, out, errors = await buf_curl(live, protocol, REQUEST)
    assert (code, errors) == (0, "")
    assert_whole(objects_in(out), whole=whole)


async def test_buf_curl_shows_the_details_of_a_refusal(live):
    code, _, errors = await buf_curl(live, "grpc-v1", BAD)
    assert code != 0
    (told,) = objects_in(errors)
    assert told["code"] == "invalid_argument"
    assert "stopping.max_tokens is 0, must be at least 1" in told["message"]
    types = [detail["type"] for detail in told["details"]]
    assert types == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]


# Python, without asyncio


async def test_a_synchronous_stub_streams_cancels_and_reads_its_refusal(live, whole):
    def use() -> None:
        with grpc.insecure_channel(live.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            messages = list(stub.Generate(message(**REQUEST)))
            assert [each.sequence for each in messages] == list(range(len(messages)))
            assert [token for each in messages for token in each.delta.token_ids] == whole
            endless = stub.Generate(message(**ENDLESS))
            next(endless)
            endless.cancel()
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Complete(message(**BAD))
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
            model = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
            assert model.model.slots == LIMITS.slots

    await asyncio.to_thread(use)
    await settled(live)


async def test_many_threads_share_a_channel(live, whole):
    def use() -> list[inference_pb2.CompleteResponse]:
        with grpc.insecure_channel(live.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            futures = [stub.Complete.future(message(**REQUEST)) for _ in range(12)]
            return [future.result(timeout=30) for future in futures]

    responses = await asyncio.to_thread(use)
    assert [list(each.choices[0].delta.token_ids) for each in responses] == [whole] * 12


# Node

NODE_SCRIPT = """
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const [target, protos, request, bad, endless] = process.argv.slice(2);
const definition = loader.loadSync('tandem/v1/inference.proto', {
  includeDirs: [protos], defaults: true, enums: String, oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new InferenceService(target, grpc.credentials.createInsecure());
const told = {};

function stream(request, onData) {
  return new Promise((resolve) => {
    const messages = [];
    const call = client.generate(JSON.parse(request));
    call.on('data', (message) => { messages.push(message); onData(call); });
    call.on('error', () => {});
    call.on('status', (status) => resolve({ messages, status }));
  });
}

(async () => {
  const whole = await stream(request, () => {});
  told.code = whole.status.code;
  told.sequences = whole.messages.map((message) => message.sequence);
  told.kinds = whole.messages.map((message) => message.kind);
  told.tokenIds = whole.messages.flatMap((message) => message.delta ? message.delta.tokenIds : []);
  told.reason = whole.messages.at(-1).finished.reason;
  const refused = (await stream(bad, () => {})).status;
  told.refused = { code: refused.code, text: refused.details };
  const [details] = refused.metadata.get('grpc-status-details-bin');
  told.refused.details = details.toString('latin1');
  told.cancelled = (await stream(endless, (call) => call.cancel())).status.code;
  client.close();
  console.log(JSON.stringify(told));
})();
"""


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory) -> Path:
    """A folder with Node's gRPC packages."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("Node is not installed")
    folder = tmp_path_factory.mktemp("node")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder))
    try:
        subprocess.run(
            [npm, "install", *quiet, *NODE_PACKAGES], check=True, capture_output=True, timeout=120
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install {' '.join(NODE_PACKAGES)}: {error}")
    return folder


async def test_node_streams_cancels_and_reads_its_refusal(live, whole, node_folder):
    (node_folder / "client.js").write_text(NODE_SCRIPT)
    arguments = [json.dumps(each) for each in (REQUEST, BAD, ENDLESS)]
    code, out, errors = await output_of(
        "node", "client.js", live.target, str(ROOT / "proto"), *arguments, cwd=node_folder
    )
    assert (code, errors) == (0, "")
    told = json.loads(out)
    assert told["code"] == grpc.StatusCode.OK.value[0]
    assert told["sequences"] == list(range(len(told["sequences"])))
    assert (told["kinds"][0], told["kinds"][-1]) == ("started", "finished")
    assert told["tokenIds"] == whole
    assert told["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert told["refused"]["code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "stopping.max_tokens is 0, must be at least 1" in told["refused"]["text"]
    assert "google.rpc.BadRequest" in told["refused"]["details"]
    assert told["cancelled"] == grpc.StatusCode.CANCELLED.value[0]
    await settled(live)


# k6


async def run_k6(live, folder: Path, *settings: str) -> tuple[int, dict]:
    summary = folder / "summary.json"
    variables = [word for setting in settings for word in ("-e", setting)]
    code, out, errors = await output_of(
        tool("k6"), "run", "--no-usage-report", "--quiet", "--summary-export", str(summary),
        "-e", f"TARGET={live.target}", "-e", "DURATION=2s", "-e", "STREAMS=4", *variables,
        str(ROOT / "tools" / "load_test.k6.js"),
    )  # fmt: skip
    assert summary.is_file(), out + errors
    return code, json.loads(summary.read_text())["metrics"]


async def test_k6_streams_by_reflection(live, tmp_path):
    code, metrics = await run_k6(live, tmp_path, "MAX_TOKENS=24", "BAD=0.2")
    assert (code, metrics["checks"]["fails"]) == (0, 0)
    assert metrics["tandem_completed"]["count"] > 10
    assert metrics["tandem_tokens"]["count"] > metrics["tandem_completed"]["count"]
    assert metrics["tandem_first_token"]["med"] >= 0
    await settled(live)


async def test_k6_fails_when_the_server_does(checkpoint, tmp_path):
    executor = FakeExecutor(LIMITS, fail_on=("decode", 30))
    async with live_server(checkpoint, executor=executor, engine_restarts=0) as live:
        code, metrics = await run_k6(live, tmp_path)
        assert code == 99
        assert metrics["checks"]["fails"] > 0
        await until(lambda: live.engine.failed.is_set())

"""Receipts: what determines a reply is in its digest, and nothing else is."""

import hashlib
import struct

import pytest

from fakes import FakeExecutor
from live_server import LIMITS, live_server, message
from service.pb import inference_pb2
from service.receipt import ALGORITHM, receipt_digest

SAMPLING = inference_pb2.Sampling(
    temperature=0.5,
    top_k=20,
    top_p=0.75,
    seed=2**32 - 1,
    min_p=0.25,
    repetition_penalty=1.5,
    frequency_penalty=-0.5,
    presence_penalty=1.25,
    logit_bias={300: -100, 2: 0.5},
)
STOPPING = inference_pb2.Stopping(
    max_tokens=9,
    min_tokens=2,
    ignore_eos=True,
    max_reasoning_tokens=7,
    stop_token_ids=[8, 5],
    stop_strings=["é", "ab"],
)
CONSTRAINT = inference_pb2.Constraint(choices=inference_pb2.TextChoices(texts=["no", "ja"]))
FINGERPRINT = "0f" * 32
PROMPT, REPLY = (1, 2, 3), (70000, 4)


def digest(**changes) -> str:
    arguments = {
        "fingerprint": FINGERPRINT,
        "prompt_ids": PROMPT,
        "sampling": SAMPLING,
        "stopping": STOPPING,
        "constraint": CONSTRAINT,
        "reply_ids": REPLY,
    }
    return receipt_digest(**(arguments | changes))


def changed(original, **fields):
    message = type(original)()
    message.CopyFrom(original)
    for name, value in fields.items():
        if name in ("stop_token_ids", "stop_strings"):
            message.ClearField(name)
            getattr(message, name).extend(value)
        elif name == "logit_bias":
            message.ClearField(name)
            message.logit_bias.update(value)
        else:
            setattr(message, name, value)
    return message


def without_reasoning_limit():
    stopping = changed(STOPPING)
    stopping.ClearField("max_reasoning_tokens")
    return stopping


def test_the_encoding_is_what_the_contract_says():
    encoded = (
        b"tandem-receipt-2"
        + b"\x0f" * 32
        + struct.pack(">4I", 3, 1, 2, 3)
        + struct.pack(">fI", 0.5, 20)
        + struct.pack(">fffffI", 0.75, 0.25, 1.5, -0.5, 1.25, 2**32 - 1)
        + struct.pack(">IIfIf", 2, 2, 0.5, 300, -100)
        + struct.pack(">5I", 9, 2, 1, 1, 7)
        + struct.pack(">III", 2, 5, 8)
        + struct.pack(">II2sI2s", 2, 2, b"ab", 2, "é".encode())
        + struct.pack(">III2sI2s", 4, 2, 2, b"no", 2, b"ja")
        + struct.pack(">III", 2, 70000, 4)
    )
    assert digest() == hashlib.sha256(encoded).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "0e" * 32},
        {"prompt_ids": (1, 2)},
        {"prompt_ids": (1, 3, 2)},
        {"reply_ids": (70000,)},
        {"prompt_ids": (1, 2, 3, 4), "reply_ids": (70000,)},
        *({"sampling": changed(SAMPLING, **{name: 0.125})} for name in (
            *("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"),
            "presence_penalty",
        )),
        {"sampling": changed(SAMPLING, top_k=21)},
        {"sampling": changed(SAMPLING, seed=1)},
        {"sampling": changed(SAMPLING, logit_bias={300: -100})},
        {"sampling": changed(SAMPLING, logit_bias={300: -99, 2: 0.5})},
        {"stopping": changed(STOPPING, max_tokens=8)},
        {"stopping": changed(STOPPING, min_tokens=1)},
        {"stopping": changed(STOPPING, ignore_eos=False)},
        {"stopping": changed(STOPPING, stop_token_ids=[8])},
        {"stopping": changed(STOPPING, stop_strings=["éab"])},
        {"stopping": changed(STOPPING, max_reasoning_tokens=0)},
        {"stopping": without_reasoning_limit()},
        {"constraint": inference_pb2.Constraint()},
        {"constraint": inference_pb2.Constraint(json_object=True)},
        {"constraint": inference_pb2.Constraint(regex="no")},
        {"constraint": inference_pb2.Constraint(grammar="no")},
        {"constraint": inference_pb2.Constraint(json_schema="no")},
    ],
)  # fmt: skip
def test_any_change_gives_another_digest(changes):
    assert digest(**changes) != digest()


def test_what_changes_nothing_in_the_reply_changes_nothing_in_the_digest():
    reordered = changed(STOPPING, stop_token_ids=[5, 8], stop_strings=["ab", "é"])
    assert digest(stopping=reordered) == digest()
    zero, minus_zero = (changed(SAMPLING, frequency_penalty=value) for value in (0.0, -0.0))
    assert digest(sampling=zero) == digest(sampling=minus_zero)


def test_every_parameter_that_determines_the_reply_is_covered():
    """A new field must enter the digest (as tandem-receipt-3), unless it leaves the tokens alone."""
    for name, original in (("sampling", SAMPLING), ("stopping", STOPPING)):
        covered = {field.name for field, _ in original.ListFields()}
        left_out = {field.name for field in original.DESCRIPTOR.fields} - covered
        assert {f"{name}.{field}" for field in left_out} <= {"stopping.include_stop_string"}


@pytest.fixture
async def live(checkpoint):
    executor = FakeExecutor(LIMITS, accepts=(2, 1, 0), seeded=True)
    async with live_server(checkpoint, executor=executor) as server:
        yield server


async def receipt_of(live, **fields) -> inference_pb2.Receipt:
    """Asks, and checks that what the client holds gives the digest that it is told."""
    include = {"tokenIds": True, "receipt": True}
    request = message(**({"include": include, "sampling": {"seed": 9}} | fields))
    whole = await live.inference.Complete(request)
    choice, receipt = whole.choices[0], whole.choices[0].finished.receipt
    prompt_ids = request.tokens.ids or live.prompt_ids
    assert receipt.algorithm == ALGORITHM
    assert receipt.digest == receipt_digest(
        whole.started.fingerprint,
        prompt_ids,
        receipt.sampling,
        receipt.stopping,
        receipt.constraint,
        choice.delta.token_ids,
    )
    assert all(receipt.sampling.HasField(f.name) for f in SAMPLING.DESCRIPTOR.fields[:-1])
    return receipt


async def test_receipts_of_a_server(live, tokenizer):
    live.prompt_ids = tokenizer.encode("fox")
    first = await receipt_of(live)
    for cap in (0, 1, 2, None):
        speculation = {} if cap is None else {"maxDraftTokens": cap}
        assert await receipt_of(live, speculation=speculation, requestId=f"r{cap}") == first
    others = [
        await receipt_of(live, sampling={"seed": 10}),
        await receipt_of(live, sampling={"seed": 9, "minP": 0.5}),
        await receipt_of(live, sampling={"seed": 9, "logitBias": {"3": 0.5}}),
        await receipt_of(live, stopping={"minTokens": 1}),
        await receipt_of(live, stopping={"maxTokens": 5}),
        await receipt_of(live, stopping={"stopStrings": ["never met"]}),
        await receipt_of(live, tokens={"ids": [*live.prompt_ids, 1]}),
    ]
    assert len({receipt.digest for receipt in (first, *others)}) == 1 + len(others)


async def test_a_receipt_is_a_request_that_gives_it_again(live, tokenizer):
    live.prompt_ids = tokenizer.encode("fox")
    asked = {"seed": 9, "logitBias": {"3": 0.5}, "presencePenalty": 0.7}
    first = await receipt_of(live, sampling=asked, stopping={"stopStrings": ["zz"], "minTokens": 1})
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=live.prompt_ids),
        sampling=first.sampling,
        stopping=first.stopping,
        include=inference_pb2.Include(receipt=True),
    )
    again = await live.inference.Complete(request)
    assert again.choices[0].finished.receipt == first


async def test_no_receipt_unless_asked_for_nor_for_what_was_cut_off(checkpoint):
    executor = FakeExecutor(LIMITS, decode_delay_s=0.02)
    async with live_server(checkpoint, executor=executor) as live:
        whole = await live.inference.Complete(message(stopping={"maxTokens": 1}))
        assert not whole.choices[0].finished.HasField("receipt")
        request = message(requestId="mine", include={"receipt": True}, stopping={"ignoreEos": True})
        call = live.inference.Generate(request)
        await call.read()
        await call.read()
        await live.inference.Cancel(inference_pb2.CancelRequest(request_id="mine"))
        while not (event := await call.read()).HasField("finished"):
            pass
        assert event.finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert not event.finished.HasField("receipt")

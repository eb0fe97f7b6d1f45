"""Proves that a reply is a function of checkpoint, prompt, parameters and seed, and nothing else.

Starts a server in strict mode, asks for every (prompt, parameters) alone, then again with every draft
cap, in company, in other orders of arrival, and on a server started anew. Token ids and
log-probabilities must be the same bit for bit, and so must the receipts. Prints a table of matches;
exits non-zero on any difference.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf import json_format
from local_server import local_server
from sample_prompts import held_out_functions

from service.pb import chat_pb2, inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from service.translation import fold

ROOT = pathlib.Path(__file__).resolve().parent.parent

TOOL = {
    "name": "run_tests",
    "description": "Runs the tests of a module.",
    "parameters_json": json.dumps(
        {
            "type": "object",
            "properties": {
                "module": {"enum": ["parser", "printer", "server"]},
                "times": {"type": "integer", "minimum": 1, "maximum": 9},
                "verbose": {"type": "boolean"},
            },
            "required": ["module", "times"],
        }
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
        "pure": {"type": "boolean"},
    },
    "required": ["name", "lines", "pure"],
    "additionalProperties": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"temperature": 0, "seed": 0}},
    "temperature 0.8": {"sampling": {"temperature": 0.8, "seed": 1}},
    "top_k, top_p": {"sampling": {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 2}},
    "min_p": {"sampling": {"temperature": 1.2, "min_p": 0.05, "seed": 3}},
    "penalties": {
        "sampling": {
            "temperature": 0.7,
            "seed": 4,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
        }
    },
    "min_tokens, stops": {
        "sampling": {"temperature": 0.7, "seed": 5},
        "stopping": {"min_tokens": 8, "stop_strings": ["\n\n", "return"]},
    },
    "JSON schema": {
        "sampling": {"temperature": 1.0, "seed": 6},
        "constraint": {"json_schema": json.dumps(SCHEMA)},
    },
    "chat that thinks": {
        "sampling": {"temperature": 0.8, "seed": 7},
        "stopping": {"max_reasoning_tokens": 12},
        "chat": {"enable_thinking": True},
    },
    "chat, one call": {
        "sampling": {"temperature": 1.0, "seed": 8},
        "chat": {"tools": [TOOL], "tool_choice": {"mode": "MODE_REQUIRED"}},
    },
}
"""By name, the fields of requests; the text of a chat is the prompt."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """What must not change."""

    token_ids: tuple[int, ...]
    logprobs: bytes
    """The bits of the float32 values."""
    said: tuple[str, ...]
    """Reasoning, text, and name and arguments of each call."""
    reason: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One reply to ask for."""

    setting: str
    prompt: str

    def ask(self, stub: inference_pb2_grpc.InferenceServiceStub, options, cap: int | None) -> Reply:
        """Streams the reply."""
        include = {"token_ids": True, "logprobs": True, "receipt": True}
        request = json_format.ParseDict(SETTINGS[self.setting], inference_pb2.GenerateRequest())
        json_format.ParseDict({"include": include}, request)
        if request.HasField("chat"):
            request.chat.messages.add(role=chat_pb2.ROLE_USER, text=self.prompt)
        else:
            request.text = self.prompt
        request.stopping.max_tokens = options.tokens
        if cap is not None:
            request.speculation.max_draft_tokens = cap
        whole = inference_pb2.CompleteResponse()
        for message in stub.Generate(request, timeout=600):
            fold(whole, message)
        delta, finished = whole.choices[0].delta, whole.choices[0].finished
        token_ids, logprobs = delta.token_ids, delta.logprobs
        if len(token_ids) != len(logprobs):
            raise RuntimeError(f"{len(token_ids)} tokens but {len(logprobs)} log-probabilities")
        bits = struct.pack(f"{len(logprobs)}f", *logprobs)
        calls = (f"{call.id} {call.name} {call.arguments_json}" for call in delta.tool_calls)
        said = (delta.reasoning, delta.text, *calls)
        return Reply(tuple(token_ids), bits, said, finished.reason, finished.receipt.digest)


Replies = dict[Case, Reply]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=ROOT / "model" / "demo")
    parser.add_argument(
        "--prompts", type=int, default=6, help="held-out Python functions (default 6)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens per reply (default 64)")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--draft-length", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--no-strict",
        action="store_true",
        help="measure the default mode instead of proving strict",
    )
    return parser.parse_args()


def alone(stub, cases: Iterable[Case], options, cap: int | None) -> Replies:
    """One request at a time."""
    return {case: case.ask(stub, options, cap) for case in cases}


def in_company(stub, cases: list[Case], options, gap_s: float) -> Replies:
    """All requests at once, or arriving one by one while others run; caps are mixed."""
    caps = [None, *range(options.draft_length + 1)]
    replies: Replies = {}
    with concurrent.futures.ThreadPoolExecutor(3 * options.slots) as pool:
        futures = {}
        for index, case in enumerate(cases):
            futures[case] = pool.submit(case.ask, stub, options, caps[index % len(caps)])
            time.sleep(gap_s)
        for case, future in futures.items():
            replies[case] = future.result()
    return replies


def variations(options) -> dict[str, Callable[..., Replies]]:
    """How the same replies are asked for again, on the server that gave the reference."""
    ways: dict[str, Callable[..., Replies]] = {
        f"alone, draft cap {cap}": lambda stub, cases, cap=cap: alone(stub, cases, options, cap)
        for cap in range(options.draft_length + 1)
    }
    ways["in company"] = lambda stub, cases: in_company(stub, cases, options, 0.0)
    ways["in company, reversed"] = lambda stub, cases: in_company(stub, cases[::-1], options, 0.0)
    ways["arriving while others run"] = lambda stub, cases: in_company(
        stub, cases[1::2] + cases[::2], options, 0.05
    )
    return ways


def matches(reference: Replies, replies: Replies, strict: bool) -> dict[str, tuple[int, int]]:
    """Equal replies and all replies, by setting. Only strict mode promises equal log-probabilities."""

    def equal(case: Case) -> bool:
        ours, theirs = replies[case], reference[case]
        return ours == theirs if strict else ours.token_ids == theirs.token_ids

    return {
        setting: (
            sum(equal(case) for case in reference if case.setting == setting),
            sum(case.setting == setting for case in reference),
        )
        for setting in SETTINGS
    }


def draft_length(target: str) -> int:
    """What the server drafts at most."""
    with grpc.insecure_channel(target) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        return stub.GetModel(model_pb2.GetModelRequest()).model.draft_length


def main() -> int:
    """Prints the table of matches."""
    options = parse_arguments()
    prompts = held_out_functions(options.prompts)
    cases = [Case(setting, prompt) for prompt in prompts for setting in SETTINGS]
    arguments = [
        *("--checkpoint", str(options.checkpoint), "--slots", str(options.slots)),
        *("--draft-length", str(options.draft_length), "--dtype", options.dtype),
        *([] if options.no_strict else ["--strict"]),
    ]
    print(f"{'':<28}" + "".join(f"{setting:>19}" for setting in SETTINGS))
    differences = 0

    def show(name: str, reference: Replies, replies: Replies) -> int:
        found = matches(reference, replies, strict=not options.no_strict)
        cells = "".join(f"{f'{equal}/{total}':>19}" for equal, total in found.values())
        print(f"{name:<28}{cells}", flush=True)
        return sum(total - equal for equal, total in found.values())

    with local_server(arguments) as target, grpc.insecure_channel(target) as channel:
        if draft_length(target) != options.draft_length:
            raise SystemExit(f"the server drafts {draft_length(target)} tokens: no MTP head?")
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        reference = alone(stub, cases, options, None)
        tokens = sum(len(reply.token_ids) for reply in reference.values())
        for name, ask in variations(options).items():
            differences += show(name, reference, ask(stub, cases))
    with local_server(arguments) as target, grpc.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        replies = alone(stub, cases, options, None)
        differences += show("after a restart", reference, replies)
    verdict = "all equal" if not differences else f"{differences} DIFFER"
    compared = "token ids" if options.no_strict else "ids, log-probabilities, receipts"
    print(f"{len(cases)} replies of {tokens} tokens in all: {compared}: {verdict}")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())

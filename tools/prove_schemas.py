"""Proves that replies held to JSON schemas are valid, and the same with drafts as without.

Asks a server for many seeded replies, twice: with the largest draft cap and with none. Every reply must
end by itself and be valid by an independent validator; both must be the same tokens. Exits non-zero
otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import sys
from typing import Any

import grpc
import jsonschema
from google.protobuf import json_format
from local_server import local_server
from sample_prompts import held_out_functions

from service.pb import inference_pb2, inference_pb2_grpc

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEMPERATURES = (0.0, 0.7, 1.0)
SHORT = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def record(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": record(name=SHORT, count=DIGIT, done={"type": "boolean"}),
    "nested": record(at=record(line=DIGIT, column=DIGIT), why=record(kind={"enum": ["a", "b c"]})),
    "arrays": record(
        tags={"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
        grid={"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 2},
    ),
    "choices": record(
        value={"anyOf": [DIGIT, {"type": "null"}, record(x=DIGIT)]},
        mode={"enum": ["read", "write", 7, None]},
        fixed={"const": {"v": [1, "é"]}},
    ),
    "patterns": record(
        id={"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
        share={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        host={"type": "string", "format": "ipv4"},
    ),
    "references": {
        "$defs": {"node": record(name=SHORT, leaf={"type": "boolean"})},
        **record(left={"$ref": "#/$defs/node"}, right={"$ref": "#/$defs/node"}),
    },
    "a list": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 5},
    "a string": {"type": "string", "enum": ["yes", "no", "漢字 😀"]},
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=ROOT / "model" / "demo")
    parser.add_argument("--replies", type=int, default=200, help="default 200")
    parser.add_argument("--tokens", type=int, default=400, help="most per reply (default 400)")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--draft-length", type=int, default=3)
    return parser.parse_args()


def build_request(index: int, prompt: str, options: argparse.Namespace) -> Any:
    """The request number `index`: every schema meets every temperature."""
    fields: dict[str, Any] = {
        "text": prompt,
        "constraint": {"json_schema": json.dumps(schema_of(index))},
        "sampling": {"temperature": TEMPERATURES[index % len(TEMPERATURES)], "seed": index},
        "stopping": {"max_tokens": options.tokens},
        "include": {"token_ids": True},
    }
    return json_format.ParseDict(fields, inference_pb2.GenerateRequest())


def schema_of(index: int) -> dict[str, Any]:
    """The schema of the request number `index`."""
    return list(SCHEMAS.values())[index % len(SCHEMAS)]


def is_valid(index: int, choice: inference_pb2.Choice) -> bool:
    """Whether a reply ended by itself and is what its schema says."""
    if choice.finished.reason != inference_pb2.FINISH_REASON_END_OF_SEQUENCE:
        return False
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        value = json.loads(choice.delta.text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema_of(index), format_checker=checker).is_valid(value)


def main() -> int:
    """Prints how many were valid and how many equal."""
    options = parse_arguments()
    prompts = held_out_functions(24)
    requests = [
        build_request(index, prompts[index % len(prompts)], options)
        for index in range(options.replies)
    ]
    arguments = [
        *("--checkpoint", str(options.checkpoint), "--slots", str(options.slots)),
        *("--draft-length", str(options.draft_length), "--max-context", "1024"),
    ]
    replies: dict[int, list[inference_pb2.Choice]] = {}
    with (
        local_server(arguments) as target,
        grpc.insecure_channel(target) as channel,
        concurrent.futures.ThreadPoolExecutor(options.slots) as pool,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for cap in (options.draft_length, 0):

            def ask(request: Any, cap: int = cap) -> inference_pb2.Choice:
                request.speculation.max_draft_tokens = cap
                return stub.Complete(request, timeout=600).choices[0]

            replies[cap] = list(pool.map(ask, requests))
            valid = [is_valid(index, choice) for index, choice in enumerate(replies[cap])]
            for index, choice in enumerate(replies[cap]):
                if not valid[index]:
                    print(f"not valid, request {index}: {choice.delta.text!r}", file=sys.stderr)
            drafted = sum(c.finished.usage.speculation.num_draft_tokens for c in replies[cap])
            accepted = sum(
                c.finished.usage.speculation.num_accepted_draft_tokens for c in replies[cap]
            )
            print(
                f"draft cap {cap}: valid {sum(valid)}/{len(valid)},"
                f" {accepted} of {drafted} draft tokens accepted",
                flush=True,
            )
            if not all(valid):
                return 1
    drafted, plain = replies[options.draft_length], replies[0]
    equal = sum(a.delta.token_ids == b.delta.token_ids for a, b in zip(drafted, plain, strict=True))
    print(f"equal {equal}/{len(plain)}")
    return int(equal < len(plain))


if __name__ == "__main__":
    sys.exit(main())

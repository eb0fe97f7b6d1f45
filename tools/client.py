"""Streams a completion: `python tools/client.py "def fibonacci(n):"`.

Without --target it starts a server of its own on the embedded checkpoint. The text goes to stdout
as it comes, one line of figures to stderr. Exit code 1 when the server refuses or fails.
"""

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from local_server import ServerEndedError, local_server

from service.pb import inference_pb2, inference_pb2_grpc

MAX_MESSAGE_BYTES = 64 << 20


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Streams a completion.")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("positional_prompt", nargs="?", metavar="prompt", help="text to continue")
    prompts.add_argument("--prompt", help="the same")
    prompts.add_argument("--file", type=Path, help="file with the text; default: stdin")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument("--target", help="host:port of a running server")
    servers.add_argument("--serve", action="store_true", help="start a server (the default)")
    parser.add_argument("--max-tokens", type=int, help="default: until the model ends")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    parser.add_argument("--top-k", type=int, help="default: the checkpoint's")
    parser.add_argument("--top-p", type=float, help="default: the checkpoint's")
    parser.add_argument("--seed", type=int, help="default: random")
    parser.add_argument("--max-draft-tokens", type=int, help="0 turns drafting off")
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    return parser.parse_args()


def read_prompt(arguments: argparse.Namespace) -> str:
    """Returns the prompt from where it was given."""
    for prompt in (arguments.positional_prompt, arguments.prompt):
        if prompt is not None:
            return prompt
    return arguments.file.read_text() if arguments.file else sys.stdin.read()


def build_request(arguments: argparse.Namespace) -> inference_pb2.GenerateRequest:
    """Returns the request; what was not given stays unset, which is not the same as zero."""
    return inference_pb2.GenerateRequest(
        text=read_prompt(arguments),
        sampling=inference_pb2.Sampling(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=arguments.max_tokens, stop_strings=arguments.stop
        ),
        speculation=inference_pb2.Speculation(max_draft_tokens=arguments.max_draft_tokens),
    )


def stream(target: str, request: inference_pb2.GenerateRequest) -> None:
    """Prints the reply as it comes, and its figures."""
    options = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
    with grpc.insecure_channel(target, options) as channel:
        started_at = time.monotonic()
        first_at = None
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        try:
            for message in call:
                if message.HasField("delta"):
                    first_at = first_at or time.monotonic()
                    print(message.delta.text, end="", flush=True)
                elif message.HasField("finished"):
                    now = time.monotonic()
                    print(flush=True)
                    waited = (first_at or now) - started_at
                    print(figures(message.finished, now - started_at, waited), file=sys.stderr)
        finally:
            call.cancel()  # of a call that has ended, it does nothing


def figures(finished: inference_pb2.Finished, seconds: float, first_seconds: float) -> str:
    """Returns one line: how much, how fast, how well drafted, and why it ended."""
    usage = finished.usage
    parts = [
        f"{usage.completion_tokens} tokens",
        f"{usage.completion_tokens / seconds:.1f} tokens/s",
        f"first token {first_seconds:.3f} s",
    ]
    if usage.HasField("speculation"):
        drafted = usage.speculation.num_draft_tokens
        accepted = usage.speculation.num_accepted_draft_tokens
        per_round = usage.completion_tokens / usage.speculation.num_spec_steps
        parts.append(f"accepted {accepted}/{drafted} draft tokens ({accepted / drafted:.0%})")
        parts.append(f"{per_round:.2f} tokens/round")
    reason = inference_pb2.FinishReason.Name(finished.reason)
    return " | ".join([*parts, reason.removeprefix("FINISH_REASON_")])


def describe(error: Any) -> str:
    """Returns a failure as lines for people: code and sentence, or code and field by field."""
    status = rpc_status.from_call(error)
    lines = [f"{error.code().name}: {error.details()}"]
    for packed in status.details if status else ():
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if packed.Unpack(bad_request):
            lines = [f"{error.code().name}:"]
            lines += [f"  {item.field} {item.description}" for item in bad_request.field_violations]
        elif packed.Unpack(retry):
            lines.append(f"  retry in {retry.retry_delay.ToMilliseconds() / 1000:g} s")
    return "\n".join(lines)


def main() -> int:
    """Runs the tool; returns its exit code."""
    arguments = parse_arguments()
    # So that a server of our own is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        request = build_request(arguments)
        target = arguments.target
        server = contextlib.nullcontext(target) if target else local_server()
        with server as ready_target:
            stream(ready_target, request)
    except grpc.RpcError as error:
        print(describe(error), file=sys.stderr)
        return 1
    except (OSError, ServerEndedError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncancelled", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

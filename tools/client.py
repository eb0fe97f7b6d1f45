"""Streams a completion: `python tools/client.py "def fibonacci(n):"`.

Without --target it starts a server of its own on the embedded checkpoint. The text goes to stdout
as it comes (of several choices: when each has ended), one line of figures per choice to stderr. Exit
code 1 when the server refuses or fails, or when a receipt does not fit the reply.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from local_server import ServerEndedError, local_server

from service.pb import inference_pb2, inference_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from service.receipt import ALGORITHM, receipt_digest

MAX_MESSAGE_BYTES = 64 << 20


class ReceiptError(Exception):
    """A receipt that does not fit the reply it came with."""


def logit_bias(text: str) -> tuple[int, float]:
    """Parses `id=value`."""
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not id=value") from None


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
    parser.add_argument("--choices", type=int, help="replies to the prompt; default: 1")
    parser.add_argument("--max-tokens", type=int, help="default: until the model ends")
    parser.add_argument("--min-tokens", type=int, help="tokens before any end; default: 0")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    parser.add_argument("--top-k", type=int, help="default: the checkpoint's")
    parser.add_argument("--top-p", type=float, help="default: the checkpoint's")
    parser.add_argument("--min-p", type=float, help="default: the checkpoint's")
    parser.add_argument(
        "--repetition-penalty", type=float, help="1 is off; default: the checkpoint's"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, help="0 is off; default: the checkpoint's"
    )
    parser.add_argument(
        "--presence-penalty", type=float, help="0 is off; default: the checkpoint's"
    )
    parser.add_argument(
        "--logit-bias", metavar="ID=VALUE", type=logit_bias, action="append", default=[],
        help="added to the logit of a token; may be repeated",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="default: random")
    parser.add_argument("--max-draft-tokens", type=int, help="0 turns drafting off")
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--receipt", action="store_true", help="ask for receipts and check them")
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
        choices=arguments.choices,
        sampling=inference_pb2.Sampling(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            repetition_penalty=arguments.repetition_penalty,
            frequency_penalty=arguments.frequency_penalty,
            presence_penalty=arguments.presence_penalty,
            logit_bias=dict(arguments.logit_bias),
            seed=arguments.seed,
        ),
        stopping=inference_pb2.Stopping(
            max_tokens=arguments.max_tokens,
            min_tokens=arguments.min_tokens,
            stop_strings=arguments.stop,
        ),
        speculation=inference_pb2.Speculation(max_draft_tokens=arguments.max_draft_tokens),
        include=inference_pb2.Include(token_ids=arguments.receipt, receipt=arguments.receipt),
    )


def stream(target: str, request: inference_pb2.GenerateRequest) -> None:
    """Prints the reply as it comes, and its figures.

    Raises:
      ReceiptError: a receipt does not fit.
    """
    options = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
    with grpc.insecure_channel(target, options) as channel:
        printer = Printer(request)
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        try:
            for message in call:
                printer.take(message)
        finally:
            call.cancel()  # of a call that has ended, it does nothing
        if request.include.receipt:
            tokenize = tokenizer_pb2_grpc.TokenizerServiceStub(channel).Tokenize
            prompt = tokenize(tokenizer_pb2.TokenizeRequest(text=request.text))
            printer.check_receipts(prompt.token_ids)


class Printer:
    """Prints the messages of one reply, and keeps what the check of its receipts needs."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        """Starts the clock."""
        self._together = request.choices > 1
        self._started_at = time.monotonic()
        self._first_at: dict[int, float] = {}  # by choice, as all that follows
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._receipts: dict[int, inference_pb2.Receipt] = {}
        self._fingerprint = ""

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        """Prints one message."""
        delta, finished = message.delta, message.finished
        match message.WhichOneof("kind"):
            case "started":
                self._fingerprint = message.started.fingerprint
            case "delta":
                self._first_at.setdefault(delta.index, time.monotonic())
                self._token_ids[delta.index] += delta.token_ids
                if self._together:
                    self._texts[delta.index] += delta.text
                else:
                    print(delta.text, end="", flush=True)
            case _:
                self._end(finished)

    def _end(self, finished: inference_pb2.Finished) -> None:
        index, now = finished.index, time.monotonic()
        heading = f"--- choice {index} ---\n" if self._together else ""
        print(heading + self._texts.pop(index, ""), flush=True)
        waited = self._first_at.get(index, now) - self._started_at
        label = f"choice {index} | " if self._together else ""
        print(label + figures(finished, now - self._started_at, waited), file=sys.stderr)
        if finished.HasField("receipt"):
            self._receipts[index] = finished.receipt

    def check_receipts(self, prompt_ids: Sequence[int]) -> None:
        """Computes each digest again from what was received, and prints it.

        Raises:
          ReceiptError: one differs, or says that it is computed in a way not known here.
        """
        for index, receipt in sorted(self._receipts.items()):
            if receipt.algorithm != ALGORITHM:
                raise ReceiptError(f"receipt {index} is of an unknown kind: {receipt.algorithm}")
            own = receipt_digest(
                self._fingerprint,
                prompt_ids,
                receipt.sampling,
                receipt.stopping,
                receipt.constraint,
                self._token_ids[index],
            )
            if own != receipt.digest:
                raise ReceiptError(f"receipt {index} is {receipt.digest}, computed here: {own}")
            print(f"receipt {own} | computed here: equal", file=sys.stderr)


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
        if target is None:
            print("starting a server; the first start compiles for a minute", file=sys.stderr)
        server = contextlib.nullcontext(target) if target else local_server()
        with server as ready_target:
            stream(ready_target, request)
    except grpc.RpcError as error:
        print(describe(error), file=sys.stderr)
        return 1
    except (OSError, ReceiptError, ServerEndedError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncancelled", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

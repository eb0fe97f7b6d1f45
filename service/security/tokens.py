"""Bearer tokens: a file of their hashes, and a command that makes one.

The file has one token per line: `name sha256-hex-of-the-token [rate=N/s|N/min] [concurrency=N]`.
Empty lines and lines that begin with # say nothing. Hashes need no salt: tokens are random, and
nobody can list 2^256 of them.
"""

import argparse
import dataclasses
import hashlib
import hmac
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.security.reloading import ReloadedFiles, read_file

TOKEN_BYTES = 32
LOOK_EVERY_S = 1.0
"""A changed file is in force after at most this long."""
MAX_LIMIT = 1_000_000_000
NAME = re.compile(r"[!-~]{1,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
RATE = re.compile(r"([0-9]{1,10})/(s|min)")
CONCURRENCY = re.compile(r"[0-9]{1,10}")
UNIT_S = {"s": 1.0, "min": 60.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """So many calls per unit of time; as many may come at once."""

    calls: int
    unit: str
    """`s` or `min`."""

    @property
    def per_second(self) -> float:
        return self.calls / UNIT_S[self.unit]

    def __str__(self) -> str:
        return f"{self.calls}/{self.unit}"


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One who may call, without the secret itself."""

    name: str
    digest: bytes = dataclasses.field(repr=False)
    """SHA-256 of the secret."""
    rate: Rate | None = None
    """None: any number of calls."""
    concurrency: int | None = None
    """Calls at the same time; None: any number."""

    def line(self) -> str:
        """Returns the token as a line of the file."""
        words = [self.name, self.digest.hex()]
        words += [f"rate={self.rate}"] if self.rate else []
        words += [f"concurrency={self.concurrency}"] if self.concurrency else []
        return " ".join(words)


def parse_rate(text: str) -> Rate:
    """Parses `N/s` or `N/min`; ValueError when it is neither."""
    match = RATE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= MAX_LIMIT:
        raise ValueError(f"rate is {text}, must be N/s or N/min with N in [1, {MAX_LIMIT}]")
    return Rate(int(match[1]), match[2])


def parse_concurrency(text: str) -> int:
    """Parses a number of calls; ValueError when it is none."""
    if CONCURRENCY.fullmatch(text) is None or not 1 <= int(text) <= MAX_LIMIT:
        raise ValueError(f"concurrency is {text}, must be in [1, {MAX_LIMIT}]")
    return int(text)


def parse_name(text: str) -> str:
    """Parses the name of a token, which is written to logs; ValueError when it is none."""
    if NAME.fullmatch(text) is None or text.startswith("#"):
        raise ValueError(
            f"name is {text!a}, must be 1 to 64 printable ASCII characters, not # first"
        )
    return text


def parse_line(line: str) -> Token:
    """Parses a line of the file; ValueError when it is none. Says nothing of the digest."""
    words = line.split()
    name, digest = parse_name(words[0]), words[1] if len(words) > 1 else ""
    if DIGEST.fullmatch(digest.lower()) is None:
        raise ValueError(f"the second word is {len(digest)} characters, must be 64 hex digits")
    token = Token(name, bytes.fromhex(digest))
    for limit in words[2:]:
        key, _, value = limit.partition("=")
        if key == "rate" and token.rate is None:
            token = dataclasses.replace(token, rate=parse_rate(value))
        elif key == "concurrency" and token.concurrency is None:
            token = dataclasses.replace(token, concurrency=parse_concurrency(value))
        else:
            raise ValueError(f"{key} is not a limit, or twice; limits are rate and concurrency")
    return token


def parse_tokens(text: str) -> tuple[Token, ...]:
    """Parses a token file.

    Raises:
      ValueError: a line is wrong, names or tokens occur twice, or there is no token at all.
    """
    tokens: list[Token] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            token = parse_line(line)
            if any(token.name == other.name for other in tokens):
                raise ValueError(f"the name {token.name} occurs twice")
            if any(token.digest == other.digest for other in tokens):
                raise ValueError("the token occurs twice")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        tokens.append(token)
    if not tokens:
        raise ValueError("holds no token")
    return tuple(tokens)


class TokenFile:
    """The tokens of a file, which may change while it is in use."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Args:
          path: the file (setting `token_file`).
          clock: seconds; for tests.

        Raises:
          ValueError: it cannot be used; names setting, file and reason.
        """

        def load() -> tuple[Token, ...]:
            text = read_file("token_file", path).decode(errors="replace")
            try:
                return parse_tokens(text)
            except ValueError as error:
                raise ValueError(f"token_file {path}: {error}") from None

        self._clock = clock
        self._files = ReloadedFiles([path], load)
        self._looked_at = clock()

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens in force."""
        if self._clock() >= self._looked_at + LOOK_EVERY_S:
            self._looked_at = self._clock()
            self._files.changed()
        return self._files.value

    def find(self, secret: str) -> Token | None:
        """Returns whose token it is; takes as long whether it is one or not, and whichever it is."""
        digest = hashlib.sha256(secret.encode()).digest()
        found = None
        for token in self.tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes a token: its line for the file goes to stdout, the token itself to stderr, once."""
    parser = argparse.ArgumentParser(
        prog="python -m service.security.tokens",
        description="Makes a bearer token. The line for the token file goes to stdout, the token "
        "to stderr; it is kept nowhere.",
    )
    parser.add_argument("name", help="who gets it; appears in logs")
    parser.add_argument("--rate", help="calls per time: N/s or N/min; default: any")
    parser.add_argument("--concurrency", help="calls at the same time; default: any")
    options = parser.parse_args(arguments)
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        token = Token(
            parse_name(options.name),
            hashlib.sha256(secret.encode()).digest(),
            parse_rate(options.rate) if options.rate is not None else None,
            parse_concurrency(options.concurrency) if options.concurrency is not None else None,
        )
    except ValueError as error:
        parser.error(str(error))
    print(token.line(), flush=True)
    print(f"token of {token.name}, shown once: {secret}", file=sys.stderr)


if __name__ == "__main__":
    main()

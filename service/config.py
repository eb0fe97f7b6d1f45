"""Settings of a server: one typed schema, with what it means and where its bounds are."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

import model
from service.config_sources import read_settings, switched_off

DEMO_CHECKPOINT = Path(model.__file__).parent / "demo"
MAX_INT = 2**31 - 1
MAX_SECONDS = MAX_INT // 1000
"""gRPC counts times in milliseconds of 31 bits."""


def not_bool(value: object) -> object:
    """Refuses a truth value in place of a number, which Python takes for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError(f"is {value}, must be a number")
    return value


def not_empty(value: object) -> object:
    """Refuses empty text, which as a path is the working directory."""
    if value == "":
        raise ValueError("is '', must be a path")
    return value


def home_expanded(path: Path) -> Path:
    """Expands `~`: no shell has done so in a file."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"is '{path}', and no home directory is known") from None


def existing_directory(path: Path) -> Path:
    """Refuses a path where no directory is."""
    if not path.is_dir():
        raise ValueError(f"is '{path}', must be an existing directory")
    return path


def existing_file(path: Path) -> Path:
    """Refuses a path where no file is."""
    if not path.is_file():
        raise ValueError(f"is '{path}', must be an existing file")
    return path


def possible_directory(path: Path) -> Path:
    """Refuses a path where something else is than a directory."""
    return existing_directory(path) if path.exists() else path


def endpoint(url: str) -> str:
    """Refuses what is no URL of a collector, and passwords, which would end in logs."""
    if "@" in url:
        raise ValueError("has a user name or password, must have none")
    if not re.fullmatch(r"https?://[\w.:\[\]-]+(/[^\s?#]*)?", url):
        raise ValueError(f"is {url!r}, must be http://HOST:PORT or https://HOST:PORT")
    return url


T = TypeVar("T")
OrNone = Annotated[T | None, BeforeValidator(switched_off)]
Host = Annotated[str, Field(min_length=1)]
Port = Annotated[int, BeforeValidator(not_bool), Field(ge=0, le=65535)]
Count = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=MAX_INT)]
CountOrZero = Annotated[int, BeforeValidator(not_bool), Field(ge=0, le=MAX_INT)]
ContextLength = Annotated[int, BeforeValidator(not_bool), Field(ge=2, le=MAX_INT)]
Seconds = Annotated[float, BeforeValidator(not_bool), Field(ge=0, le=MAX_SECONDS)]
PositiveGibibytes = Annotated[float, BeforeValidator(not_bool), Field(ge=0.001, le=1 << 20)]
PositiveSeconds = Annotated[Seconds, Field(ge=0.001)]
AnyPath = Annotated[Path, BeforeValidator(not_empty), AfterValidator(home_expanded)]
ExistingDirectory = Annotated[AnyPath, AfterValidator(existing_directory)]
PossibleDirectory = Annotated[AnyPath, AfterValidator(possible_directory)]
ExistingFile = Annotated[AnyPath, AfterValidator(existing_file)]
Endpoint = Annotated[str, AfterValidator(endpoint)]
Dtype = Literal["float32", "bfloat16"]
DTYPES = get_args(Dtype)
KVDtype = Literal["auto", "float32", "bfloat16", "float8_e4m3fn"]


class ServerConfig(BaseModel, frozen=True):
    """What one server serves, where, and within which bounds.

    Built directly, it reads neither environment nor files. What stands below a setting is its help.

    Raises:
      pydantic.ValidationError: a ValueError; values are out of bounds or do not go together.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)

    checkpoint: ExistingDirectory = DEMO_CHECKPOINT
    """Directory with config.json, tokenizer.json and safetensors, or an Orbax directory made of one."""
    host: Host = "127.0.0.1"
    """Address to listen on."""
    port: Port = 50051
    """Port to listen on; 0 takes any free one."""
    max_message_bytes: Count = 64 << 20
    """Bytes of one gRPC message, in either direction."""
    channelz: bool = False
    """Serve channelz, which shows callers all connections of the server."""

    slots: Count = 4
    """Requests that decode together."""
    max_context: OrNone[ContextLength] = None
    """Tokens of prompt and reply; none: the model's own maximum."""
    page_size: Count = 16
    """Tokens in one page of the KV caches."""
    pages: OrNone[Count] = None
    """Pages of the KV caches for all slots together; none: all that the slots could fill."""
    prefill_chunk: Count = 128
    """Prompt tokens in one prefill call."""
    rounds_per_call: Count = 4
    """Rounds in one decode call."""
    dtype: Dtype = "float32"
    """Type of parameters."""
    kv_dtype: KVDtype = "auto"
    """Type of keys and values; auto: that of the parameters."""
    chat_format: Literal["auto", "qwen3", "plain"] = "auto"
    """How replies to chats are read: qwen3: reasoning and calls; auto: as the template says."""
    memory_gib: OrNone[PositiveGibibytes] = None
    """Memory to use on the device, in GiB; none: what is available, less a reserve for the host."""
    compilation_cache: OrNone[PossibleDirectory] = Path("~/.cache/tandem/xla")
    """Directory that keeps compiled programs for later starts; none: compile at every start."""

    draft_length: CountOrZero = 3
    """Draft tokens per round; 0 turns drafting off."""
    adaptive_drafts: bool = True
    """Draft fewer tokens, up to the default cap, while more do not pay."""
    strict: bool = False
    """One decode program: replies equal bit by bit whatever the draft cap, company and load."""

    max_waiting_requests: Count = 256
    """Waiting requests; more are refused."""
    max_waiting_tokens: Count = 1 << 20
    """Prompt tokens of all waiting requests together; more are refused."""
    max_resume_seconds: Seconds = 60.0
    """Longest resume_window that a request may ask for."""
    max_resume_bytes: CountOrZero = 64 << 20
    """Bytes of all replies that are kept for Resume together."""

    tls_certificate: OrNone[ExistingFile] = None
    """PEM file with the server's certificate and those that lead to its authority; none: no TLS."""
    tls_key: OrNone[ExistingFile] = None
    """PEM file with the private key of the certificate."""
    tls_client_ca: OrNone[ExistingFile] = None
    """PEM file with the authorities that sign clients' certificates; none: any client may connect."""
    token_file: OrNone[ExistingFile] = None
    """File with hashes of the bearer tokens that let a caller in; none: all callers are let in."""
    allow_insecure_tokens: bool = False
    """Take bearer tokens from other machines without TLS, as behind a proxy that ends it."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe lines to log."""
    log_format: Literal["text", "json"] = "text"
    """Form of the lines of the log."""
    metrics_host: OrNone[Host] = None
    """Address that serves Prometheus metrics; none: that of --host."""
    metrics_port: OrNone[Port] = None
    """Port that serves Prometheus metrics; 0 takes any free one, none: no metrics."""
    otlp_endpoint: OrNone[Endpoint] = None
    """URL of the OpenTelemetry collector that receives traces; none: no traces."""

    grace_seconds: Seconds = 120.0
    """Seconds for which running requests may go on after SIGTERM."""
    stall_seconds: PositiveSeconds = 30.0
    """Seconds without progress after which an engine with work counts as stuck, and as unhealthy."""
    engine_restarts: CountOrZero = 3
    """Restarts of a failed engine within 10 minutes; one more failure ends the server."""
    max_connection_age_seconds: OrNone[PositiveSeconds] = None
    """Seconds after which a client is told to connect anew, running calls go on; none: never."""

    @model_validator(mode="after")
    def go_together(self) -> Self:
        """Checks settings against each other."""
        problems: list[str] = []
        tls = self.tls_certificate is not None and self.tls_key is not None
        if self.tls_certificate and not tls:
            problems.append("tls_key is not set, must be with tls_certificate")
        if self.tls_key and not tls:
            problems.append("tls_certificate is not set, must be with tls_key")
        if self.tls_client_ca and not tls:
            problems.append("tls_certificate and tls_key are not set, must be with tls_client_ca")
        if self.token_file and not (tls or is_loopback(self.host) or self.allow_insecure_tokens):
            problems.append(
                f"host is {self.host!r}, where the tokens of token_file would travel in the clear: "
                "tls_certificate and tls_key, or allow_insecure_tokens, must be set"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


GROUPS = {
    "checkpoint": "serving",
    "slots": "model shape",
    "draft_length": "speculation",
    "max_waiting_requests": "queue",
    "tls_certificate": "security",
    "log_level": "telemetry",
    "grace_seconds": "life cycle",
}
"""Groups of --help, by the setting with which each begins."""


def is_loopback(host: str) -> bool:
    """Tells whether an address is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def effective(config: ServerConfig) -> dict[str, str | int | float | bool | None]:
    """Returns the settings for logs and clients: paths as text, never what is in the files."""
    return config.model_dump(mode="json")


def read_config(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> tuple[ServerConfig, dict[str, str]]:
    """Reads the settings; ends the process with status 2 and a message when they are wrong.

    Args:
      arguments: the command line, which goes before everything else; unset: the process's own.
      environment: `TANDEM_*` variables, which go before the file; unset: the process's own.

    Returns:
      The settings, and where each comes from that was given.
    """
    return read_settings(ServerConfig, GROUPS, arguments, environment)


def parse_config(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """Reads the settings as `read_config` does, and leaves out where they come from."""
    return read_config(arguments, environment)[0]

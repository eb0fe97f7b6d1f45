"""Settings: where they come from, which goes first, and what is said of wrong ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from service.config import (
    DEMO_CHECKPOINT,
    DTYPES,
    GROUPS,
    ServerConfig,
    effective,
    parse_config,
    read_config,
)
from service.config_sources import read_settings

FILES = ("tls_certificate", "tls_key", "tls_client_ca", "token_file")
OPTIONAL = [name for name, default in effective(ServerConfig()).items() if default is None]


@pytest.fixture
def others(tmp_path, checkpoint) -> dict[str, Any]:
    """A value for every setting that is not its default."""
    for name in FILES:
        (tmp_path / name).write_text("secret")
    return {name: tmp_path / name for name in FILES} | {
        "checkpoint": checkpoint,
        "host": "0.0.0.0",
        "port": 0,
        "max_message_bytes": 1,
        "channelz": True,
        "slots": 1,
        "max_context": 2,
        "page_size": 3,
        "pages": 4,
        "prefill_chunk": 5,
        "rounds_per_call": 6,
        "dtype": "bfloat16",
        "kv_dtype": "float8_e4m3fn",
        "memory_gib": 1.5,
        "chat_format": "plain",
        "compilation_cache": tmp_path / "cache",
        "draft_length": 0,
        "adaptive_drafts": False,
        "strict": True,
        "max_waiting_requests": 7,
        "max_waiting_tokens": 8,
        "max_resume_seconds": 0.0,
        "max_resume_bytes": 0,
        "allow_insecure_tokens": True,
        "log_level": "ERROR",
        "log_format": "json",
        "metrics_host": "::1",
        "metrics_port": 0,
        "otlp_endpoint": "http://[::1]:4317",
        "grace_seconds": 0.5,
        "stall_seconds": 1.5,
        "engine_restarts": 0,
        "max_connection_age_seconds": 0.25,
    }


def flag(name: str, value: object) -> str:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def variable(name: str) -> str:
    return f"TANDEM_{name.upper()}"


def toml(path: Path, **values: object) -> Path:
    """Writes a file; text and numbers of JSON are those of TOML."""
    lines = (f"{name} = {json.dumps(value, default=str)}\n" for name, value in values.items())
    path.write_text("".join(lines))
    return path


def refusal(capsys, *flags: str, environment: dict[str, str] | None = None) -> str:
    """Returns what is said of settings that must be refused."""
    with pytest.raises(SystemExit) as ended:
        parse_config(flags, environment or {})
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    usage, said = err.rstrip("\n").split("\n")
    assert not out
    assert usage == "usage: python -m service [--help] [--config FILE] [--SETTING VALUE]..."
    return said.removeprefix("python -m service: error: ")


def test_nothing_given_means_the_defaults():
    assert parse_config([], {}) == ServerConfig()
    assert ServerConfig().checkpoint == DEMO_CHECKPOINT
    assert DEMO_CHECKPOINT.parts[-2:] == ("model", "demo")
    assert ServerConfig().compilation_cache == Path("~/.cache/tandem/xla").expanduser()
    assert ServerConfig().dtype in DTYPES


def test_every_setting_can_be_given_by_every_source(others, tmp_path):
    given = ServerConfig(**others)
    defaults = effective(ServerConfig())
    assert others.keys() == defaults.keys()
    assert all(value != defaults[name] for name, value in effective(given).items())
    assert parse_config([flag(*item) for item in others.items()], {}) == given
    assert parse_config([], {variable(n): str(value) for n, value in others.items()}) == given
    file = toml(tmp_path / "tandem.toml", **others)
    assert parse_config([f"--config={file}"], {}) == given


def test_flags_go_before_variables_before_the_file(tmp_path):
    file = toml(tmp_path / "tandem.toml", slots=11, pages=12, page_size=13, strict=True)
    environment = {"TANDEM_PAGES": "22", "TANDEM_PAGE_SIZE": "23", "PATH": "/bin"}
    flags = ["--page-size", "33", "--no-strict", "--config", str(file)]
    config, origins = read_config(flags, environment)
    assert config == ServerConfig(slots=11, pages=22, page_size=33, strict=False)
    assert origins == {
        "slots": f"slots in {file}",
        "pages": "TANDEM_PAGES",
        "page_size": "--page-size",
        "strict": "--strict",
    }


def test_a_variable_names_the_file_unless_a_flag_does(tmp_path):
    first, second = toml(tmp_path / "1.toml", slots=1), toml(tmp_path / "2.toml", slots=2)
    environment = {"TANDEM_CONFIG": str(first)}
    assert parse_config([], environment).slots == 1
    assert parse_config([f"--config={second}"], environment).slots == 2
    assert parse_config(["--config=none"], environment).slots == ServerConfig().slots
    assert parse_config(["--config="], environment).slots == ServerConfig().slots


@pytest.mark.parametrize("off", ["none", ""])
def test_none_switches_off_what_can_be_off(off, others, tmp_path):
    names = [*OPTIONAL, "compilation_cache"]
    assert set(names) >= {*FILES, "max_context", "metrics_port", "otlp_endpoint"}
    file = toml(tmp_path / "on.toml", **{name: others[name] for name in names})
    on = parse_config([f"--config={file}"], {})
    environment = {variable(name): off for name in names}
    for config in (
        parse_config([f"--config={file}", *(flag(name, off) for name in names)], {}),
        parse_config([f"--config={file}"], environment),
        parse_config([f"--config={toml(tmp_path / 'off', **dict.fromkeys(names, off))}"], {}),
    ):
        assert all(getattr(on, name) is not None for name in names)
        assert all(getattr(config, name) is None for name in names)


def test_a_schema_built_directly_reads_nothing_else(monkeypatch, tmp_path):
    file = toml(tmp_path / "tandem.toml", pages=9)
    variables = {"HOME": str(tmp_path), "TANDEM_SLOTS": "9", "TANDEM_CONFIG": str(file)}
    monkeypatch.setattr(os, "environ", variables)
    assert (ServerConfig(port=0).slots, ServerConfig(port=0).pages) == (4, None)
    monkeypatch.setattr(sys, "argv", ["service", "--page-size=9"])
    assert parse_config() == ServerConfig(slots=9, pages=9, page_size=9)


def test_a_config_never_changes_and_can_be_a_key():
    config = ServerConfig(port=1)
    with pytest.raises(pydantic.ValidationError):
        config.port = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert {config: "equal"}[ServerConfig(port=1)] == "equal"


@pytest.mark.parametrize(
    "wrong",
    [
        {"prot": 1},
        {"port": -1},
        {"port": True},
        {"slots": 0},
        {"grace_seconds": float("nan")},
        {"checkpoint": Path("/nowhere")},
        {"dtype": "int8"},
    ],
)
def test_a_schema_built_directly_is_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerConfig(**wrong)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("port", "65536", "at most 65535"),
        ("port", "-1", "at least 0"),
        ("port", "http", "a whole number"),
        ("port", "", "a whole number"),
        ("port", "none", "a whole number"),
        ("slots", "0", "at least 1"),
        ("slots", "2147483648", "at most 2147483647"),
        ("slots", "1.5", "a whole number"),
        ("max_context", "1", "at least 2"),
        ("pages", "0", "at least 1"),
        ("draft_length", "-1", "at least 0"),
        ("grace_seconds", "-0.5", "at least 0"),
        ("grace_seconds", "nan", "at least 0"),
        ("grace_seconds", "inf", "at most 2147483"),
        ("grace_seconds", "soon", "a number"),
        ("max_connection_age_seconds", "0", "at least 0.001"),
        ("stall_seconds", "0", "at least 0.001"),
        ("metrics_port", "65536", "at most 65535"),
        ("dtype", "int8", "'float32' or 'bfloat16'"),
        ("log_level", "info", "'DEBUG', 'INFO', 'WARNING' or 'ERROR'"),
        ("log_format", "xml", "'text' or 'json'"),
        ("host", "", "at least 1 character"),
        ("checkpoint", "/nowhere", "an existing directory"),
        ("checkpoint", "", "a path"),
        ("compilation_cache", __file__, "an existing directory"),
        ("tls_key", "/nowhere", "an existing file"),
        ("token_file", "/", "an existing file"),
        ("otlp_endpoint", "collector:4317", "http://HOST:PORT or https://HOST:PORT"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit_and_source(name, value, limit, capsys, tmp_path):
    said = f"is {value!r}, must be {limit}"
    assert refusal(capsys, flag(name, value)) == f"{flag(name, '')[:-1]} {said}"
    assert refusal(capsys, environment={variable(name): value}) == f"{variable(name)} {said}"
    file = toml(tmp_path / "tandem.toml", **{name: value})
    assert refusal(capsys, f"--config={file}") == f"{name} in {file} {said}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("port = true", "is True, must be a number"),
        ("port = 1.5", "is 1.5, must be a whole number"),
        ("slots = [4]", "is [4], must be a whole number"),
        ("host = 5", "is 5, must be text"),
        ("strict = 2", "is 2, must be true or false"),
        ("strict = 'maybe'", "is 'maybe', must be true or false"),
        ("strict = [true]", "is [True], must be true or false"),
        ("grace_seconds = true", "is True, must be a number"),
        ("grace_seconds = []", "is [], must be a number"),
        ("grace_seconds = inf", "is inf, must be at most 2147483"),
        ("token_file = 5", "is 5, must be a path"),
        ("metrics_port = false", "is False, must be a number"),
    ],
)
def test_a_value_of_a_wrong_type_in_the_file_is_refused(line, said, capsys, tmp_path):
    file = tmp_path / "tandem.toml"
    file.write_text(line)
    assert refusal(capsys, f"--config={file}") == f"{line.split()[0]} in {file} {said}"


def test_unknown_flags_are_refused_with_the_nearest(capsys):
    nearest = "is not a setting, the nearest is"
    assert refusal(capsys, "--prot", "5") == f"--prot {nearest} --port"
    assert refusal(capsys, "--prot=5") == f"--prot {nearest} --port"
    assert refusal(capsys, "--max_context=5") == f"--max_context {nearest} --max-context"
    assert refusal(capsys, "--no-strct") == f"--no-strct {nearest} --strict"
    # An abbreviation would change its meaning with the next setting that begins so.
    assert refusal(capsys, "--slot=5") == f"--slot {nearest} --slots"
    assert refusal(capsys, "--strict", "true") == "'true' belongs to no flag"


def test_unknown_variables_are_refused_with_the_nearest(capsys):
    nearest = "is not a setting, the nearest is"
    for name in ("TANDEM_PROT", "TANDEM_PORTS"):
        assert refusal(capsys, environment={name: "5"}) == f"{name} {nearest} TANDEM_PORT"
    # A switch that turns off is a flag's: variables have values.
    said = refusal(capsys, environment={"TANDEM_NO_STRICT": "1"})
    assert said == f"TANDEM_NO_STRICT {nearest} TANDEM_STRICT"


def test_unknown_keys_are_refused_with_the_nearest(capsys, tmp_path):
    file = tmp_path / "tandem.toml"
    nearest = f"in {file} is not a setting, the nearest is"
    for line, unknown, meant in (
        ("prot = 5", "prot", "port"),
        ("max-context = 5", "max-context", "max_context"),
        ("[tls]\nkey = ''", "tls", "tls_key"),
        # A file that names a file would leave open which goes first.
        ("config = 'other.toml'", "config", "token_file"),
    ):
        file.write_text(line)
        assert refusal(capsys, f"--config={file}") == f"{unknown} {nearest} {meant} in {file}"


def test_everything_that_is_wrong_is_said_at_once(capsys, tmp_path):
    file = toml(tmp_path / "tandem.toml", slots=0, pages=0)
    environment = {"TANDEM_PAGES": "none", "TANDEM_DTYPE": "int8", "TANDEM_CONFIG": str(file)}
    assert refusal(capsys, "--port=x", "--prot=1", environment=environment).split("; ") == [
        "--prot is not a setting, the nearest is --port",
        "--port is 'x', must be a whole number",
        f"slots in {file} is 0, must be at least 1",
        "TANDEM_DTYPE is 'int8', must be 'float32' or 'bfloat16'",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"port = ", "Invalid value (at end of document)"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(content, reason, capsys, tmp_path):
    file = tmp_path / "tandem.toml"
    if content is not None:
        file.write_bytes(content)
    said = f"is '{file}', must be a TOML file: {reason}"
    assert refusal(capsys, f"--config={file}") == f"--config {said}"
    environment = {"TANDEM_CONFIG": str(file)}
    assert refusal(capsys, environment=environment) == f"TANDEM_CONFIG {said}"


def test_a_flag_without_its_value_is_refused(capsys):
    assert refusal(capsys, "--port") == "argument --port: expected one argument"


def test_home_is_expanded_where_no_shell_does_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    toml(tmp_path / "tandem.toml", token_file="~/tokens")
    (tmp_path / "tokens").touch()
    config = parse_config([], {"TANDEM_CONFIG": "~/tandem.toml"})
    assert config.token_file == tmp_path / "tokens"
    assert config.compilation_cache == tmp_path / ".cache/tandem/xla"
    nobody = "~nobody-has-this-name/file"
    assert (
        refusal(capsys, f"--token-file={nobody}")
        == f"--token-file is '{nobody}', and no home directory is known"
    )
    said = refusal(capsys, f"--config={nobody}")
    assert said.startswith(f"--config is '{nobody}', must be a TOML file: Could not determine home")


SERVICE_LINKS = {
    "TANDEM_SERVICE_HOST": "10.0.0.1",
    "TANDEM_SERVICE_PORT": "50051",
    "TANDEM_SERVICE_PORT_GRPC": "50051",
    "TANDEM_PORT": "tcp://10.0.0.1:50051",
    "TANDEM_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "TANDEM_PORT_50051_TCP_ADDR": "10.0.0.1",
    "TANDEM_METRICS_SERVICE_HOST": "10.0.0.2",
    "TANDEM_METRICS_SERVICE_PORT": "9090",
    "TANDEM_METRICS_PORT": "tcp://10.0.0.2:9090",
}


def test_what_kubernetes_tells_of_services_is_no_setting(capsys):
    assert parse_config([], SERVICE_LINKS) == ServerConfig()
    ports = {"TANDEM_PORT": "5", "TANDEM_METRICS_PORT": "6"}
    assert parse_config([], SERVICE_LINKS | ports) == ServerConfig(port=5, metrics_port=6)
    for name, value in SERVICE_LINKS.items():
        assert refusal(capsys, environment={name: value}).startswith(f"{name} is ")


def test_settings_of_tls_come_together(capsys, others):
    given = {name: flag(name, others[name]) for name in FILES}
    certificate, key, client_ca = (given[name] for name in FILES[:3])
    assert parse_config([certificate, key], {}).tls_key == others["tls_key"]
    assert parse_config([certificate, key, client_ca], {}).tls_client_ca == others["tls_client_ca"]
    assert refusal(capsys, certificate) == "tls_key is not set, must be with tls_certificate"
    assert refusal(capsys, key) == "tls_certificate is not set, must be with tls_key"
    no_tls = "tls_certificate and tls_key are not set, must be with tls_client_ca"
    assert refusal(capsys, client_ca) == no_tls
    assert refusal(capsys, certificate, client_ca).split("; ") == [
        "tls_key is not set, must be with tls_certificate",
        no_tls,
    ]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "::1"])
def test_tokens_may_travel_in_the_clear_inside_a_machine(host, others):
    assert ServerConfig(host=host, token_file=others["token_file"]).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "localhost.example.org"])
def test_tokens_must_not_travel_in_the_clear_between_machines(host, others, capsys):
    flags = [flag("host", host), flag("token_file", others["token_file"])]
    assert refusal(capsys, *flags) == (
        f"host is '{host}', where the tokens of token_file would travel in the clear: "
        "tls_certificate and tls_key, or allow_insecure_tokens, must be set"
    )
    tls = [flag(name, others[name]) for name in ("tls_certificate", "tls_key")]
    assert parse_config([*flags, *tls], {}).host == host
    assert parse_config([*flags, "--allow-insecure-tokens"], {}).host == host


@pytest.mark.parametrize(
    "url", ["http://collector:4317", "https://[::1]:4317", "http://10.0.0.1/v1/traces"]
)
def test_a_collector_has_a_url(url):
    assert ServerConfig(otlp_endpoint=url).otlp_endpoint == url


def test_passwords_in_a_url_are_refused_and_not_shown(capsys):
    said = refusal(capsys, "--otlp-endpoint=https://user:word@collector")
    assert said == "--otlp-endpoint has a user name or password, must have none"


def test_effective_settings_are_plain_json_without_secrets(others):
    settings = effective(ServerConfig(**others))
    assert settings["token_file"] == str(others["token_file"])
    assert settings["max_connection_age_seconds"] == 0.25
    assert settings["strict"] is True
    assert effective(ServerConfig())["pages"] is None
    assert "secret" not in json.dumps(settings)
    assert json.loads(json.dumps(settings)) == settings


@pytest.fixture
def help_text(monkeypatch, capsys) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help"], {"TANDEM_PROT": "help is there when settings are wrong, too"})
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_explains_every_setting(help_text):
    words = " ".join(help_text.split())
    for name, field in ServerConfig.model_fields.items():
        assert field.description and field.description.endswith(".")
        names = f"{flag(name, True)}, {flag(name, False)}" if field.annotation is bool else ""
        assert f"{names or flag(name, '')[:-1]} " in words
        assert f"{field.description} [default: " in words
        assert f", {variable(name)}]" in words
    assert "--config FILE TOML file with settings. [default: none, TANDEM_CONFIG]" in words


def test_help_shows_groups_choices_and_defaults(help_text):
    titles = [line[:-1] for line in help_text.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == ["options", *GROUPS.values()]
    assert titles[1:] == [
        *("serving", "model shape", "speculation", "queue", "security", "telemetry", "life cycle")
    ]
    words = " ".join(help_text.split())
    assert (
        "speculation: --draft-length VALUE Draft tokens per round; 0 turns drafting off. "
        "[default: 3, TANDEM_DRAFT_LENGTH] --adaptive-drafts, --no-adaptive-drafts Draft fewer "
        "tokens, up to the default cap, while more do not pay. "
        "[default: on, TANDEM_ADAPTIVE_DRAFTS] --strict, --no-strict "
    ) in words
    assert "--dtype {float32,bfloat16} " in words
    assert "[default: ~/.cache/tandem/xla, TANDEM_COMPILATION_CACHE]" in words
    assert "[default: none, TANDEM_PAGES]" in words
    assert "[default: off, TANDEM_STRICT]" in words


def test_help_is_shown_as_it_is_written(capsys):
    share = pydantic.create_model("Shares", share=(int, pydantic.Field(7, description="7% of 8.")))
    with pytest.raises(SystemExit):
        read_settings(share, {}, ["--help"], {})
    assert "7% of 8. [default: 7, TANDEM_SHARE]" in " ".join(capsys.readouterr().out.split())


def test_the_command_refuses_and_helps_without_loading_jax():
    root = str(Path(__file__).parents[2])
    script = (
        "import runpy, sys; sys.argv = ['service', {}]\ntry: runpy.run_module('service', None, "
    )
    script += "'__main__')\nfinally: print('jax' in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    for argument, code in (("--help", 0), ("--port=x", 2)):
        ended = subprocess.run(
            [sys.executable, "-c", script.format(repr(argument))],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code
        assert ended.stdout.endswith("False\n")
        assert "Traceback" not in ended.stderr

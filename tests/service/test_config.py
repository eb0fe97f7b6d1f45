"""The command line: every setting has a flag, a default and bounds."""

import dataclasses

import pytest

from service.config import DEMO_CHECKPOINT, ServerConfig, parse_config


def test_the_embedded_checkpoint_is_the_default():
    assert ServerConfig().checkpoint == DEMO_CHECKPOINT
    assert DEMO_CHECKPOINT.parts[-2:] == ("model", "demo")


def test_every_setting_has_a_flag(checkpoint):
    given = ServerConfig(
        checkpoint=checkpoint,
        host="0.0.0.0",
        port=0,
        slots=1,
        max_context=2,
        page_size=3,
        pages=4,
        draft_length=0,
        rounds_per_call=5,
        prefill_chunk=6,
        dtype="bfloat16",
        adaptive_drafts=False,
        strict=True,
        max_waiting_requests=7,
        grace_seconds=0.5,
        log_level="ERROR",
    )
    settings = dataclasses.asdict(given)
    assert all(
        settings[name] != value for name, value in dataclasses.asdict(ServerConfig()).items()
    )
    flags = [flag(name.replace("_", "-"), value) for name, value in settings.items()]
    assert parse_config(flags) == given


def flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [
        ("--port=65536", "65536 is not in [0, 65535]"),
        ("--slots=0", "0 is not in [1, 2147483647]"),
        ("--slots=many", "'many' is not an integer"),
        ("--max-context=1", "1 is not in [2, 2147483647]"),
        ("--draft-length=-1", "-1 is not in [0, 2147483647]"),
        ("--grace-seconds=nan", "nan is not a number of seconds from 0 on"),
        ("--dtype=int8", "invalid choice: 'int8'"),
        ("--checkpoint=/nowhere", "/nowhere is not a directory"),
    ],
)
def test_a_bad_flag_is_named_with_its_bounds(flag, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config([flag])
    assert ended.value.code == 2
    assert f"argument {flag.partition('=')[0]}: {complaint}" in capsys.readouterr().err

"""The contract is clean, and what is generated from it is what is committed."""

import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2

from service.reflection import DESCRIPTOR_SET

ROOT = Path(__file__).resolve().parents[2]
PB = ROOT / "service" / "pb"


def test_buf_lint_is_clean():
    buf = Path(sys.executable).with_name("buf")
    lint = subprocess.run(
        [buf, "lint", ROOT / "proto"], capture_output=True, text=True, check=False
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")


def test_buf_format_changes_nothing():
    buf = Path(sys.executable).with_name("buf")
    command = [buf, "format", "--diff", "--exit-code", ROOT / "proto"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_stubs_are_current(tmp_path):
    command = [sys.executable, ROOT / "tools" / "gen_protos.py", tmp_path]
    subprocess.run(command, check=True)
    fresh = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in PB.iterdir() if path.is_file()}
    stale = sorted(n for n in fresh | committed if fresh.get(n) != committed.get(n))
    assert stale == [], "run tools/gen_protos.py"


def test_scalars_that_change_behaviour_are_optional():
    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes()).file
    knobs = {"Sampling", "Stopping", "Speculation", "Include", "UpdateSpeculationRequest"}
    messages = [m for file in files for m in file.message_type if m.name in knobs]
    assert {message.name for message in messages} == knobs
    for message in messages:
        for field in message.field:
            repeated = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
            assert repeated or field.proto3_optional, f"{message.name}.{field.name}"


def test_counts_are_32_bit_so_that_json_shows_numbers():
    wide = {
        getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name}")
        for name in ("INT64", "UINT64", "SINT64", "FIXED64", "SFIXED64")
    }
    files = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes()).file
    ours = [file for file in files if file.package == "tandem.v1"]
    assert len(ours) == 4
    found = [f.name for file in ours for m in file.message_type for f in m.field if f.type in wide]
    assert found == []

"""TLS and client certificates over a real server, and what keeps a server from starting."""

import asyncio
import contextlib
import datetime
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from live_server import LiveServer, failure_of, live_server
from service.config import ServerConfig
from service.pb import model_pb2, model_pb2_grpc
from service.security.tls import server_credentials

ROOT = Path(__file__).resolve().parents[2]
NAME = "127.0.0.1"
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def another_authority() -> trustme.CA:
    return trustme.CA()


def write(path: Path, content: bytes) -> Path:
    """Replaces a file as certificate managers do: at once, never half written."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)
    return path


def write_pair(directory: Path, certificate: trustme.LeafCert) -> dict[str, Any]:
    """The settings of a server that has this certificate."""
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    return {
        "tls_certificate": write(directory / "server.pem", chain),
        "tls_key": write(directory / "server.key", certificate.private_key_pem.bytes()),
    }


def write_authority(directory: Path, authority: trustme.CA) -> dict[str, Any]:
    return {"tls_client_ca": write(directory / "clients.pem", authority.cert_pem.bytes())}


@contextlib.asynccontextmanager
async def secure_channel(live: LiveServer, roots: trustme.CA, client: trustme.LeafCert | None):
    key = client and client.private_key_pem.bytes()
    chain = client and b"".join(blob.bytes() for blob in client.cert_chain_pems)
    credentials = grpc.ssl_channel_credentials(roots.cert_pem.bytes(), key, chain)
    async with grpc.aio.secure_channel(live.target, credentials) as channel:
        yield channel


def get_model(channel: grpc.aio.Channel):
    return model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())


async def outcome(
    live: LiveServer, roots: trustme.CA, client: trustme.LeafCert | None = None
) -> grpc.StatusCode:
    """How a call over a new connection ends."""
    async with secure_channel(live, roots, client) as channel:
        call = get_model(channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call
        return await call.code()


async def test_clients_with_the_right_a_wrong_and_no_certificate(
    checkpoint, tmp_path, authority, another_authority, capfd
):
    """Case 61. The reasons are in the log: gRPC writes them to stderr."""
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    settings |= write_authority(tmp_path, authority)
    async with live_server(checkpoint, **settings) as live:
        right = authority.issue_cert("client@example.org")
        wrong = another_authority.issue_cert("client@example.org")
        assert await outcome(live, authority, right) is grpc.StatusCode.OK
        assert "Handshake failed" not in capfd.readouterr().err
        assert await outcome(live, authority, wrong) is grpc.StatusCode.UNAVAILABLE
        assert "CERTIFICATE_VERIFY_FAILED" in capfd.readouterr().err
        assert await outcome(live, authority, None) is grpc.StatusCode.UNAVAILABLE
        assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in capfd.readouterr().err
        assert await outcome(live, authority, right) is grpc.StatusCode.OK


async def test_without_client_certificates(checkpoint, tmp_path, authority, another_authority):
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    async with live_server(checkpoint, **settings) as live:
        assert await outcome(live, authority) is grpc.StatusCode.OK
        assert await outcome(live, another_authority) is grpc.StatusCode.UNAVAILABLE
        plain = await failure_of(get_model(live.channel))
        assert plain.code is grpc.StatusCode.UNAVAILABLE
        assert await outcome(live, authority) is grpc.StatusCode.OK


@pytest.mark.parametrize("client", [False, True], ids=["certificate", "client ca"])
async def test_peers_agree_on_http2(checkpoint, tmp_path, authority, client):
    """Case 61: peers that are told no protocol by ALPN give up."""
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    settings |= write_authority(tmp_path, authority) if client else {}
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client:
        authority.issue_cert("client@example.org").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    async with live_server(checkpoint, **settings) as live:
        host, port = live.target.split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        agreed = writer.get_extra_info("ssl_object")
        assert agreed.selected_alpn_protocol() == "h2"
        assert agreed.version() == "TLSv1.3"
        writer.transport.abort()


async def test_a_replaced_certificate_is_in_force_for_new_connections(
    checkpoint, tmp_path, authority, another_authority
):
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    async with live_server(checkpoint, **settings) as live:
        async with secure_channel(live, authority, None) as open_channel:
            await get_model(open_channel)
            write_pair(tmp_path, another_authority.issue_cert(NAME))
            assert await outcome(live, another_authority) is grpc.StatusCode.OK
            assert await outcome(live, authority) is grpc.StatusCode.UNAVAILABLE
            await get_model(open_channel)
        write_pair(tmp_path, authority.issue_cert(NAME))
        assert await outcome(live, authority) is grpc.StatusCode.OK


async def test_replaced_client_authorities_are_in_force_for_new_connections(
    checkpoint, tmp_path, authority, another_authority
):
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    settings |= write_authority(tmp_path, authority)
    client = authority.issue_cert("client@example.org")
    other_client = another_authority.issue_cert("client@example.org")
    async with live_server(checkpoint, **settings) as live:
        assert await outcome(live, authority, client) is grpc.StatusCode.OK
        assert await outcome(live, authority, other_client) is grpc.StatusCode.UNAVAILABLE
        write_authority(tmp_path, another_authority)
        assert await outcome(live, authority, other_client) is grpc.StatusCode.OK
        assert await outcome(live, authority, client) is grpc.StatusCode.UNAVAILABLE


async def test_files_that_will_not_do_leave_the_old_ones_in_force(
    checkpoint, tmp_path, authority, another_authority, caplog
):
    caplog.set_level("INFO", logger="service.security")
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    certificate, key = settings["tls_certificate"], settings["tls_key"]
    fresh = another_authority.issue_cert(NAME)
    chain = b"".join(blob.bytes() for blob in fresh.cert_chain_pems)
    async with live_server(checkpoint, **settings) as live:
        reasons = []
        for path, content in ((certificate, chain), (certificate, b"oops"), (key, b"oops")):
            write(path, content)
            for _ in range(2):
                assert await outcome(live, authority) is grpc.StatusCode.OK
            reasons.append(caplog.messages)
            caplog.clear()
        certificate.unlink()
        assert await outcome(live, authority) is grpc.StatusCode.OK
        kept = "not reloaded, the old one stays in force: "
        assert [*reasons, caplog.messages] == [
            [f"{kept}tls_key {key}: does not belong to tls_certificate {certificate}"],
            [f"{kept}tls_certificate {certificate}: holds no certificate in PEM"],
            [],  # the same reason again
            [f"{kept}tls_certificate {certificate}: No such file or directory"],
        ]
        caplog.clear()
        write_pair(tmp_path, fresh)
        assert await outcome(live, another_authority) is grpc.StatusCode.OK
        assert caplog.messages == [f"reloaded: {certificate}, {key}"]


def expired(authority: trustme.CA) -> trustme.LeafCert:
    now = datetime.datetime.now()
    return authority.issue_cert(NAME, not_before=now - 9 * DAY, not_after=now - DAY)


def from_tomorrow(authority: trustme.CA) -> trustme.LeafCert:
    now = datetime.datetime.now()
    return authority.issue_cert(NAME, not_before=now + DAY, not_after=now + 9 * DAY)


@pytest.mark.parametrize(
    ("issue", "reason"),
    [(expired, "certificate has expired"), (from_tomorrow, "certificate is not yet valid")],
)
def test_a_certificate_that_is_not_valid_now(tmp_path, authority, issue, reason):
    config = ServerConfig(**write_pair(tmp_path, issue(authority)))
    with pytest.raises(ValueError) as failure:
        server_credentials(config)
    assert str(failure.value) == f"tls_certificate {config.tls_certificate}: {reason}"


def encrypted(certificate: trustme.LeafCert) -> bytes:
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


@pytest.mark.parametrize(
    ("setting", "content", "reason"),
    [
        ("tls_certificate", b"", "holds no certificate in PEM"),
        ("tls_certificate", bytes(range(256)), "holds no certificate in PEM"),
        ("tls_key", b"", "holds no private key in PEM"),
        ("tls_key", "another", "does not belong to tls_certificate {tls_certificate}"),
        ("tls_client_ca", b"", "holds no certificate in PEM"),
        ("tls_client_ca", "leaf", "holds no certificate of an authority"),
        ("tls_client_ca", None, "No such file or directory"),
        ("tls_certificate", None, "No such file or directory"),
        ("tls_key", None, "No such file or directory"),
    ],
)
def test_files_that_will_not_do(tmp_path, authority, setting, content, reason):
    leaf = authority.issue_cert(NAME)
    contents = {"another": leaf.private_key_pem.bytes(), "leaf": leaf.cert_chain_pems[0].bytes()}
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    settings |= write_authority(tmp_path, authority)
    config = ServerConfig(**settings)
    assert server_credentials(config) is not None
    path = settings[setting]
    path.unlink() if content is None else write(path, contents.get(content, content))
    with pytest.raises(ValueError) as failure:
        server_credentials(config)
    assert str(failure.value) == f"{setting} {path}: {reason.format_map(settings)}"


def test_an_encrypted_key_does_not_ask_for_its_password(tmp_path, authority):
    settings = write_pair(tmp_path, authority.issue_cert(NAME))
    write(settings["tls_key"], encrypted(authority.issue_cert(NAME)))
    with pytest.raises(ValueError, match=f"^tls_key {settings['tls_key']}: is encrypted"):
        server_credentials(ServerConfig(**settings))


def test_a_server_that_cannot_give_tls_does_not_start(tmp_path, authority):
    settings = write_pair(tmp_path, expired(authority))
    certificate, key = settings["tls_certificate"], settings["tls_key"]
    command = [sys.executable, "-m", "service", "--port", "0"]
    process = subprocess.run(
        [*command, "--tls-certificate", certificate, "--tls-key", key],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert process.returncode == 1
    assert "listening" not in process.stdout
    assert f"tls_certificate {certificate}: certificate has expired" in process.stderr


def test_no_tls_is_asked_for():
    assert server_credentials(ServerConfig()) is None

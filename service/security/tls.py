"""TLS of the listening port: certificates from files that may be replaced while it serves."""

import ssl
import time
from pathlib import Path

import grpc

from service.config import ServerConfig
from service.security.reloading import ReloadedFiles, read_file

HANDSHAKE_STEPS = 8
"""More than two sides need to agree, or to fail to."""


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Returns what the port is opened with; None when no TLS is asked for.

    New connections get the certificate that is on disk at that time, and are checked against the
    certificate authorities that are; open ones go on with theirs.

    Raises:
      ValueError: TLS that is asked for cannot be given; names setting, file and reason.
    """
    certificate, key = config.tls_certificate, config.tls_key
    client_ca = config.tls_client_ca
    if certificate is None or key is None:  # the configuration has both, or none of the three
        return None

    def load() -> grpc.ServerCertificateConfiguration:
        return certificate_configuration(certificate, key, client_ca)

    paths = [path for path in (certificate, key, client_ca) if path is not None]
    files = ReloadedFiles(paths, load)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake, by a thread of gRPC; None: nothing is new."""
        return files.value if files.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        files.value,
        fetch,  # pyright: ignore[reportArgumentType]: its type leaves out the None of its documentation
        require_client_authentication=client_ca is not None,
    )


def certificate_configuration(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCertificateConfiguration:
    """Reads and checks the files.

    Args:
      certificate: PEM, the server's certificate first, then those that lead to its authority.
      key: PEM, the private key of the first certificate, not encrypted.
      client_ca: PEM, the authorities that sign clients' certificates; None: any client may connect.

    Raises:
      ValueError: one of them will not do; names setting, file and reason.
    """
    chain, private_key = read_file("tls_certificate", certificate), read_file("tls_key", key)
    check_certificate(certificate, chain, key)
    roots = None
    if client_ca is not None:
        roots = read_file("tls_client_ca", client_ca)
        check_authorities(client_ca, roots)
    return grpc.ssl_server_certificate_configuration([(private_key, chain)], roots)


def check_certificate(certificate: Path, chain: bytes, key: Path) -> None:
    """Checks that a server can use a certificate now, and with this key, by a handshake in memory.

    Raises:
      ValueError: it cannot; names setting, file and reason.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Its own authority, so that what is checked is the certificate alone.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust("tls_certificate", certificate, chain, client)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def refuse_password() -> str:
        raise ValueError(f"tls_key {key}: is encrypted, must not be")

    try:
        server.load_cert_chain(certificate, key, refuse_password)
    except ssl.SSLError as error:
        reason = error.reason or "holds no private key in PEM"
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"does not belong to tls_certificate {certificate}"
        raise ValueError(f"tls_key {key}: {reason}") from None
    try:
        shake_hands(client, server)
    except ssl.SSLError as error:
        refused = isinstance(error, ssl.SSLCertVerificationError)
        reason = error.verify_message if refused else error.reason
        raise ValueError(f"tls_certificate {certificate}: {reason}") from None


def check_authorities(client_ca: Path, roots: bytes) -> None:
    """Checks that a file holds certificates of authorities, one of them at least not expired.

    Raises:
      ValueError: it does not; names setting, file and reason.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust("tls_client_ca", client_ca, roots, context)
    authorities = context.get_ca_certs()
    if not authorities:
        raise ValueError(f"tls_client_ca {client_ca}: holds no certificate of an authority")
    ends = [str(authority["notAfter"]) for authority in authorities]
    if max(map(ssl.cert_time_to_seconds, ends)) < time.time():
        raise ValueError(f"tls_client_ca {client_ca}: has expired on {', '.join(ends)}")


def trust(setting: str, path: Path, pem: bytes, context: ssl.SSLContext) -> None:
    """Adds certificates to those that a context trusts.

    Raises:
      ValueError: they are not PEM; names setting, file and reason.
    """
    try:
        # Comments between certificates may be in any encoding.
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{setting} {path}: holds no certificate in PEM") from None


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Lets two contexts agree in memory.

    Raises:
      ssl.SSLError: they do not.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for step in range(HANDSHAKE_STEPS):
        try:
            sides[step % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue

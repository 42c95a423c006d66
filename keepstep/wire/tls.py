"""Mutual TLS from the user's three files: contexts for both ends, and what went wrong, in one line.

Both ends show a certificate of the same authority. A controller is named by its user, so its name is checked;
nodes are known by address and token, so between them the authority alone counts. It opens no socket.
"""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.errors import UsageError

# OpenSSL's numbers (X509_V_ERR_*) for what is wrong with the certificate that a peer shows.
_NOT_YET_VALID, _EXPIRED = 9, 10
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_OTHER_NAME = (62, 63, 64)

# Reasons by which the other end ends a handshake; TLS 1.3 tells a client only with its first answer.
_ALERTS = {
    "TLSV1_ALERT_UNKNOWN_CA": "does not accept our certificate: another authority signed it",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "does not accept our certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "does not accept our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "does not accept our certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "wants a certificate: give --tls-cert, --tls-key and --tls-ca",
    "WRONG_VERSION_NUMBER": "does not speak TLS: start it with --tls-cert, --tls-key and --tls-ca too",
    "HTTP_REQUEST": "does not speak TLS: start it with --tls-cert, --tls-key and --tls-ca too",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files: this end's certificate (with its chain), its key, the authority's certificate."""

    cert: str
    key: str
    ca: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
        """What an agent told its worker; None when connections are plain."""
        found = [
            environ.get(name, "") for name in ("KEEPSTEP_TLS_CERT", "KEEPSTEP_TLS_KEY", "KEEPSTEP_TLS_CA")
        ]
        return cls(cert=found[0], key=found[1], ca=found[2]) if all(found) else None

    def environment(self) -> dict[str, str]:
        """The same as variables, for workers."""
        return {"KEEPSTEP_TLS_CERT": self.cert, "KEEPSTEP_TLS_KEY": self.key, "KEEPSTEP_TLS_CA": self.ca}

    def server(self) -> ssl.SSLContext:
        """For a listener: whoever connects must show a certificate. Raises UsageError."""
        return _context(self, ssl.PROTOCOL_TLS_SERVER, False)

    def client(self, *, by_name: bool = False) -> ssl.SSLContext:
        """For a connection. `by_name`: the other end's certificate must be for the host. Raises UsageError."""
        return _context(self, ssl.PROTOCOL_TLS_CLIENT, by_name)


def check_files(files: TlsFiles) -> None:
    """Shake hands with ourselves: what is wrong with our own certificate is best said here. Raises UsageError."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = files.client().wrap_bio(here, there)
    server = files.server().wrap_bio(there, here, server_side=True)
    try:
        for _ in range(4):
            for end in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise UsageError(f"--tls-cert {files.cert} has expired") from None
        if error.verify_code in _UNKNOWN_AUTHORITY:
            raise UsageError(
                f"--tls-cert {files.cert} is not signed by the authority in --tls-ca {files.ca}"
            ) from None
        raise UsageError(f"--tls-cert {files.cert} cannot be used: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise UsageError(f"--tls-cert {files.cert} cannot be used: {error.reason or error}") from None


# Files are read once per process: a rotated certificate counts from the next start on.
@functools.lru_cache(maxsize=16)
def _context(files: TlsFiles, protocol: int, by_name: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = by_name
    context.verify_mode = ssl.CERT_REQUIRED
    for flag, path in (("--tls-cert", files.cert), ("--tls-key", files.key), ("--tls-ca", files.ca)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from None
    try:
        context.load_verify_locations(cafile=files.ca)
    except ssl.SSLError:
        raise UsageError(f"--tls-ca {files.ca} holds no certificate in PEM form") from None
    try:
        # An encrypted key must not ask on somebody's terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except ssl.SSLError as error:
        wrong = {
            "KEY_VALUES_MISMATCH": f"--tls-key {files.key} does not belong to --tls-cert {files.cert}",
            "NO_START_LINE": f"--tls-cert {files.cert} or --tls-key {files.key} is not in PEM form",
        }
        text = f"--tls-cert {files.cert} and --tls-key {files.key} cannot be used ({error.reason or error})"
        raise UsageError(wrong.get(error.reason or "", text)) from None
    return context


def await_objection(sock: ssl.SSLSocket, wait_s: float = 0.3) -> None:
    """Give the other end time to object to our certificate, where it is not the one who speaks first.

    In TLS 1.3 a client's handshake ends before its certificate was looked at; what it writes then may turn
    the objection into a mere reset. Raises OSError (see `explain`) when it comes.
    """
    before_s = sock.gettimeout()
    sock.settimeout(wait_s)
    try:
        sock.recv(1)
        raise ConnectionResetError("closed the connection after the handshake")
    except TimeoutError:
        sock.settimeout(before_s)


def explain(error: OSError, whom: str) -> str | None:
    """Why a TLS connection to `whom` came to nothing, in one line; None when TLS is not the cause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code == _EXPIRED:
            return f"the certificate of {whom} has expired"
        if code == _NOT_YET_VALID:
            return f"the certificate of {whom} is not valid yet (do the clocks agree?)"
        if code in _UNKNOWN_AUTHORITY:
            return f"the certificate of {whom} is not signed by the authority in --tls-ca"
        if code in _OTHER_NAME or "ostname mismatch" in str(error) or "IP address mismatch" in str(error):
            return f"the certificate of {whom} is for another host ({error.verify_message.rstrip('.')})"
        return f"the certificate of {whom} is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        return f"{whom} {_ALERTS.get(reason, f'cannot be spoken to over TLS ({reason or error})')}"
    return None

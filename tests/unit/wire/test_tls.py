"""TLS by the user's files: both ends show a certificate, and each way to fail is one line that says which."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import threading
from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep.wire.tls import TlsFiles, await_objection, check_files, explain
from tests.certificates import Authority


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "own")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "foreign", "somebody else")


def talk(
    server: TlsFiles | None, client: TlsFiles | None, *, host: str = "127.0.0.1", by_name: bool = True
) -> str:
    """One echo between two real sockets. Returns "ok", or what the client says went wrong."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            sock.settimeout(10)
            try:
                if server is not None:
                    sock = server.server().wrap_socket(sock, server_side=True)
                sock.sendall(sock.recv(100) if server is not None else b"HTTP/1.1 400 what?\r\n\r\n")
            except OSError:
                pass
            finally:
                sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=10) as plain:
                try:
                    context = client.client(by_name=by_name) if client else ssl._create_unverified_context()
                    with context.wrap_socket(plain, server_hostname=host) as sock:
                        await_objection(sock)
                        sock.sendall(b"hello")
                        answer = sock.recv(100)
                        return "ok" if answer == b"hello" else f"closed: {answer!r}"
                except OSError as error:
                    return explain(error, "the controller") or f"not of TLS: {error!r}"
        finally:
            thread.join(10)


def test_both_ends_with_certificates_of_one_authority_talk(own: Authority) -> None:
    assert talk(own.issue("server"), own.issue("client", ["elsewhere"])) == "ok"


def test_each_wrong_certificate_is_named(own: Authority, foreign: Authority) -> None:
    client = own.issue("client2")
    assert "not signed by the authority in --tls-ca" in talk(foreign.issue("server"), client)
    assert "certificate of the controller has expired" in talk(own.issue("old", expired=True), client)
    named = own.issue("named", ["node7.example"])
    assert "is for another host" in talk(named, client)
    assert talk(named, client, by_name=False) == "ok"  # between nodes the authority and the token count
    mixed = dataclasses.replace(foreign.issue("client"), ca=str(own.certificate))
    assert "does not accept our certificate" in talk(own.issue("server3"), mixed)
    expired = own.issue("client3", expired=True)
    assert "does not accept our certificate: it has expired" in talk(own.issue("server4"), expired)
    assert "wants a certificate" in talk(own.issue("server5"), None)
    assert "does not speak TLS" in talk(None, client)


def test_files_that_cannot_serve_are_one_line(own: Authority, tmp_path: Path) -> None:
    good, other = own.issue("good"), own.issue("other")
    with pytest.raises(UsageError, match="does not belong to --tls-cert"):
        dataclasses.replace(good, key=other.key).server()
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(UsageError, match="holds no certificate in PEM form"):
        dataclasses.replace(good, ca=str(tmp_path / "text")).client()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        dataclasses.replace(good, key=str(tmp_path / "none")).client()


def test_what_is_wrong_with_ones_own_certificate_is_found_before_anything_is_connected(
    own: Authority, foreign: Authority
) -> None:
    check_files(own.issue("mine", ["anything"]))
    with pytest.raises(UsageError, match=r"--tls-cert .*old2.pem has expired"):
        check_files(own.issue("old2", expired=True))
    mixed = dataclasses.replace(foreign.issue("theirs"), ca=str(own.certificate))
    with pytest.raises(UsageError, match=r"theirs.pem is not signed by the authority in --tls-ca"):
        check_files(mixed)


def test_workers_hear_of_the_files_by_their_environment(own: Authority) -> None:
    files = own.issue("worker")
    assert TlsFiles.from_environment(files.environment()) == files
    assert TlsFiles.from_environment({"KEEPSTEP_TLS_CERT": "a"}) is None

"""Certificates for tests, by the openssl command: an authority, and what it signs for a host or an address."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from keepstep.wire.tls import TlsFiles

_CONFIG = """
[ca]
default_ca = own
[own]
database = {folder}/index.txt
new_certs_dir = {folder}
serial = {folder}/serial
certificate = {folder}/ca.pem
private_key = {folder}/ca.key
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
[any]
commonName = supplied
"""
# Elliptic curves: a key in milliseconds.
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """One certificate authority in a folder of its own."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates need the openssl command")
        folder.mkdir(parents=True)
        self.folder, self.certificate = folder, folder / "ca.pem"
        (folder / "index.txt").touch()
        (folder / "serial").write_text("01\n")
        (folder / "ca.cnf").write_text(_CONFIG.format(folder=folder))
        self._openssl(
            "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", f"/CN={name}"
        )

    def issue(
        self, name: str, hosts: Sequence[str] = ("127.0.0.1", "localhost"), *, expired: bool = False
    ) -> TlsFiles:
        """A certificate for these hosts (names or addresses), with its key."""
        kinds = [
            f"{'IP' if host.replace('.', '').isdigit() or ':' in host else 'DNS'}:{host}" for host in hosts
        ]
        alternatives = f"subjectAltName={','.join(kinds)}"
        self._openssl(
            "req",
            "-new",
            *_KEY,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
            "-addext",
            alternatives,
        )
        now = datetime.datetime.now(datetime.UTC)
        begin, end = (-3, -1) if expired else (-1, 2)
        dates = [f"{now + datetime.timedelta(days=days):%y%m%d%H%M%SZ}" for days in (begin, end)]
        self._openssl(
            "ca",
            "-batch",
            "-config",
            "ca.cnf",
            "-in",
            f"{name}.csr",
            "-out",
            f"{name}.pem",
            "-notext",
            "-startdate",
            dates[0],
            "-enddate",
            dates[1],
        )
        folder = self.folder
        return TlsFiles(
            cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"), ca=str(self.certificate)
        )

    def _openssl(self, *words: str) -> None:
        done = subprocess.run(
            ["openssl", *words], cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

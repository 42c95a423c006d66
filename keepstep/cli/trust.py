"""Who may take part in a job: the token and the certificates that the user gave, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.cli.tokens import find_token
from keepstep.errors import UsageError
from keepstep.wire.tls import TlsFiles, check_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """`token`: None when none was given. `tls`: None when connections are plain."""

    token: str | None
    tls: TlsFiles | None

    def __repr__(self) -> str:
        return f"Trust(token={'given' if self.token else None}, tls={self.tls})"


def choose_trust(
    given: Mapping[str, str | None], settings: Mapping[str, Any], environ: MutableMapping[str, str]
) -> Trust:
    """Read and check them. Raises UsageError."""
    token = find_token(given.get("token_file"), settings["token_file"], environ)
    return Trust(token=token, tls=choose_tls(settings))


def choose_tls(settings: Mapping[str, Any]) -> TlsFiles | None:
    """All three files, or none: both ends of every connection show a certificate. Raises UsageError."""
    names = ("tls_cert", "tls_key", "tls_ca")
    missing = [name for name in names if settings[name] is None]
    if len(missing) == len(names):
        return None
    if missing:
        flag = "--" + missing[0].replace("_", "-")
        raise UsageError(f"{flag} is missing: TLS needs --tls-cert, --tls-key and --tls-ca together")
    # Workers may run in another directory.
    cert, key, ca = (str(Path(settings[name]).absolute()) for name in names)
    files = TlsFiles(cert=cert, key=key, ca=ca)
    check_files(files)
    return files

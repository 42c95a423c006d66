"""Where a job keeps what it leaves behind, and how a running job is found from another terminal.

Layout: ledger.sqlite, job.json (what a later controller needs), controller.json, token and token.read (until the
job has ended), logs/, reports/, evidence/.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import UsageError
from keepstep.wire.tls import TlsFiles

DEFAULT_PARENT = Path("keepstep-runs")
_PARTS = ("logs", "reports", "evidence")


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach the controller of a running job. `tls`: the files to show, None for plain connections."""

    url: str
    token: str
    pid: int
    job: str
    tls: TlsFiles | None = None


class RunDirectory:
    """Paths inside one run directory. Making it raises UsageError when it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def address_file(self) -> Path:
        return self.path / "controller.json"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def read_token_file(self) -> Path:
        return self.path / "token.read"

    def make(self) -> None:
        """Create the directory and its parts. Raises UsageError when it cannot be written."""
        try:
            for part in _PARTS:
                (self.path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write the log directory {self.path}: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write the log directory {self.path}: permission denied")

    def publish_address(
        self, url: str, job: str, token: str, read_token: str | None = None, tls: TlsFiles | None = None
    ) -> None:
        """Write controller.json and the tokens, all readable by their owner only. Raises OSError."""
        write_private(self.token_file, token)
        if read_token is not None:
            write_private(self.read_token_file, read_token)
        address = {"url": url, "job": job, "pid": os.getpid(), "token_file": self.token_file.name}
        if tls is not None:
            address["tls"] = {"cert": tls.cert, "key": tls.key, "ca": tls.ca}
        write_private(self.address_file, json.dumps(address, indent=2) + "\n")

    def withdraw_address(self) -> None:
        """Remove what publish_address wrote; nothing to remove is no error."""
        for file in (self.address_file, self.token_file, self.read_token_file):
            file.unlink(missing_ok=True)

    def address(self) -> Address | None:
        """The running controller's address; None when no controller of this run is alive."""
        try:
            raw: Any = json.loads(self.address_file.read_text())
            token = (self.path / raw["token_file"]).read_text().strip()
            tls = TlsFiles(**raw["tls"]) if "tls" in raw else None
            found = Address(
                url=str(raw["url"]), token=token, pid=int(raw["pid"]), job=str(raw["job"]), tls=tls
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if _alive(found.pid) else None


def new_token() -> str:
    """The secret that every connection of one job must show."""
    return secrets.token_urlsafe(32)


def newest_run(parent: Path = DEFAULT_PARENT) -> RunDirectory:
    """The run under `parent` whose ledger was begun last. Raises UsageError when there is none."""
    ledgers = sorted(parent.glob("*/ledger.sqlite"), key=lambda path: path.parent.stat().st_mtime)
    if not ledgers:
        raise UsageError(f"no run found under {parent}/: name the run directory (--run DIR)")
    return RunDirectory(ledgers[-1].parent)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and somebody else's
    return True


def write_private(path: Path, text: str) -> None:
    """Born with mode 0600 under another name, then renamed: never readable by others, never half written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

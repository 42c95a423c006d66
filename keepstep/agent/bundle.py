"""Evidence of one incident as a bounded archive: a node's own part, and the whole that people carry away.

What does not fit is left out by name. Everything in it was cleaned of secrets when it was written.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from keepstep.agent.logs import tail

MAX_FILE_BYTES = 2 << 20
MAX_NODE_BYTES = 24 << 20  # before compression
MAX_NODE_ARCHIVE_BYTES = 6 << 20
MAX_BUNDLE_BYTES = 512 << 20
_SAFE_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,127}")


def incident_folder(run_dir: Path, incident: int) -> Path:
    return run_dir / "evidence" / f"incident-{incident}"


def node_folder(run_dir: Path, incident: int, node: str) -> Path:
    """Where one node's part lies: run directories may be shared by all nodes."""
    return incident_folder(run_dir, incident) / node


def pack_node(run_dir: Path, incident: int, node: str) -> bytes:
    """One node's evidence, its suspects' and dead workers' folders included. Raises FileNotFoundError."""
    folder = node_folder(run_dir, incident, node)
    if not (folder / "node.json").is_file():
        raise FileNotFoundError(f"node {node} holds no evidence about incident {incident}")
    archive = Archive(MAX_NODE_BYTES, MAX_NODE_ARCHIVE_BYTES)
    for path, name in node_files(run_dir, folder):
        archive.add(name, tail(path, MAX_FILE_BYTES), path.stat().st_mtime)
    return archive.finish()


def node_files(run_dir: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """The files of a node's part and their names in an archive; the small and telling ones first."""
    own = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(own, key=lambda path: (path.suffix == ".tail", path)):
        yield path, str(path.relative_to(folder))
    for relative in _folders_told(folder / "node.json"):
        for path in sorted((run_dir / relative).glob("*")):
            if path.is_file() and not path.is_symlink():
                yield path, f"{Path(relative).name}/{path.name}"


def _folders_told(summary: Path) -> list[str]:
    try:
        folders: dict[str, list[str]] = json.loads(summary.read_text()).get("folders", {})
    except (OSError, ValueError):
        return []
    told = [name for names in folders.values() for name in names]
    return [name for name in told if re.fullmatch(r"evidence/worker-\d+-\d+", name)]


class Archive:
    """A .tar.gz in memory, or in a file, that never grows beyond its bounds."""

    def __init__(self, max_bytes: int, max_archive_bytes: int, out: Path | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_archive_bytes = max_archive_bytes
        self._bytes = 0
        self._target: Any = io.BytesIO() if out is None else out.open("wb")
        self._tar = tarfile.open(fileobj=self._target, mode="w:gz", compresslevel=6)  # noqa: SIM115 - closed by `finish`
        self.left_out: list[str] = []

    def add(self, name: str, data: bytes, modified_s: float | None = None) -> bool:
        """Add one file; False (and noted) when it does not fit any more."""
        # What gzip holds back is not counted yet: half of it is room enough, an archive of text shrinks.
        if (
            self._bytes + len(data) > self._max_bytes
            or self._target.tell() + len(data) // 2 > self._max_archive_bytes
        ):
            self.left_out.append(name)
            return False
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(data), 0o600
        entry.mtime = int(time.time() if modified_s is None else modified_s)
        self._tar.addfile(entry, io.BytesIO(data))
        self._bytes += len(data)
        return True

    def finish(self) -> bytes:
        """Close it; its bytes when it was made in memory."""
        if self.left_out:
            text = "These files did not fit:\n" + "\n".join(self.left_out[:10_000]) + "\n"
            entry = tarfile.TarInfo("LEFT_OUT.txt")
            entry.size, entry.mode, entry.mtime = len(text.encode()), 0o600, int(time.time())
            self._tar.addfile(entry, io.BytesIO(text.encode()))
        self._tar.close()
        data = self._target.getvalue() if isinstance(self._target, io.BytesIO) else b""
        self._target.close()
        return data


def unpack_node(archive: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Names, contents and times of a node's archive; only plain files with harmless names, bounded."""
    total = 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for entry in tar:
            parts = entry.name.split("/")
            if not entry.isreg() or len(parts) > 4 or not all(_SAFE_PART.fullmatch(part) for part in parts):
                continue
            total += entry.size
            file = tar.extractfile(entry)
            if total > 2 * MAX_NODE_BYTES or file is None:
                return
            yield entry.name, file.read(), float(entry.mtime)


def write_bundle(
    out: Path, top: str, summary: str, incident: dict[str, Any], parts: Iterable[tuple[str, bytes, float]]
) -> list[str]:
    """One archive for an incident: README.txt first, the ledger's words, then the nodes' files.

    Returns the names of what did not fit. Raises OSError.
    """
    archive = Archive(MAX_BUNDLE_BYTES, MAX_BUNDLE_BYTES, out)
    archive.add(f"{top}/README.txt", summary.encode())
    archive.add(f"{top}/incident.json", (json.dumps(incident, indent=1) + "\n").encode())
    for name, data, modified_s in parts:
        archive.add(f"{top}/{name}", data, modified_s)
    archive.finish()
    return archive.left_out

"""`keepstep incidents bundle`: every node's evidence about one incident in one archive.

While the job runs each node is asked through the controller, one after the other; what a node cannot give,
or a job that has ended, is taken from the run directory here. Nothing of a node is held in memory longer
than it takes to write it.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keepstep.agent import bundle
from keepstep.agent.redact import Redactor
from keepstep.cli.incident_view import story
from keepstep.cli.source import NoAnswer, fetch
from keepstep.controller.rundir import RunDirectory
from keepstep.errors import UsageError

MAX_NODE_ANSWER_BYTES = 32 << 20
NODE_TIMEOUT_S = 30.0


def make_bundle(run: RunDirectory, incident: Mapping[str, Any], out: Path) -> str:
    """Write the archive. Returns what to tell people; raises UsageError when it cannot be written."""
    number = int(incident["number"])
    collected = _Collected(run, incident)
    address = run.address()
    redactor = Redactor(*([address.token] if address else []))
    redactor.learn(os.environ)
    summary = redactor.clean_text(story(incident) + "\n")
    told_by_ledger = json.loads(redactor.clean_text(json.dumps(incident)))
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        left_out = bundle.write_bundle(
            draft, f"incident-{number}", summary, told_by_ledger, collected.parts()
        )
        os.chmod(draft, 0o600)
        draft.rename(out)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    told = [f"{out}: incident {number}, evidence from {_listed(collected.nodes)}"]
    told += [f"  without {node}: {why}" for node, why in collected.missing.items()]
    if left_out:
        told.append(f"  {len(left_out)} files did not fit (LEFT_OUT.txt names them)")
    return "\n".join(told)


class _Collected:
    """The nodes' parts, one after the other; notes who gave something and who did not."""

    def __init__(self, run: RunDirectory, incident: Mapping[str, Any]) -> None:
        self.nodes: list[str] = []
        self.missing: dict[str, str] = {}
        self._run = run
        self._number = int(incident["number"])
        told = (incident.get("gathered") or {}).get("nodes") or []
        here = bundle.incident_folder(run.path, self._number)
        local = [folder.name for folder in here.iterdir() if folder.is_dir()] if here.is_dir() else []
        self._asked = list(dict.fromkeys([*(str(node["node"]) for node in told), *sorted(local)]))

    def parts(self) -> Iterator[tuple[str, bytes, float]]:
        for node in self._asked:
            try:
                for name, data, modified_s in bundle.unpack_node(self._of_node(node)):
                    yield f"{node}/{name}", data, modified_s
                self.nodes.append(node)
            except (NoAnswer, OSError, tarfile.TarError, EOFError) as error:
                self.missing[node] = str(error)

    def _of_node(self, node: str) -> bytes:
        """From here when it lies here (one node, or a shared directory), else through the controller."""
        try:
            return bundle.pack_node(self._run.path, self._number, node)
        except FileNotFoundError:
            address = self._run.address()
            if address is None:
                raise
        path = f"/api/incidents/{self._number}/evidence/{quote(node, safe='')}"
        return fetch(address, path, MAX_NODE_ANSWER_BYTES, NODE_TIMEOUT_S)


def _listed(nodes: list[str]) -> str:
    if not nodes:
        return "no node (only what the ledger knows)"
    return ", ".join(nodes) if len(nodes) <= 8 else f"{len(nodes)} nodes"

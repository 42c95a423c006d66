"""Incidents as people read them: folded from the ledger's entries, live or afterwards, by the same code.

Every incident entry carries its number; later entries of a number complete earlier ones. It does not
judge what the core wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from keepstep.controller.ledger import Entry, LedgerReader

PHASES = ("detect", "decide", "connect", "vote", "transfer", "resume")
_KINDS = ("incident", "incident_phase", "incident_closed")


class IncidentBook:
    """All incidents of a job. `state`: open, closed; observed: nothing was done about it (mode observe)."""

    def __init__(self) -> None:
        self._incidents: dict[int, dict[str, Any]] = {}
        # Told "incident.opened" and "incident.closed", with the incident.
        self.on_change: Callable[[str, dict[str, Any]], None] | None = None

    @classmethod
    def from_entries(cls, entries: Iterable[Entry]) -> IncidentBook:
        """The incidents of a whole ledger."""
        book = cls()
        for entry in entries:
            book.add(entry.kind, entry.value(), entry.time_s)
        return book

    def add(self, kind: str, body: Mapping[str, Any], time_s: float) -> None:
        """Take in one entry; what is not about an incident is ignored. `time_s`: Unix time of the entry."""
        if kind == "note" and body.get("about") == "evidence":
            self._add_evidence(body)
        if kind not in _KINDS:
            return
        number = body.get("number", body.get("incident"))
        if not isinstance(number, int):
            return
        found = self._incidents.setdefault(number, {"number": number, "state": "open", "time_s": time_s})
        phase, phases = body.get("phase"), dict(found.get("phases_s", {}))
        found.update({key: value for key, value in body.items() if key not in ("incident", "phases_s")})
        phases.update(body.get("phases_s") or {})
        if isinstance(phase, str) and isinstance(body.get("duration_s"), (int, float)):
            phases[phase] = body["duration_s"]
        found["phases_s"] = phases
        if kind == "incident_closed":
            found["state"] = "observed" if found.get("resolution") == "observed" else "closed"
        if self.on_change is not None and kind in ("incident", "incident_closed"):
            self.on_change("incident.opened" if kind == "incident" else "incident.closed", dict(found))

    def _add_evidence(self, body: Mapping[str, Any]) -> None:
        """What the nodes saw: `blame`, and under `gathered` how the ranks stood and where the files are."""
        found = self._incidents.get(int(body["incident"]))
        if found is not None:
            found["blame"] = body.get("blame")
            found["gathered"] = {name: body.get(name) for name in ("generation", "stands", "nodes")}

    def all(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return [self._incidents[number] for number in sorted(self._incidents)]

    def get(self, number: int) -> dict[str, Any] | None:
        return self._incidents.get(number)

    def newest(self) -> dict[str, Any] | None:
        return self._incidents[max(self._incidents)] if self._incidents else None

    def count(self) -> int:
        return len(self._incidents)


def incidents_of(run_dir: Path) -> list[dict[str, Any]]:
    """The incidents in a run directory's ledger, oldest first. Raises UsageError when there is none."""
    with LedgerReader(run_dir / "ledger.sqlite") as reader:
        return IncidentBook.from_entries(reader.entries()).all()

"""The faults of a proof: read from the command line, held against the run, and found again in what it left.

A fault that never struck proves nothing: its marker and the incident that followed it are looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.cli.prove_compare import Death
from keepstep.core.faults import Fault, parse_fault
from keepstep.errors import UsageError

# These are reached once more after the last step, when the ranks wait for each other.
_AT_THE_END = ("gate", "after_gate", "between", "transfer_source", "transfer_target")


def read_faults(kills: Sequence[str], stops: Sequence[str], ranks: int) -> list[Fault]:
    """The faults of --kill and --stop. Raises UsageError, naming the option that is wrong."""
    faults = [
        _read(option, kind, text, ranks)
        for option, kind, texts in (("--kill", "kill", kills), ("--stop", "stop", stops))
        for text in texts
    ]
    if not faults:
        raise UsageError("no fault given: say which rank to harm and when, as in --kill rank=1,step=7")
    return faults


def _read(option: str, kind: str, text: str, ranks: int) -> Fault:
    try:
        fault = parse_fault(text, kind=kind)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if fault.kind != kind:
        raise UsageError(f"{option}: fault {text!r}: kind={fault.kind} is the other option's")
    if fault.rank >= ranks:
        raise UsageError(f"{option}: fault {text!r}: with {ranks} ranks the last one is rank {ranks - 1}")
    if fault.at == "setup" and fault.step != 0:
        raise UsageError(f"{option}: fault {text!r}: at=setup is before the first step: step=0")
    return fault


def beyond_the_end(fault: Fault, steps: int) -> bool:
    """Whether a run of so many steps never comes to the fault's place."""
    return fault.step > steps or (fault.step == steps and fault.at not in _AT_THE_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What became of one fault. `worker` and `incident` are None when it never struck."""

    fault: Fault
    worker: int | None = None
    incident: int | None = None

    @property
    def struck(self) -> bool:
        return self.incident is not None

    def why_not(self, steps: int) -> str:
        """One line about a fault that never struck."""
        if self.struck:
            return ""
        if beyond_the_end(self.fault, steps):
            return f"{self.fault} never struck: the script has {steps} steps, the last is step {steps - 1}"
        if self.worker is not None:
            return f"{self.fault} never struck: worker {self.worker} had finished before"
        return (
            f"{self.fault} never struck: rank {self.fault.rank} never came to at={self.fault.at} in that step"
        )

    def as_json(self) -> dict[str, Any]:
        fault = self.fault
        return {
            "rank": fault.rank,
            "step": fault.step,
            "at": fault.at,
            "kind": fault.kind,
            "struck": self.struck,
            "worker": self.worker,
            "incident": self.incident,
        }


def strikes(faults: Sequence[Fault], run_dir: Path, incidents: Sequence[Mapping[str, Any]]) -> list[Strike]:
    """What became of each fault: its marker names the worker, an incident has that worker as a victim."""
    incident_of = {
        int(victim["worker"]): int(incident["number"])
        for incident in incidents
        for victim in incident.get("victims", ())
    }
    found = []
    for number, fault in enumerate(faults):
        worker = _marked(run_dir / "faults" / f"{number}.done")
        incident = None if worker is None else incident_of.get(worker)
        found.append(Strike(fault=fault, worker=worker, incident=incident))
    return found


def deaths(incidents: Sequence[Mapping[str, Any]]) -> list[Death]:
    """Everyone who was lost, and the step that he had come to."""
    return [
        Death(int(victim["rank"]), int(victim["step"] or 0))
        for incident in incidents
        for victim in incident.get("victims", ())
        if victim.get("rank") is not None
    ]


def _marked(mark: Path) -> int | None:
    """The worker that a marker ("TIME worker N") names."""
    try:
        return int(mark.read_text(encoding="ascii").split()[-1])
    except FileNotFoundError:
        return None
    except (ValueError, IndexError):  # killed between making the file and writing the line
        return -1

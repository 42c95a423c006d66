"""What the job's controller is told about health: one signal of one source about one node or one of its slots."""

from __future__ import annotations

from dataclasses import dataclass

SEVERITIES = ("info", "warn", "critical")
# The fields of a signal by their kind, for whoever reads one from JSON.
TEXTS = ("node", "source", "kind", "severity", "device", "detail")
WHOLE = ("slot", "code")
NUMBERS = ("value", "limit", "age_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSeen:
    """A source on `node` saw something; what follows is the policy's decision.

    `source`: nvml, kernel, prometheus, infiniband, host, slurm, kubernetes, report or straggler. `kind`: what, in
    the source's vocabulary ("xid", "temperature", "ecc_volatile", ...). `slot`: the slot that it concerns; None:
    the whole node. `device`: how the source calls it ("gpu3", "mlx5_0/1"). `value`, `limit`: in the kind's
    base unit, where there are such; `code`: an Xid or the like. `age_s`: how long ago it was seen.
    """

    node: str
    source: str
    kind: str
    severity: str
    slot: int | None = None
    device: str = ""
    value: float | None = None
    limit: float | None = None
    code: int | None = None
    detail: str = ""
    age_s: float = 0.0

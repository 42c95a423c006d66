"""What is known of planned moves: which rank leaves which worker, for whom, and how far that is.

Values only; the rules stand in `moves`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Stage(enum.StrEnum):
    """How far one move is."""

    ASKED = "asked"  # no target yet, or it is starting
    LENDING = "lending"  # the source was told; it has not said yet where it can be copied from
    PREPARING = "preparing"  # the target is built as the rank and makes its first copy; training goes on
    READY = "ready"  # the switch can be announced
    SWITCHING = "switching"  # the planned generation is pending, or being entered


@dataclass(slots=True, kw_only=True)
class Move:
    """One rank on its way from `source` to `target`. `unit`: moves that should be made together."""

    rank: int
    source: int
    reason: str
    by: str
    unit: str
    to: str = ""
    asked_s: float = 0.0
    target: int | None = None
    stage: Stage = Stage.ASKED
    address: str = ""
    tries: int = 0
    waits: str = ""  # for what, as was said
    target_s: float = 0.0
    ready_s: float = 0.0
    copied_bytes: int = 0
    copy_s: float = 0.0
    fits: bool = True

    def body(self) -> dict[str, Any]:
        """What the ledger keeps and `status` shows, as JSON takes it."""
        return {
            "rank": self.rank,
            "source": self.source,
            "target": self.target,
            "to": self.to,
            "reason": self.reason,
            "by": self.by,
            "unit": self.unit,
            "stage": self.stage.value,
            "waits": self.waits,
            "asked_s": self.asked_s,
            "target_s": self.target_s,
            "ready_s": self.ready_s,
            "copied_bytes": self.copied_bytes,
            "copy_s": self.copy_s,
            "fits": self.fits,
        }


@dataclass(slots=True)
class Moves:
    """All moves of a job, by rank. `retired`: donors whose rank has moved; they never come back."""

    by_rank: dict[int, Move] = field(default_factory=dict)
    draining: dict[str, str] = field(default_factory=dict)  # node -> why
    retired: set[int] = field(default_factory=set)
    pending: bool = False  # the newest generation is planned, and nobody is known to have entered it
    switch_until_s: float | None = None

    def targets(self) -> dict[int, int]:
        """Worker -> the rank that it is being prepared for."""
        return {move.target: move.rank for move in self.by_rank.values() if move.target is not None}

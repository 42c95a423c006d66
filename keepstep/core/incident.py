"""One failure from its first evidence to the resumption, with what it cost.

It counts and words; it decides nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.events import StateReceived, VerdictReached
from keepstep.core.types import Course, Generation

CAUSES = ("death", "suspicion", "hardware", "node", "complaint", "migration")
KEPT_MEMBERS = 16  # members whose own times are kept: the slowest
RESOLUTIONS = (
    "rebuilt",
    "moved",
    "same_map",
    "restarted_in_setup",
    "rollback",
    "unresolved",
    "after_training",
    "observed",
    "unprotected",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A member that was lost, and why; `reason` is a whole sentence for the human."""

    worker: int
    rank: int
    node: str
    cause: str
    reason: str
    step: int = 0


@dataclass(slots=True, kw_only=True)
class Incident:
    """Times are of the caller's clock, in seconds; phases last from one mark to the next."""

    number: int
    cause: str
    reason: str
    opened_s: float
    first_evidence_s: float
    victims: list[Victim] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    generations: list[int] = field(default_factory=list)
    replacements: dict[int, int] = field(default_factory=dict)
    resolution: str = ""
    announced_s: float | None = None
    closed_s: float | None = None
    connect_s: float = 0.0
    vote_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    received: set[tuple[int, int]] = field(
        default_factory=set
    )  # (generation, worker): told again it counts once
    target: int | None = None
    verdict: str = ""
    steps_lost: int = 0
    steps_recomputed: int = 0
    bit_exact: bool = True
    would: dict[str, Any] = field(default_factory=dict)  # mode observe: what was not done
    members: dict[int, dict[str, Any]] = field(default_factory=dict)  # worker -> its own times

    def decide(self, generation: Generation, replacements: Mapping[int, int], now_s: float) -> None:
        """A generation was announced for it; what an earlier one had measured is part of deciding now."""
        self.generations.append(generation.number)
        self.replacements.update(replacements)
        self.announced_s = now_s
        self.connect_s = self.vote_s = self.transfer_s = 0.0
        self.members.clear()
        if self.resolution in ("", "same_map", "moved"):
            calm = "moved" if self.cause == "migration" and generation.donors else "same_map"
            self.resolution = "rebuilt" if self.victims else calm

    def learn_verdict(self, event: VerdictReached) -> None:
        self.connect_s = max(self.connect_s, event.connect_s)
        self.vote_s = max(self.vote_s, event.vote_s)
        self.members.setdefault(event.worker, {}).update(connect_s=event.connect_s, vote_s=event.vote_s)
        self.target, self.verdict = event.target, event.reason
        again = event.recomputed if event.recomputed is not None else int(event.course == Course.KEEP)
        self.steps_recomputed = max(self.steps_recomputed, again)
        self.bit_exact = self.bit_exact and event.bit_exact

    def learn_transfer(self, event: StateReceived) -> None:
        self.transfer_s = max(self.transfer_s, event.transfer_s)
        if (event.generation, event.worker) not in self.received:
            self.received.add((event.generation, event.worker))
            self.transfer_bytes += event.bytes
            self.members.setdefault(event.worker, {}).update(transfer_s=event.transfer_s)
        self.bit_exact = self.bit_exact and event.bit_exact

    def learn_resumed(self, worker: int, rank: int | None, now_s: float) -> None:
        """A member is back in its steps; `resumed_s` counts from the announcement."""
        since_s = now_s if self.announced_s is None else self.announced_s
        self.members.setdefault(worker, {}).update(rank=rank, resumed_s=now_s - since_s)

    def close(self, now_s: float, resolution: str | None = None) -> None:
        self.closed_s = now_s
        self.resolution = resolution or self.resolution or "unresolved"
        if self.resolution == "rollback":
            self.bit_exact = False

    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase; together they make the whole time once the incident is closed."""
        detect = max(0.0, self.opened_s - self.first_evidence_s)
        decide = 0.0 if self.announced_s is None else self.announced_s - self.opened_s
        resume = 0.0
        if self.closed_s is not None and self.announced_s is not None:
            told = self.connect_s + self.vote_s + self.transfer_s
            resume = max(0.0, self.closed_s - self.announced_s - told)
        return {
            "detect": detect,
            "decide": decide,
            "connect": self.connect_s,
            "vote": self.vote_s,
            "transfer": self.transfer_s,
            "resume": resume,
        }

    def total_s(self) -> float | None:
        """From the first evidence to the resumption; None while it is open."""
        return None if self.closed_s is None else self.closed_s - min(self.opened_s, self.first_evidence_s)

    def body(self) -> dict[str, Any]:
        """What the ledger keeps and commands show, as JSON takes it."""
        first = self.victims[0] if self.victims else None
        return {
            "number": self.number,
            "cause": self.cause,
            "reason": self.reason,
            "worker": first.worker if first else None,
            "rank": first.rank if first else None,
            "node": first.node if first else None,
            "victims": [
                {
                    "worker": victim.worker,
                    "rank": victim.rank,
                    "node": victim.node,
                    "cause": victim.cause,
                    "reason": victim.reason,
                    "step": victim.step,
                }
                for victim in self.victims
            ],
            "evidence": dict(self.evidence),
            "opened_s": self.opened_s,
            "first_evidence_s": self.first_evidence_s,
            "closed_s": self.closed_s,
            "generations": list(self.generations),
            "replacements": {str(rank): worker for rank, worker in sorted(self.replacements.items())},
            "target": self.target,
            "verdict": self.verdict,
            "phases_s": self.phases_s(),
            "total_s": self.total_s(),
            "transfer_bytes": self.transfer_bytes,
            "steps_lost": self.steps_lost,
            "steps_recomputed": self.steps_recomputed,
            "bit_exact": self.bit_exact,
            "resolution": self.resolution,
            **({"would": dict(self.would)} if self.would else {}),
            "members": self._slowest() if self.closed_s is not None else [],
        }

    def _slowest(self) -> list[dict[str, Any]]:
        """The members that took longest to resume, with their own times."""
        slowest = heapq.nlargest(
            KEPT_MEMBERS, self.members.items(), key=lambda member: member[1].get("resumed_s", 0.0)
        )
        return [{"worker": worker, **times} for worker, times in slowest]

"""What people are shown about the running job: fed with the machine's events and actions, decides nothing.

One row per worker (its slot, its rank, how far it is) and a few facts of the job. The commands and the
live table read it; the machine never does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.types import Generation


@dataclass(slots=True)
class WorkerRow:
    """One worker as people see it. `state`: starting, warm, hot, playing, finished, fenced, gone."""

    worker: int
    node: str
    slot: int
    state: str = "starting"
    rank: int | None = None
    step: int = 0
    status: int | None = None


class Board:
    """The job's present state for human eyes."""

    def __init__(self, job: str, world_size: int, mode: str = "run") -> None:
        self.job = job
        self.world_size = world_size
        self.mode = mode
        self.started_s = time.time()
        self.state = "starting"
        self.generation: int | None = None
        self.published = 0
        self.exit_code: int | None = None
        self.last_line = ""
        self.workers: dict[int, WorkerRow] = {}

    # ---- what goes in -----------------------------------------------------------------------------

    def see_event(self, event: evt.Event) -> None:
        """Note what happened."""
        match event:
            case evt.WorkerParked():
                self._set(event.worker, "hot" if event.readiness == "hot" else "warm")
            case evt.Progressed():
                self.published = max(self.published, event.published)
                self._progress(event.worker, event.step)
            case evt.Resumed():
                self._progress(event.worker, event.step)
                self.state = "training"
            case evt.WorkerFinished():
                self._progress(event.worker, event.step)
                self._set(event.worker, "finished")
            case evt.WorkerExited():
                self.published = max(self.published, event.published)
                row = self.workers.get(event.worker)
                if row is not None:
                    row.status = event.status
                    row.state = "finished" if row.state == "finished" and event.status == 0 else "gone"
            case _:
                pass

    def see_action(self, action: act.Action) -> None:
        """Note what is being done about it."""
        match action:
            case act.StartWorker():
                self.workers[action.worker] = WorkerRow(action.worker, action.node, action.slot)
            case act.Announce():
                self._announce(action.generation)
            case act.KillWorker():
                row = self.workers.get(action.worker)
                if row is not None and row.state not in ("gone", "finished"):
                    row.state = "fenced"
            case act.Say():
                self.last_line = action.text
            case act.Release():
                self.state = "finishing"
            case act.EndJob():
                self.state = "ended"
                self.exit_code = action.exit_code
            case _:
                pass

    def _announce(self, generation: Generation) -> None:
        self.generation = generation.number
        self.state = "starting" if generation.fresh else "recovering"
        for row in self.workers.values():
            rank = generation.ranks.index(row.worker) if row.worker in generation.ranks else None
            if rank is None and row.rank is not None and row.state == "playing":
                row.state = "fenced"
            row.rank = rank
            if rank is not None and row.state in ("starting", "warm", "hot"):
                row.state = "playing"

    def _set(self, worker: int, state: str) -> None:
        row = self.workers.get(worker)
        if row is not None:
            row.state = state

    def _progress(self, worker: int, step: int) -> None:
        row = self.workers.get(worker)
        if row is None:
            return
        row.step = step
        if self.state == "starting" and row.rank is not None:
            self.state = "training"

    # ---- what comes out ---------------------------------------------------------------------------

    def living(self) -> list[WorkerRow]:
        """The rows worth showing: players by rank, then spares by id."""
        rows = [row for row in self.workers.values() if row.state not in ("gone", "fenced")]
        return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.worker))

    def step(self) -> int:
        """Committed steps, as far as is known: the least of the players' (0 before the first)."""
        return min((row.step for row in self.workers.values() if row.rank is not None), default=0)

    def status(self) -> dict[str, Any]:
        """The answer to `keepstep status --json`."""
        return {
            "job": self.job,
            "mode": self.mode,
            "state": self.state,
            "started_s": self.started_s,
            "world_size": self.world_size,
            "generation": self.generation,
            "step": self.step(),
            "published": self.published,
            "exit_code": self.exit_code,
            "workers": [
                {
                    "worker": row.worker,
                    "rank": row.rank,
                    "node": row.node,
                    "slot": row.slot,
                    "state": row.state,
                    "step": row.step,
                }
                for row in self.living()
            ],
        }

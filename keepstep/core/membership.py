"""Nodes, slots and the workers on them: who lives, who is parked, which slot is free.

It knows nothing of ranks or incidents; a worker "plays" here, the map of who plays what is the
generation's.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field


class Standing(enum.StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"  # its process was ordered; it has not reached init()
    PARKED = "parked"  # a spare that may be given a rank
    PLAYING = "playing"  # a member of a generation
    ENDING = "ending"  # ordered to end, or released; its slot is still taken
    EXITED = "exited"


@dataclass(slots=True, kw_only=True)
class Worker:
    """One process, from the order to start it until its end. `status` is None while unknown."""

    number: int
    node: str
    slot: int
    standing: Standing = Standing.STARTING
    readiness: str = ""
    stood_by: bool = False
    step: int = 0
    status: int | None = None
    finished: bool = False
    released: bool = False

    @property
    def alive(self) -> bool:
        return self.standing is not Standing.EXITED

    @property
    def useful(self) -> bool:
        """Alive and not on its way out."""
        return self.standing not in (Standing.EXITED, Standing.ENDING)


@dataclass(slots=True)
class Membership:
    """All nodes and workers of one job. Worker numbers count up and are never used again."""

    slots: dict[str, int] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    next_number: int = 0

    def start(self, node: str, slot: int) -> Worker:
        """Note a new worker on a free slot."""
        worker = Worker(number=self.next_number, node=node, slot=slot)
        self.adopt(worker)
        return worker

    def adopt(self, worker: Worker) -> None:
        self.workers[worker.number] = worker
        self.next_number = max(self.next_number, worker.number + 1)

    def free_slots(self) -> list[tuple[str, int]]:
        """Slots without a living process, in the order in which their nodes joined."""
        taken = {(worker.node, worker.slot) for worker in self.workers.values() if worker.alive}
        return [
            (node, slot)
            for node, count in self.slots.items()
            for slot in range(count)
            if (node, slot) not in taken
        ]

    def useful(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.useful]

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def starting(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.standing is Standing.STARTING]

    def spares(self, fenced: Collection[int] = ()) -> list[Worker]:
        """Parked workers that may be given a rank, the best first: hot before warm, then the oldest."""
        parked = [
            worker
            for worker in self.workers.values()
            if worker.standing is Standing.PARKED and worker.number not in fenced
        ]
        return sorted(parked, key=lambda worker: (worker.readiness != "hot", worker.number))

    def in_slot_order(self, workers: Collection[Worker]) -> list[Worker]:
        nodes = {node: index for index, node in enumerate(self.slots)}
        return sorted(workers, key=lambda worker: (nodes.get(worker.node, len(nodes)), worker.slot))

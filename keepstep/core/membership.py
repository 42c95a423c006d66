"""Slots and the workers on them: who lives, who is parked, which slot is free.

It knows nothing of ranks or incidents; a worker "plays" here, the map of who plays what is the
generation's. A job has tens of thousands of workers and each event is looked at many times: whoever
stands where is kept in sets, and answers last until somebody's standing changes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from keepstep.core.node_facts import natural


class Standing(enum.StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"  # its process was ordered; it has not reached init()
    PARKED = "parked"  # a spare that may be given a rank
    PLAYING = "playing"  # a member of a generation
    ENDING = "ending"  # ordered to end, or released; its slot is still taken
    EXITED = "exited"


_USEFUL = (Standing.STARTING, Standing.PARKED, Standing.PLAYING)
_ALIVE = (*_USEFUL, Standing.ENDING)


class Worker:
    """One process, from the order to start it until its end. `status` is None while unknown."""

    __slots__ = (
        "_crowd",
        "_standing",
        "finished",
        "node",
        "number",
        "phase",
        "readiness",
        "released",
        "slot",
        "status",
        "step",
        "stood_by",
    )

    def __init__(self, *, number: int, node: str, slot: int) -> None:
        self.number = number
        self.node = node
        self.slot = slot
        self.readiness = ""
        self.stood_by = False
        self.step = 0
        self.status: int | None = None
        self.phase = ""  # where its main thread was when it ended
        self.finished = False
        self.released = False
        self._standing = Standing.STARTING
        self._crowd: Membership | None = None

    def __repr__(self) -> str:
        return f"Worker({self.number} on {self.node}/{self.slot}, {self._standing})"

    @property
    def standing(self) -> Standing:
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        before, self._standing = self._standing, standing
        if self._crowd is not None and before is not standing:
            self._crowd.moved(self, before)

    @property
    def alive(self) -> bool:
        return self._standing is not Standing.EXITED

    @property
    def useful(self) -> bool:
        """Alive and not on its way out."""
        return self._standing in _USEFUL

    def join(self, crowd: Membership) -> None:
        """From now on `crowd` hears of every change of its standing."""
        self._crowd = crowd


@dataclass(slots=True)
class Membership:
    """All slots and workers of one job. Worker numbers count up and are never used again.

    `version` changes with any standing; `living_version` when somebody starts or ends.
    """

    slots: dict[str, int] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    next_number: int = 0
    version: int = 0
    living_version: int = 0
    late: set[str] = field(default_factory=set)  # nodes whose slots come last: they are for spares
    ordinals: dict[str, int] = field(default_factory=dict)  # where the user gave a node its place
    ranks_per_node: int = 0  # slots from here on come last as well; 0: no bound
    _by_standing: dict[Standing, dict[int, Worker]] = field(
        default_factory=lambda: {standing: {} for standing in Standing}
    )
    _of_node: dict[str, dict[int, Worker]] = field(default_factory=dict)  # the living
    _taken: dict[str, Counter[int]] = field(default_factory=dict)  # node -> slot -> living workers on it
    _shrunk: set[str] = field(default_factory=set)  # nodes that came back with fewer slots
    _offers: int = 0
    _free: tuple[object, list[tuple[str, int]]] = (None, [])
    failed_checks: Counter[tuple[str, int]] = field(default_factory=Counter)  # node, slot
    quarantined: set[tuple[str, int]] = field(default_factory=set)

    def offer(self, node: str, slots: int) -> None:
        """A node is there, with so many slots."""
        if slots < self.slots.get(node, 0):
            self._shrunk.add(node)
        self.slots[node] = slots
        self._offers += 1

    def withdraw(self, node: str) -> None:
        """A node is gone."""
        self.slots.pop(node, None)
        self._offers += 1

    def start(self, node: str, slot: int) -> Worker:
        """Note a new worker on a free slot."""
        worker = Worker(number=self.next_number, node=node, slot=slot)
        self.adopt(worker)
        return worker

    def adopt(self, worker: Worker) -> None:
        self.workers[worker.number] = worker
        self.next_number = max(self.next_number, worker.number + 1)
        self._by_standing[worker.standing][worker.number] = worker
        self.version += 1
        self._settle(worker)
        worker.join(self)

    def moved(self, worker: Worker, before: Standing) -> None:
        """A worker's standing has changed."""
        self._by_standing[before].pop(worker.number, None)
        self._by_standing[worker.standing][worker.number] = worker
        self.version += 1
        if Standing.EXITED in (before, worker.standing):
            self._settle(worker)

    def _settle(self, worker: Worker) -> None:
        """Note on its node that it lives, or does not any more."""
        self.living_version += 1
        here = self._of_node.setdefault(worker.node, {})
        if worker.alive == (worker.number in here):
            return
        taken = self._taken.setdefault(worker.node, Counter())
        if worker.alive:
            here[worker.number] = worker
            taken[worker.slot] += worker.slot >= 0
        else:
            del here[worker.number]
            taken[worker.slot] -= worker.slot >= 0
        if not taken[worker.slot]:
            del taken[worker.slot]

    def free_slots(self) -> list[tuple[str, int]]:
        """Slots without a living process, in the order of their nodes' names: those for spares last, after
        them those on which a check failed; the quarantined are none."""
        failed = self.failed_checks
        lost = frozenset(self.quarantined)
        key = (self.living_version, self._offers, len(self.late), sum(failed.values()), lost)
        if self._free[0] != key:
            nothing: Counter[int] = Counter()
            taken = {node: self._taken.get(node, nothing) for node in self.slots}
            having = [n for n, slots in self.slots.items() if len(taken[n]) < slots or n in self._shrunk]
            free = [
                (node, slot)
                for node in sorted(having, key=self._node_key)
                for slot in range(self.slots[node])
                if slot not in taken[node] and (node, slot) not in lost
            ]
            self._free = (key, sorted(free, key=lambda at: (self._for_spares(*at), failed[at])))
        return self._free[1]

    def node_order(self) -> list[str]:
        """Nodes as ranks are given out: by their places, then names (node2 before node10), those for spares last."""
        return sorted(self.slots, key=self._node_key)

    def _node_key(self, node: str) -> tuple[object, ...]:
        return (node in self.late, self.ordinals.get(node, len(self.slots)), natural(node))

    def _for_spares(self, node: str, slot: int) -> bool:
        return node in self.late or 0 < self.ranks_per_node <= slot

    def of_node(self, node: str) -> list[Worker]:
        """The living workers of a node."""
        return sorted(self._of_node.get(node, {}).values(), key=lambda worker: worker.number)

    def useful(self) -> list[Worker]:
        return self._standing_in(_USEFUL)

    def useless(self) -> list[Worker]:
        """The dead, and those on their way out."""
        return self._standing_in((Standing.ENDING, Standing.EXITED))

    def useful_count(self) -> int:
        return sum(len(self._by_standing[standing]) for standing in _USEFUL)

    def alive(self) -> list[Worker]:
        return self._standing_in(_ALIVE)

    def alive_count(self) -> int:
        return sum(len(self._by_standing[standing]) for standing in _ALIVE)

    def starting(self) -> list[Worker]:
        return self._standing_in((Standing.STARTING,))

    def waiting_count(self) -> int:
        """How many useful workers play no rank."""
        return len(self._by_standing[Standing.STARTING]) + len(self._by_standing[Standing.PARKED])

    def parked_count(self) -> int:
        return len(self._by_standing[Standing.PARKED])

    def spares(self, fenced: Collection[int] = ()) -> list[Worker]:
        """Parked workers that may be given a rank, the best first: hot before warm, then the oldest."""
        parked = [w for w in self._by_standing[Standing.PARKED].values() if w.number not in fenced]
        return sorted(parked, key=lambda worker: (worker.readiness != "hot", worker.number))

    def in_slot_order(self, workers: Iterable[Worker]) -> list[Worker]:
        nodes = {node: index for index, node in enumerate(self.node_order())}
        return sorted(
            workers,
            key=lambda worker: (
                self._for_spares(worker.node, worker.slot),
                nodes.get(worker.node, len(nodes)),
                worker.slot,
            ),
        )

    def _standing_in(self, standings: Collection[Standing]) -> list[Worker]:
        found = [worker for standing in standings for worker in self._by_standing[standing].values()]
        return sorted(found, key=lambda worker: worker.number) if len(standings) > 1 else found

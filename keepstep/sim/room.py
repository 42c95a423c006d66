"""What the members of one generation share: barrier, votes, collectives and copies.

A collective completes when every player has contributed; each then sees success, sees failure or
sees nothing, one by one and on its own, as on a real network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.core.types import Generation, Vote
from keepstep.core.verdict import verdict
from keepstep.core.worker_phase import WorkerPhase
from keepstep.sim.invariants import Violation

if TYPE_CHECKING:
    from keepstep.sim.cluster import Cluster
    from keepstep.sim.virtual_worker import VirtualWorker

FAILURE_SEEN = 0.9  # the rest of the time a member sees nothing and stays until it is interrupted
FAILURE_AFTER_COMPLETION = 0.5
CONNECT_TIMEOUT_S = 15.0


class Room:
    """The store and the connections of one generation."""

    def __init__(self, cluster: Cluster, generation: Generation) -> None:
        self.cluster = cluster
        self.generation = generation
        self.arrived: dict[int, VirtualWorker] = {}
        self.left: set[int] = set()
        self.votes: dict[int, Vote] = {}
        self.contributed: dict[tuple[str, int], dict[int, int]] = {}
        # Who waits here, and which way its thread was on when it began to.
        self.waiting: dict[int, int] = {}
        self.serving: dict[int, VirtualWorker] = {}
        self.receiving: dict[int, tuple[int, ...]] = {}

    @property
    def broken(self) -> bool:
        return bool(self.left)

    # ---- coming and going -----------------------------------------------------------------------

    def arrive(self, worker: VirtualWorker) -> None:
        self.arrived[worker.number] = worker
        self._wait(worker)
        self.cluster.later(worker, CONNECT_TIMEOUT_S, lambda: worker.connect_timed_out(self))
        if len(self.arrived) == len(self.generation.members):
            for member in list(self.arrived.values()):
                self._deliver(member, member.connected)

    def leave(self, worker: VirtualWorker) -> None:
        """The worker died or cut its connections: whoever waits for it may see that."""
        if worker.number not in self.arrived or worker.number in self.left:
            return
        self.left.add(worker.number)
        self.waiting.pop(worker.number, None)
        self.serving.pop(worker.number, None)
        for number in list(self.waiting):
            self._may_fail(self.arrived[number])

    def fail_one(self, worker: VirtualWorker) -> None:
        """A connection breaks though nobody died."""
        self._may_fail(worker, certain=True)

    def _may_fail(self, worker: VirtualWorker, certain: bool = False) -> None:
        if certain or self.cluster.chance(FAILURE_SEEN):
            token = worker.token
            self.cluster.later(worker, self.cluster.delay(0.05), lambda: worker.saw_failure(self, token))

    def _wait(self, worker: VirtualWorker) -> None:
        self.waiting[worker.number] = worker.token
        if self.broken:
            self._may_fail(worker)

    def _deliver(self, worker: VirtualWorker, success: object) -> None:
        token = self.waiting.get(worker.number)
        if token is None:
            return  # it saw a failure, or went away, before the others were there

        def deliver() -> None:
            if worker.token != token or worker.number in self.left:
                return
            if self.broken and self.cluster.chance(FAILURE_AFTER_COMPLETION):
                if self.cluster.chance(FAILURE_SEEN):
                    worker.saw_failure(self, token)
                return
            self.waiting.pop(worker.number, None)
            success(self)  # type: ignore[operator]

        self.cluster.later(worker, self.cluster.delay(0.02), deliver)

    # ---- votes ----------------------------------------------------------------------------------

    def vote(self, worker: VirtualWorker, vote: Vote) -> None:
        self.votes[worker.number] = vote
        self._wait(worker)
        if len(self.votes) == len(self.generation.members):
            if verdict(tuple(self.votes.values())).target is None:
                self.cluster.invariants.rolled_back(self.generation.number, self.arrived.values())
            for member in list(self.arrived.values()):
                self._deliver(member, member.votes_counted)

    # ---- collectives ----------------------------------------------------------------------------

    def contribute(self, worker: VirtualWorker, kind: str, step: int, value: int = 0) -> None:
        """`kind`: "gradients" or "gate" of `step`; a gate's result is the largest value."""
        contributions = self.contributed.setdefault((kind, step), {})
        if worker.number in contributions:
            raise Violation(f"worker {worker.number} computes step {step} twice in one generation")
        contributions[worker.number] = value
        self._wait(worker)
        if len(contributions) == len(self.generation.ranks):
            result = max(contributions.values())
            for number in self.generation.ranks:
                member = self.arrived[number]
                if kind == "gate":
                    self._deliver(member, lambda room, m=member: m.gate_passed(result))
                else:
                    self._deliver(member, member.gradients_completed)

    # ---- copies ---------------------------------------------------------------------------------

    def serve(self, worker: VirtualWorker) -> None:
        self.serving[worker.number] = worker
        for target, sources in list(self.receiving.items()):
            if worker.number in sources:
                self._copy(worker, self.arrived[target])

    def receive(self, worker: VirtualWorker, sources: tuple[int, ...]) -> None:
        self.receiving[worker.number] = sources
        self._wait(worker)
        ready = [number for number in sources if number in self.serving]
        if ready:
            self._copy(self.serving[ready[0]], worker)

    def _copy(self, source: VirtualWorker, target: VirtualWorker) -> None:
        del self.receiving[target.number]
        token = target.token

        def whole() -> bool:
            # A target that has complained meanwhile has given this copy up, as the trainer does.
            copying = target.machine.phase is WorkerPhase.RECEIVE
            return copying and target.token == token and target.number not in self.left

        def first_byte() -> None:
            if whole():
                target.copy_started()
                self.cluster.later(target, self.cluster.delay(0.1), last_byte)

        def last_byte() -> None:
            if not whole():
                return
            if source.number in self.left or not source.alive:
                target.saw_failure(self, token)
                return
            self.waiting.pop(target.number, None)
            target.copy_completed(source)

        self.cluster.later(target, self.cluster.delay(0.02), first_byte)

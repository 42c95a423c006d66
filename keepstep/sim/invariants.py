"""What must hold after every event, whatever happens. The truth here is what workers really hold.

A content is the tuple of generations whose gradients were applied, one per step: two states with
the same content hold the same bytes of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from keepstep.core.types import Attempt, Generation, Lineage, Verdict
from keepstep.core.worker_phase import WorkerPhase

if TYPE_CHECKING:
    from keepstep.sim.virtual_worker import VirtualWorker

Content = tuple[int, ...]

_UPDATING = (WorkerPhase.UPDATE, WorkerPhase.ROLL)


class Violation(Exception):  # noqa: N818 - it is a finding of the simulator, no error of a program
    """A promise of the protocol is broken."""


class Invariants:
    """Remembers what was seen, and raises Violation when a new sight does not fit."""

    def __init__(self, shards: tuple[str, ...]) -> None:
        self.shards = shards
        self.maps: dict[int, Generation] = {}
        self.durable: set[int] = set()
        self.ever: set[int] = set()
        self.published: dict[int, int] = {}  # world (number of its fresh generation) -> steps
        self.truth: dict[tuple[int, int], Content] = {}  # (generation, step) -> content
        self._digests: dict[Content, str] = {(): Lineage().digest}
        self._lineages: dict[Content, Lineage] = {(): Lineage()}

    # ---- generations ----------------------------------------------------------------------------

    def generation_persisted(self, generation: Generation) -> None:
        number = generation.number
        if number in self.durable:
            raise Violation(f"two maps with one generation number {number}")
        older = self.maps.get(number - 1)
        if older is not None:
            gone = self.ever - set(older.members)
            back = gone & set(generation.members)
            if back:
                raise Violation(f"fenced workers {sorted(back)} came back in generation {number}")
        if len(set(generation.members)) != len(generation.members):
            raise Violation(f"one worker plays two ranks in generation {number}")
        self.durable.add(number)
        self.maps[number] = generation
        self.ever.update(generation.members)

    def generation_announced(self, generation: Generation) -> None:
        if generation.number not in self.durable:
            raise Violation(f"generation {generation.number} was announced before it was durable")
        if self.maps[generation.number] != generation:
            raise Violation(f"two maps with one generation number {generation.number}")

    def world_of(self, number: int) -> int:
        """The fresh generation that the given one descends from."""
        while number > 0 and not self.maps[number].fresh:
            number -= 1
        return number

    # ---- state ----------------------------------------------------------------------------------

    def lineage_of(self, content: Content) -> Lineage:
        known = self._lineages.get(content)
        if known is None:
            before = self.lineage_of(content[:-1])
            known = self._lineages[content] = before.extend(Attempt(content[-1], len(content) - 1))
        return known

    def check(self, worker: VirtualWorker) -> None:
        """The worker says of itself what is true, and it trains only with whole, right state."""
        machine, content = worker.machine, worker.content
        phase = machine.phase
        if machine.has_state and phase not in _UPDATING:
            if content is None or worker.torn:
                raise Violation(f"worker {worker.number} claims a state that it does not hold whole")
            if machine.step_count != len(content) or (
                machine.lineage.digest != self.lineage_of(content).digest
            ):
                raise Violation(
                    f"worker {worker.number} claims step {machine.step_count}, but holds {content}"
                )
        if phase is WorkerPhase.RUN or phase is WorkerPhase.GATE:
            generation = machine.generation
            assert generation is not None
            if content is None or not machine.has_state:
                raise Violation(f"worker {worker.number} trains without state")
            if worker.shard != self.shards[generation.ranks.index(worker.number)]:
                raise Violation(f"worker {worker.number} trains with the state of another shard")
            same = self.truth.setdefault((generation.number, len(content)), content)
            if same != content:
                raise Violation(
                    f"ranks of generation {generation.number} diverged: {same} and {content} "
                    f"(worker {worker.number})"
                )

    def update_applied(self, worker: VirtualWorker, content: Content, base: Content) -> None:
        if content != base:
            raise Violation(f"worker {worker.number} applies gradients of {base} to a state of {content}")

    def step_published(self, number: int, step: int) -> None:
        world = self.world_of(number)
        if step > self.published.get(world, 0):
            self.published[world] = step

    def verdict_learnt(self, worker: VirtualWorker, number: int, verdict: Verdict) -> None:
        published = self.published.get(self.world_of(number), 0)
        if verdict.target is not None and verdict.target < published:
            raise Violation(
                f"generation {number} goes back from published step {published} to {verdict.target}, silently"
            )

    def rolled_back(self, number: int, voters: Iterable[VirtualWorker]) -> None:
        """A rollback is right only when no lineage is live in every shard."""
        held: dict[Content, set[str]] = {}
        for worker in voters:
            if worker.alive and worker.content is not None and not worker.torn and worker.shard:
                held.setdefault(worker.content, set()).add(worker.shard)
                if worker.gradients is not None and worker.gradients[1] == worker.content:
                    rolled = (*worker.content, worker.gradients[0])
                    held.setdefault(rolled, set()).add(worker.shard)
        for content, shards in held.items():
            if shards == set(self.shards):
                raise Violation(f"generation {number} rolls back though {content} was live in every shard")

"""A large job's month: the shipped controller's machine against failures at published rates, in virtual time.

Nodes are played whole: what the survivors of a failure do they all do alike, so each node reports for its
workers as its agent would. Votes are counted by the shipped verdict over every rank. How often what fails is
what was published of a training of 16,384 GPUs (Llama 3: 419 interruptions in 54 days, by cause); how long a
repair or a recovery takes is an assumption, and a parameter.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from keepstep.core.actions import Action, Announce, EndJob, KillWorker, Persist, Say, StandBy, StartWorker
from keepstep.core.events import (
    AgentJoined,
    AgentLost,
    Complained,
    Event,
    NodeProgressed,
    Resumed,
    SpareChecked,
    StateReceived,
    Ticked,
    VerdictReached,
    WorkerExited,
    WorkerParked,
    WorkerSuspected,
)
from keepstep.core.generations import generation_from_body
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.together import joined
from keepstep.core.types import Course, Generation, Lineage, Vote
from keepstep.core.verdict import verdict
from keepstep.sim.agenda import Agenda
from keepstep.sim.invariants import Invariants, Violation
from keepstep.sim.rates import CAUSES, DAY_S, FAILURES_PER_RANK_DAY

SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """What is played. Times in seconds; `rate`: multiples of the published rate; a recovery takes `recovery_s`,
    from the announcement to the first new step, a repair `repair_s` on average."""

    ranks: int = 16_384
    spares: int = 64
    slots: int = 8
    days: float = 30.0
    rate: float = 1.0
    replicas: int = 64
    step_s: float = 20.0
    recovery_s: float = 5.0
    start_s: float = 120.0
    repair_s: float = 12 * 3600.0
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it: incidents by cause, training time lost, and what it took to find out."""

    failures: Counter[str]
    incidents: int
    generations: int
    events: int
    stalled_s: float
    least_spares: int
    slowest_decision_s: float
    took_s: float
    peak_bytes: int

    @property
    def failure_count(self) -> int:
        return sum(self.failures.values())


class MonthCluster:
    """One run. Raises Violation when a promise is broken, or training does not go on."""

    def __init__(self, month: Month, say: Callable[[str], None] = lambda text: None) -> None:
        self.month = month
        self._say = say
        self._rng = Random(month.seed)
        self._agenda = Agenda()
        self._machine = JobMachine(
            JobConfig(
                world_size=month.ranks,
                spares=month.spares,
                job="month",
                max_restarts=1_000_000,
                start_failure_limit=1_000,
                same_failure_limit=1_000_000,
                spare_check_s=0.0,
            )
        )
        shards = tuple(f"shard {rank % max(1, month.ranks // month.replicas)}" for rank in range(month.ranks))
        self._shards = shards
        self._invariants = Invariants(shards)
        self._living: dict[str, dict[int, int]] = {}  # node -> worker -> slot
        self._home: dict[int, str] = {}
        self._nodes_made = 0
        self._generation: Generation | None = None
        self._generation_places: tuple[int, dict[int, int]] = (-1, {})  # its number; worker -> rank
        self._step = 0
        self._trained_s = 0.0  # since when the present steps run
        self._stopped_s: float | None = None
        self._alarm = 0
        self._end: EndJob | None = None
        self._calm = False
        self._broken: set[tuple[str, int]] = set()
        self._failures: Counter[str] = Counter()
        self._events = 0
        self._stalled_s = 0.0
        self._least_spares = month.spares
        self._slowest_s = 0.0

    def run(self) -> Outcome:
        began_s = time.perf_counter()
        month = self.month
        for _ in range(-(-(month.ranks + month.spares) // month.slots)):
            self._join(month.slots)
        while not self._machine.state.setup_over:
            self._next("the job does not start")
        start_s = self._agenda.now_s
        self._agenda.after(self._until_failure_s(), self._fail)
        while self._agenda.now_s < start_s + month.days * DAY_S:
            self._next("nothing can happen any more")
        # The faults stop; what is open must come to its end.
        self._calm = True
        until_s = self._agenda.now_s + SETTLE_S + month.start_s + month.recovery_s
        while self._machine.state.incident is not None:
            if self._agenda.now_s > until_s:
                raise Violation(f"training does not go on: {self._machine.state.incident.reason}")
            self._next("nothing can happen any more")
        return Outcome(
            failures=self._failures,
            incidents=self._machine.state.incident_count,
            generations=len(self._machine.state.generations),
            events=self._events,
            stalled_s=self._stalled_s,
            least_spares=self._least_spares,
            slowest_decision_s=self._slowest_s,
            took_s=time.perf_counter() - began_s,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        )

    def _next(self, otherwise: str) -> None:
        if not self._agenda.run_next():
            raise Violation(otherwise)
        if self._end is not None:
            raise Violation(f"the job ended with code {self._end.exit_code}: {self._end.reason}")

    # ---- the controller's shell ---------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        self._events += 1
        began_s = time.perf_counter()
        actions = self._machine.step(event, self._agenda.now_s)
        took_s = time.perf_counter() - began_s
        if any(isinstance(action, Announce) and not action.generation.fresh for action in actions):
            self._slowest_s = max(self._slowest_s, took_s)
        self._carry_out(actions)
        due_s = self._machine.next_deadline_s(self._agenda.now_s)
        self._alarm += 1
        if due_s is not None:
            ticket = self._alarm
            self._agenda.at(due_s, lambda: self._hear(Ticked()) if ticket == self._alarm else None)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Persist(kind="generation"):
                    self._invariants.generation_persisted(generation_from_body(action.body))
                case Announce():
                    self._invariants.generation_announced(action.generation)
                    self._announced(action.generation)
                case StartWorker():
                    self._agenda.after(self.month.start_s, self._starter(action))
                case StandBy():
                    self._tell_parked(action.worker, "hot")
                case KillWorker():
                    self._exit(action.worker, -9)
                case EndJob():
                    self._end = action
                case Say():
                    self._say(f"{self._agenda.now_s / DAY_S:7.3f} d  {action.text}")

    def _starter(self, order: StartWorker) -> Callable[[], None]:
        def start() -> None:
            if order.node not in self._living:
                return
            self._living[order.node][order.worker] = order.slot
            self._home[order.worker] = order.node
            if (order.node, order.slot) in self._broken:
                self._hear(SpareChecked(worker=order.worker, ok=False, detail="its device does not compute"))
            else:
                self._hear(WorkerParked(worker=order.worker, readiness="warm"))

        return start

    def _tell_parked(self, worker: int, readiness: str) -> None:
        def parked() -> None:
            if worker in self._home:
                self._hear(WorkerParked(worker=worker, readiness=readiness))

        self._agenda.after(self.month.recovery_s, parked)

    # ---- nodes --------------------------------------------------------------------------------------

    def _join(self, slots: int) -> None:
        number, self._nodes_made = self._nodes_made, self._nodes_made + 1
        node = f"node{number}"
        self._living[node] = {}
        labels = {"rack": f"rack{number // 16}"}
        self._agenda.after(
            0.0,
            lambda: self._hear(AgentJoined(node=node, slots=slots, labels=labels, peer=f"10.0.0.1:{number}")),
        )

    def _exit(self, worker: int, status: int | None) -> None:
        node = self._home.pop(worker, None)
        if node is None:
            return
        del self._living[node][worker]
        self._agenda.after(
            0.001,
            lambda: self._hear(
                WorkerExited(worker=worker, status=status, step=self._step, published=self._published)
            ),
        )

    @property
    def _published(self) -> int:
        return max(0, self._step - 1)

    def _announced(self, generation: Generation) -> None:
        if self._generation is not None and generation.number <= self._generation.number:
            return  # said again for somebody who came back
        self._account()
        self._generation = generation
        self._stopped_s = self._stopped_s if self._stopped_s is not None else self._agenda.now_s
        self._agenda.after(self.month.recovery_s, lambda: self._enter(generation))

    def _account(self) -> None:
        """Steps that went on since the last look."""
        if self._stopped_s is None:
            whole = int((self._agenda.now_s - self._trained_s) / self.month.step_s)
            self._step += whole
            self._trained_s += whole * self.month.step_s

    def _enter(self, generation: Generation) -> None:
        """All members of the generation vote, and go on; unless one of them died, or another one counts by now."""
        if self._generation is not generation or any(w not in self._home for w in generation.members):
            return
        number = generation.number
        if not generation.fresh:
            self._vote(generation)
        self._step += 1 if not generation.fresh else self._machine.config.setup_steps
        for node, workers in list(self._living.items()):
            members = [worker for worker in workers if worker in self._places(generation)]
            if members and generation.fresh:
                steps = dict.fromkeys(members, self._step)
                self._hear(NodeProgressed(node=node, generation=number, published=self._step, steps=steps))
            elif members:
                back = [Resumed(worker=worker, generation=number, step=self._step) for worker in members]
                self._hear(joined(node, back))
        self._trained_s = self._agenda.now_s
        if self._stopped_s is not None and not generation.fresh:
            self._stalled_s += self._agenda.now_s - self._stopped_s
        self._stopped_s = None

    def _places(self, generation: Generation) -> dict[int, int]:
        if self._generation_places[0] != generation.number:
            places = {worker: rank for rank, worker in enumerate(generation.ranks)}
            self._generation_places = (generation.number, places)
        return self._generation_places[1]

    def _vote(self, generation: Generation) -> None:
        """Survivors hold the step that all published, a replacement nothing."""
        places, number = self._places(generation), generation.number
        before = self._invariants.maps[number - 1]
        old = set(before.ranks)
        lineage = Lineage(digest="held", step=self._step)
        votes = [
            Vote(
                worker=worker,
                rank=rank,
                shard=self._shards[rank],
                held_shard=self._shards[rank] if worker in old else None,
                step=self._step if worker in old else None,
                lineage=lineage if worker in old else None,
            )
            for worker, rank in places.items()
        ]
        found = verdict(votes)
        if found.target != self._step:
            raise Violation(f"generation {number} goes to step {found.target}, and {self._step} are held")
        for node, workers in self._living.items():
            told: dict[Course, list[Event]] = {}
            for worker in workers:
                if worker in places:
                    course = found.courses[worker]
                    told.setdefault(course, []).append(
                        VerdictReached(
                            worker=worker,
                            generation=number,
                            target=found.target,
                            course=course.value,
                            reason=found.reason,
                            connect_s=0.5,
                            vote_s=0.1,
                        )
                    )
            for course, verdicts in told.items():
                self._hear(joined(node, verdicts))
                if course is Course.RECEIVE:
                    for one in verdicts:
                        assert isinstance(one, VerdictReached)
                        self._hear(
                            StateReceived(
                                worker=one.worker,
                                generation=number,
                                transfer_s=1.0,
                                bytes=1 << 34,
                                sources=(),
                            )
                        )

    # ---- failures -----------------------------------------------------------------------------------

    def _until_failure_s(self) -> float:
        month = self.month
        return self._rng.expovariate(month.ranks * FAILURES_PER_RANK_DAY * month.rate / DAY_S)

    def _fail(self) -> None:
        if self._calm:
            return
        self._account()
        state = self._machine.state
        self._least_spares = min(self._least_spares, len(state.spares()))
        name, kind, _ = self._rng.choices(CAUSES, [weight for _, _, weight in CAUSES])[0]
        generation = self._generation
        assert generation is not None
        worker = self._rng.choice(generation.ranks)
        if worker in self._home:
            self._failures[name] += 1
            self._befall(kind, name, worker, generation)
        self._agenda.after(self._until_failure_s(), self._fail)

    def _befall(self, kind: str, name: str, worker: int, generation: Generation) -> None:
        if self._stopped_s is None:
            self._stopped_s = self._agenda.now_s
        repair_s = self._rng.expovariate(1 / self.month.repair_s)
        node = self._home[worker]
        match kind:
            case "process":
                self._exit(worker, -11)
            case "device":  # whoever is started there finds that it does not compute
                self._broken.add((node, self._living[node][worker]))
                self._exit(worker, -6)
                self._agenda.after(repair_s, lambda: self._join(1))
            case "hang":
                self._hear(WorkerSuspected(worker=worker, reason=name, published=self._published))
            case "link":
                self._hear(
                    Complained(
                        worker=worker,
                        generation=generation.number,
                        reason=name,
                        step=self._step,
                        published=self._published,
                    )
                )
            case "node":
                slots = len(self._living[node])
                for one in list(self._living.pop(node)):
                    del self._home[one]
                self._hear(AgentLost(node=node, reason=name))
                self._agenda.after(repair_s, lambda: self._join(slots))

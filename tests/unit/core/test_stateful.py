"""The machines under arbitrary events: they never fall over, never spin, never give a rank twice."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.core.actions import Announce, EndJob, KillWorker, Persist, StartWorker
from keepstep.core.events import (
    AgentJoined,
    Complained,
    Progressed,
    Resumed,
    ScriptFailed,
    Ticked,
    VerdictReached,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerSuspected,
)
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.types import Attempt, Generation, Lineage, Vote
from keepstep.core.worker import WorkerMachine, WorkerPhase
from keepstep.core.worker_events import (
    ApplyUpdate,
    BlockEnded,
    CastVote,
    CollectiveFailed,
    Connect,
    Connected,
    CopyCompleted,
    CopyStarted,
    GatePassed,
    GradientsCompleted,
    Interrupted,
    Leave,
    SafePointReached,
    StepStarted,
    VotesCounted,
)

any_worker = st.integers(0, 12)


class AnyJob(RuleBasedStateMachine):
    """A controller that hears anything from anybody, true or not."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.started: set[int] = set()
        self.fenced: set[int] = set()
        self.durable: list[int] = []
        self.members: set[int] = set()
        self.ended = 0
        self.ledger: list[Persist] = []

    @initialize(size=st.integers(1, 3), spares=st.integers(0, 2), observe=st.booleans())
    def begin(self, size: int, spares: int, observe: bool) -> None:
        self.machine = JobMachine(JobConfig(world_size=size, spares=spares, observe=observe))
        self.tell(AgentJoined(node="n", slots=size + spares))

    def tell(self, event) -> None:
        self.now_s += 0.01
        for action in self.machine.step(event, self.now_s):
            assert not self.ended, "nothing follows the end of the job"
            match action:
                case StartWorker():
                    assert action.worker not in self.started, "a worker's number is given once"
                    self.started.add(action.worker)
                case Persist():
                    json.dumps(dict(action.body))
                    self.ledger.append(action)
                    if action.kind == "generation":
                        self.durable.append(action.body["number"])
                        members = set(action.body["ranks"])
                        assert not members & self.fenced, "who is fenced never comes back"
                        self.fenced |= self.members - members
                        self.members = members
                case Announce():
                    assert action.generation.number in self.durable
                    assert len(set(action.generation.ranks)) == len(action.generation.ranks)
                case KillWorker():
                    assert action.worker in self.started
                case EndJob():
                    self.ended += 1

    @rule(worker=any_worker, hot=st.booleans())
    def parked(self, worker: int, hot: bool) -> None:
        self.tell(WorkerParked(worker=worker, readiness="hot" if hot else "warm"))

    @rule(count=st.integers(1, 5))
    def all_park(self, count: int) -> None:
        for worker in sorted(self.started)[-count:]:
            self.tell(WorkerParked(worker=worker, readiness="warm"))

    @rule(worker=any_worker, status=st.sampled_from([0, 1, -9, -11]), published=st.integers(0, 5))
    def exited(self, worker: int, status: int, published: int) -> None:
        self.tell(WorkerExited(worker=worker, status=status, step=published, published=published))

    @rule(worker=any_worker)
    def suspected(self, worker: int) -> None:
        self.tell(WorkerSuspected(worker=worker, reason="stopped"))

    @rule(worker=any_worker, generation=st.integers(0, 5))
    def complained(self, worker: int, generation: int) -> None:
        self.tell(Complained(worker=worker, generation=generation, reason="closed"))

    @rule(worker=any_worker, generation=st.integers(0, 5), step=st.integers(0, 5))
    def progressed(self, worker: int, generation: int, step: int) -> None:
        self.tell(Progressed(worker=worker, generation=generation, step=step, published=step))

    @rule(worker=any_worker, generation=st.integers(0, 5), goal=st.none() | st.integers(0, 5))
    def verdict(self, worker: int, generation: int, goal: int | None) -> None:
        self.tell(
            VerdictReached(
                worker=worker,
                generation=generation,
                target=goal,
                course="keep",
                reason="r",
                connect_s=0.0,
                vote_s=0.0,
            )
        )

    @rule(generation=st.integers(0, 5))
    def all_resume(self, generation: int) -> None:
        for worker in sorted(self.members):
            self.tell(Resumed(worker=worker, generation=generation, step=3))

    @rule(worker=any_worker, hardware=st.booleans())
    def failed(self, worker: int, hardware: bool) -> None:
        self.tell(ScriptFailed(worker=worker, summary="s", traceback="t", hardware=hardware))

    @rule(worker=any_worker)
    def finished(self, worker: int) -> None:
        self.tell(WorkerFinished(worker=worker, step=9))

    @rule(seconds=st.sampled_from([0.1, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        for _ in range(500):
            due_s = self.machine.next_deadline_s(self.now_s)
            if due_s is None or due_s > until_s:
                break
            self.now_s = due_s
            self.tell(Ticked())
        else:
            raise AssertionError("the machine asks for ticks without end")
        self.now_s = max(self.now_s, until_s)

    @precondition(lambda self: not self.ended)
    @rule()
    def controller_comes_back(self) -> None:
        self.machine = JobMachine.resume(self.machine.config, self.ledger)
        alive = tuple(sorted(self.started))
        self.tell(AgentJoined(node="n", slots=5, workers=alive))

    @invariant()
    def the_picture_is_json(self) -> None:
        if hasattr(self, "machine"):
            json.dumps(self.machine.snapshot())


TestAnyJob = AnyJob.TestCase
TestAnyJob.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class AnyWorker(RuleBasedStateMachine):
    """One worker beside an honest twin that is always one gate ahead or level, and any interrupts."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = WorkerMachine(0)
        self.machine.shard = "a"
        self.applied: list[int] = []  # generations of the attempts that were really applied
        self.newest = 0
        self.take(Interrupted(generation=Generation(number=0, ranks=(0, 1), fresh=True)))
        self.take(Connected(generation=0))

    def take(self, event) -> list:
        before = self.machine.lineage, self.machine.masked
        actions = self.machine.step(event)
        if before[1] and not isinstance(event, BlockEnded):
            assert not any(isinstance(a, Connect | CastVote) for a in actions), (
                "masked: nothing turns it round"
            )
            assert self.machine.lineage == before[0]
        for action in actions:
            if isinstance(action, ApplyUpdate):
                assert self.machine.attempt is not None and self.machine.masked
            if isinstance(action, Leave):
                assert self.machine.phase is WorkerPhase.LEFT
        return actions

    def on(self, *phases: WorkerPhase) -> bool:
        return self.machine.phase in phases

    @precondition(lambda self: self.on(WorkerPhase.RUN))
    @rule()
    def step_starts(self) -> None:
        self.take(StepStarted())

    @precondition(lambda self: self.on(WorkerPhase.RUN, WorkerPhase.TURN))
    @rule()
    def gradients(self) -> None:
        self.take(GradientsCompleted())

    @precondition(lambda self: self.on(WorkerPhase.GATE))
    @rule()
    def gate_passes(self) -> None:
        self.take(GatePassed())

    @precondition(lambda self: self.on(WorkerPhase.UPDATE, WorkerPhase.ROLL))
    @rule()
    def block_ends(self) -> None:
        attempt = self.machine.attempt
        assert attempt is not None
        self.applied.append(attempt.generation)
        self.take(BlockEnded())

    @rule()
    def collective_fails(self) -> None:
        if not self.on(WorkerPhase.PARKED):
            self.take(CollectiveFailed(reason="closed"))

    @rule()
    def safe_point(self) -> None:
        self.take(SafePointReached())

    @rule(number=st.integers(0, 3))
    def interrupted(self, number: int) -> None:
        self.newest = max(self.newest, self.newest + number - 1)
        self.take(Interrupted(generation=Generation(number=self.newest + number - 1, ranks=(0, 1))))

    @precondition(lambda self: self.on(WorkerPhase.CONNECT))
    @rule(ahead=st.booleans())
    def votes(self, ahead: bool) -> None:
        generation = self.machine.generation
        assert generation is not None
        [cast] = self.take(Connected(generation=generation.number))
        mine: Vote = cast.vote
        lineage = self.machine.lineage
        if ahead and mine.attempt is not None:
            lineage = lineage.extend(mine.attempt)
        twin = Vote(worker=1, rank=1, shard="a", held_shard="a", step=lineage.step, lineage=lineage)
        self.take(VotesCounted(generation=generation.number, votes=(mine, twin)))

    @precondition(lambda self: self.on(WorkerPhase.RECEIVE))
    @rule(whole=st.booleans())
    def receives(self, whole: bool) -> None:
        self.take(CopyStarted())
        assert not self.machine.has_state
        verdict = self.machine.verdict
        assert verdict is not None and verdict.lineage is not None
        if whole:
            self.applied = [*verdict.lineage.tail]
            self.take(CopyCompleted())
        else:
            self.take(CollectiveFailed(reason="the source is gone"))

    @invariant()
    def it_claims_exactly_what_was_applied(self) -> None:
        if not self.machine.has_state:
            return
        lineage = Lineage()
        for step, generation in enumerate(self.applied):
            lineage = lineage.extend(Attempt(generation, step))
        assert self.machine.step_count == len(self.applied)
        assert self.machine.lineage == lineage

    @invariant()
    def gradients_are_of_the_current_step(self) -> None:
        if self.machine.attempt is not None:
            assert self.machine.attempt.step == self.machine.step_count


TestAnyWorker = AnyWorker.TestCase
TestAnyWorker.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

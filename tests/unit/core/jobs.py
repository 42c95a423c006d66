"""A small hand for the tests of JobMachine: it keeps the time and looks actions up by type."""

from __future__ import annotations

from typing import TypeVar

from keepstep.core.actions import Action, Announce, Persist, Say
from keepstep.core.events import (
    AgentJoined,
    Complained,
    Event,
    Progressed,
    Resumed,
    Ticked,
    VerdictReached,
    WorkerExited,
    WorkerParked,
)
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.types import Generation

A = TypeVar("A", bound=Action)


class Job:
    """One JobMachine on one node, driven by hand."""

    def __init__(self, machine: JobMachine) -> None:
        self.machine = machine
        self.now_s = 100.0
        self.past: list[Action] = []
        self.last: list[Action] = []

    def tell(self, event: Event, after_s: float = 0.001) -> list[Action]:
        self.now_s += after_s
        self.last = self.machine.step(event, self.now_s)
        self.past += self.last
        return self.last

    def let_time_pass(self, seconds: float) -> list[Action]:
        """Send every tick that falls due within `seconds`; all their actions."""
        until_s, actions = self.now_s + seconds, []
        for _ in range(10_000):
            due_s = self.machine.next_deadline_s(self.now_s)
            if due_s is None or due_s > until_s:
                self.now_s = until_s
                return actions
            actions += self.tell(Ticked(), max(0.0, due_s - self.now_s))
        raise AssertionError(f"the machine asks for ticks without end: {self.machine.snapshot()}")

    @property
    def generation(self) -> Generation:
        assert self.machine.state.newest is not None
        return self.machine.state.newest

    def said(self) -> str:
        return "\n".join(action.text for action in self.past if isinstance(action, Say))

    def persisted(self, kind: str) -> list[dict]:
        return [dict(a.body) for a in self.past if isinstance(a, Persist) and a.kind == kind]

    def die(self, worker: int, status: int = -9, **more) -> list[Action]:
        return self.tell(WorkerExited(worker=worker, status=status, **more))

    def resume_all(self, step: int) -> None:
        for worker in self.generation.ranks:
            self.tell(Resumed(worker=worker, generation=self.generation.number, step=step))


def of(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def started(world_size: int = 3, spares: int = 1, slots: int | None = None, **config) -> Job:
    """Agent there, everything parked, generation 0 announced."""
    job = Job(JobMachine(JobConfig(world_size=world_size, spares=spares, **config)))
    job.tell(AgentJoined(node="here", slots=world_size + spares if slots is None else slots))
    for worker in range(world_size + spares):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    assert len(of(Announce, job.past)) == 1
    return job


def training(published: int = 5, **config) -> Job:
    """As `started`, with setup behind it."""
    job = started(**config)
    job.tell(Progressed(worker=0, generation=0, step=published, published=published))
    return job


def complain(job: Job, worker: int, generation: int | None = None, **more):
    number = job.generation.number if generation is None else generation
    return job.tell(Complained(worker=worker, generation=number, reason="connection closed", **more))


def learn(job: Job, worker: int, target: int | None, course: str = "keep", **more):
    return job.tell(
        VerdictReached(
            worker=worker,
            generation=job.generation.number,
            target=target,
            course=course,
            reason="as voted",
            connect_s=0.02,
            vote_s=0.01,
            **more,
        )
    )

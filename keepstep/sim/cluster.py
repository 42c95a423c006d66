"""The virtual cluster: agents, processes, messages and the shipped controller, in virtual time.

It plays what the shells do: carries actions out, keeps a ledger that survives the controller, and
reports deaths. Mishaps come from the story; delays from the same seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from keepstep.core.actions import (
    Action,
    Announce,
    EndJob,
    KillWorker,
    Persist,
    Probe,
    Release,
    Say,
    StandBy,
    StartWorker,
)
from keepstep.core.events import (
    AgentDisconnected,
    AgentJoined,
    AgentSilent,
    Event,
    ProbeAnswered,
    Ticked,
    WorkerExited,
    WorkerParked,
    WorkerSuspected,
)
from keepstep.core.generations import generation_from_body
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.types import Generation
from keepstep.core.worker import WorkerMachine
from keepstep.core.worker_phase import WorkerPhase
from keepstep.sim.agenda import Agenda, Channel
from keepstep.sim.invariants import Invariants, Violation
from keepstep.sim.mishaps import befall, on_cue
from keepstep.sim.nodes import Reach, answer_probe, joined
from keepstep.sim.room import Room
from keepstep.sim.story import Story
from keepstep.sim.virtual_worker import VirtualWorker

PATIENCE_S = 3000.0
MOST_EVENTS = 30_000


class Cluster:
    """One run of a story. `run` returns when the job has ended, or raises Violation."""

    def __init__(
        self,
        story: Story,
        worker_machine: type[WorkerMachine] = WorkerMachine,
        job_machine: type[JobMachine] = JobMachine,
        trace: list[str] | None = None,
    ) -> None:
        self.story = story
        self.worker_machine = worker_machine
        self.job_machine = job_machine
        self.trace = trace
        self.rng = Random(story.seed ^ 0x5EED)
        self.agenda = Agenda()
        self.invariants = Invariants(story.shards)
        self.crash_pending = False
        self.ticket = 0
        self.ledger: list[Persist] = []
        self.workers: dict[int, VirtualWorker] = {}
        self.rooms: dict[int, Room] = {}
        slots = story.world_size + story.spares + story.free_slots
        self.nodes = {"n0": slots} if story.nodes == 1 else {"n0": (slots + 1) // 2, "n1": slots // 2}
        if story.nodes == 2 and any(mishap.kind in ("node", "cut") for mishap in story.mishaps):
            self.nodes = {"n0": slots, "n1": slots}
        self.config = JobConfig(
            world_size=story.world_size,
            spares=story.spares,
            max_restarts=1_000,
            same_failure_limit=1_000,
            start_failure_limit=1_000,
            same_map_limit=100,
            nodes=len(self.nodes),
        )
        self.controller: JobMachine | None = job_machine(self.config)
        self.channels = {node: Channel(self.agenda) for node in self.nodes}
        self.reach = Reach(self)
        self.outbox: list[Callable[[], None]] = []
        self.mishaps = list(story.mishaps)
        self.cues = list(story.cues)
        self.events = 0
        self.last_mishap_s = 0.0
        self.end: EndJob | None = None

    # ---- running --------------------------------------------------------------------------------

    def run(self) -> EndJob:
        """First any faults, and safety holds; then the faults stop, and training must finish."""
        for node in self.nodes:
            self._send(self.channels[node], partial(self.hear, joined(self, node)))
        while self.end is None:
            while self.mishaps and self.mishaps[0].at_event <= self.events:
                befall(self, self.mishaps.pop(0))
            if not self.agenda.run_next():
                raise Violation(f"nothing can happen any more: training does not resume ({self._picture()})")
            self.events += 1
            if self.agenda.now_s - self.last_mishap_s > PATIENCE_S or self.events > MOST_EVENTS:
                raise Violation(f"the faults have stopped, training does not resume ({self._picture()})")
        self._check_end(self.end)
        return self.end

    def _check_end(self, end: EndJob) -> None:
        assert self.controller is not None
        newest = self.controller.state.newest
        assert newest is not None
        # A death after the last step is not made good: the script may have had work of its own there.
        state = self.controller.state
        last = [*newest.ranks, *state.cut_short.values()]
        excused = state.finishing and any((self.workers[number].status or 0) < 0 for number in last)
        if end.exit_code != 0 and not excused:
            raise Violation(f"the job ended with code {end.exit_code}: {end.reason}")
        # Whoever passed the last gate proves that all ranks of its generation had every step.
        finished = [worker for worker in self.workers.values() if worker.finished]
        if not finished:
            raise Violation("the job ended well, but no worker passed the last gate")
        for worker in finished:
            if worker.content is None or worker.torn or len(worker.content) != self.story.steps:
                raise Violation(
                    f"worker {worker.number} ended with {worker.content}, not with {self.story.steps} steps"
                )

    def _picture(self) -> str:
        if self.controller is None:
            return "no controller"
        workers = {
            w.number: f"{w.machine.phase}@{w.machine.step_count}" for w in self.workers.values() if w.alive
        }
        newest = self.controller.state.newest
        return f"generation {newest.number if newest else None} {newest.ranks if newest else ()}, workers {workers}"

    # ---- chance and time ------------------------------------------------------------------------

    def delay(self, most_s: float) -> float:
        """Mostly short, sometimes much longer: orders of any kind must come about."""
        part = self.rng.random()
        return most_s * (part if self.rng.random() < 0.8 else 5.0 * part)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def later(self, worker: VirtualWorker, delay_s: float, errand: Callable[[], None]) -> None:
        """An errand of a process: void when it is dead by then, put off while it is stopped."""

        def run() -> None:
            if not worker.alive:
                return
            if worker.stopped:
                worker.backlog.append(errand)
            else:
                errand()

        self.agenda.after(delay_s, run)

    def tell(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.agenda.now_s:9.3f}  {text}")
        for cue in [cue for cue in self.cues if cue.line in text]:
            self.cues.remove(cue)
            self.agenda.after(0.0, partial(on_cue, self, cue, text))

    # ---- messages -------------------------------------------------------------------------------

    def report(self, worker: VirtualWorker, event: Event) -> None:
        """A worker's word to the controller, through its agent; in the order in which it speaks."""
        if worker.node in self.reach.cut:
            return  # whoever is cut off says it again, or is told what happened meanwhile
        if self.reach.away(worker.node):
            self.reach.hold(worker.node, lambda: self.deliver(event, worker.channel))
        else:
            self.deliver(event, worker.channel)

    def deliver(self, event: Event, channel: Channel) -> None:
        channel.send(self.delay(0.01), lambda: self.hear(event))

    def hear(self, event: Event) -> None:
        """The controller's shell hands an event to the core."""
        if self.end is not None:
            return
        if self.controller is None:
            # What agents say waits for the next controller; what its own shell sees does not.
            if not isinstance(event, (AgentJoined, AgentDisconnected, AgentSilent, ProbeAnswered)):
                self.outbox.append(lambda: self.hear(event))
            return
        actions = self.controller.step(event, self.agenda.now_s)
        if not isinstance(event, Ticked):
            self._tell_event(event)
        if self.crash_pending and actions:
            # It dies in the middle of carrying out what it decided.
            self.crash_pending = False
            self._carry_out(actions[: self.rng.randint(0, len(actions))])
            if self.end is None:
                self.crash_controller()
            return
        self._carry_out(actions)
        self._set_alarm()

    def _tell_event(self, event: Event) -> None:
        if isinstance(event, WorkerExited):
            self.tell(f"controller hears that w{event.worker} exited with status {event.status}")
        elif isinstance(event, WorkerSuspected):
            self.tell(f"controller hears that w{event.worker} is suspected: {event.reason}")

    def _set_alarm(self) -> None:
        if self.controller is None or self.end is not None:
            return
        self.ticket += 1
        due_s = self.controller.next_deadline_s(self.agenda.now_s)
        if due_s is not None:
            ticket = self.ticket
            self.agenda.at(due_s, lambda: self._alarm(ticket))

    def _alarm(self, ticket: int) -> None:
        if ticket == self.ticket and self.controller is not None:
            self.hear(Ticked())

    # ---- the controller's shell -----------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Persist():
                    self.ledger.append(action)
                    if action.kind == "generation":
                        self.invariants.generation_persisted(generation_from_body(action.body))
                case Announce():
                    self.invariants.generation_announced(action.generation)
                    for node in list(self.channels):
                        self._to_node(node, partial(self._announce, node, action.generation))
                case Probe():
                    answer_probe(self, action)
                case StartWorker():
                    if action.node in self.channels:  # else its node is lost, as will be heard
                        self._to_node(action.node, partial(self._start, action))
                case StandBy():
                    self._to_worker(action.worker, lambda w: w.stand_by())
                case Release():
                    for number in action.workers:
                        self._to_worker(number, lambda w: w.release())
                case KillWorker():
                    self._to_process(action.worker)
                case Say():
                    self.tell(f"controller: {action.text}")
                case EndJob():
                    self.tell(f"the job ends with code {action.exit_code}: {action.reason}")
                    self.end = action

    def _send(self, channel: Channel, errand: Callable[[], None]) -> None:
        controller = self.controller

        def arrive() -> None:
            if self.controller is controller:  # what a dead controller had not delivered is lost
                errand()

        channel.send(self.delay(0.01), arrive)

    def _to_node(self, node: str, errand: Callable[[], None]) -> None:
        # What an agent could not hear is void: the core says it again when it is back.
        if node in self.channels and not self.reach.away(node):
            self._send(self.channels[node], errand)

    def _to_worker(self, number: int, errand: Callable[[VirtualWorker], None]) -> None:
        worker = self.workers.get(number)
        if worker is not None:
            self._to_node(
                worker.node,
                lambda: self.later(worker, self.delay(0.01), lambda: errand(worker)),
            )

    def _to_process(self, number: int) -> None:
        """SIGKILL reaches stopped processes as well; evidence may be taken first."""
        worker = self.workers.get(number)
        if worker is not None:
            self._to_node(
                worker.node,
                lambda: self.agenda.after(self.delay(0.5), lambda: self.exit(worker, -9)),
            )

    def _announce(self, node: str, generation: Generation) -> None:
        for worker in list(self.workers.values()):
            if worker.alive and worker.node == node:
                self.later(worker, self.delay(0.01), partial(worker.interrupt, generation))

    def _start(self, action: StartWorker) -> None:
        if action.worker in self.workers:
            raise Violation(f"worker number {action.worker} is given twice")
        if action.node not in self.channels:
            return
        taken = [
            w.number
            for w in self.workers.values()
            if w.alive and (w.node, w.slot) == (action.node, action.slot)
        ]
        if taken:
            raise Violation(f"worker {action.worker} starts on the slot of living worker {taken[0]}")
        worker = VirtualWorker(self, self.worker_machine(action.worker), action.node, action.slot)
        self.workers[action.worker] = worker
        self.tell(f"w{worker.number} starts on slot {action.slot} of {action.node}: {action.reason}")
        self.later(worker, self.delay(0.5), worker.reach_init)

    def room(self, generation: Generation) -> Room:
        return self.rooms.setdefault(generation.number, Room(self, generation))

    def page_published(self, worker: VirtualWorker) -> int:
        """The newest published step over the pages of a node, of workers of one world only."""
        if worker.machine.generation is None:
            return 0
        world = self.invariants.world_of(worker.machine.generation.number)
        return max(
            w.published
            for w in self.workers.values()
            if w.node == worker.node
            and w.machine.generation is not None
            and self.invariants.world_of(w.machine.generation.number) == world
        )

    # ---- deaths and other mishaps ---------------------------------------------------------------

    def exit(self, worker: VirtualWorker, status: int) -> None:
        if not worker.alive:
            return
        worker.alive, worker.status = False, status
        if worker.room is not None:
            worker.room.leave(worker)
        self.tell(f"w{worker.number} is gone (status {status})")
        event = WorkerExited(
            worker=worker.number,
            status=status,
            step=worker.machine.step_count,
            phase="DONE" if worker.finished else "GATE",  # all that the end of a job wants to know
            published=self.page_published(worker),
        )
        channel = Channel(self.agenda) if status < 0 else worker.channel
        if self.reach.away(worker.node):
            self.reach.hold(worker.node, lambda: self.deliver(event, channel))
        elif worker.node in self.channels:
            self.deliver(event, channel)

    def crash_controller(self) -> None:
        self.tell("*** the controller crashes")
        self.controller = None
        self.ticket += 1
        self.agenda.after(self.delay(1.0), self._restart_controller)

    def _restart_controller(self) -> None:
        self.tell("the controller is back and reads its ledger")
        self.controller = self.job_machine.resume(self.config, self.ledger)
        for node in self.channels:
            if not self.reach.away(node):
                self.hear(joined(self, node))
        for worker in self.workers.values():
            parked = worker.alive and worker.readiness and worker.machine.phase is WorkerPhase.PARKED
            if parked and worker.node in self.channels and not self.reach.away(worker.node):
                self.hear(WorkerParked(worker=worker.number, readiness=worker.readiness))
        outbox, self.outbox = self.outbox, []
        for message in outbox:
            message()

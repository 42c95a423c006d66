"""Every interleaving of worker steps, controller rows, messages and faults, up to a world's bounds.

The workers are shipped WorkerMachines and the maps come from the shipped `core.generations`; here
are only the network, the faults and when the controller acts. `Rules` switches single rules of the
controller off, `machine` and `decide` replace the worker and the verdict, for the holes alone.

A move of the protocol always raises (generation, step, phase), and faults bound the generations:
"no state without a move short of the goal" is therefore "training resumes".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from keepstep.core.generations import planned_generation, succeeding_generation, vacant_ranks
from keepstep.core.types import Generation, Verdict, Vote
from keepstep.core.verdict import verdict as shipped_verdict
from keepstep.core.worker import WorkerMachine
from keepstep.core.worker_events import (
    ApplyUpdate,
    BlockEnded,
    CastVote,
    CheckpointLoaded,
    CollectiveFailed,
    Connect,
    Connected,
    CopyCompleted,
    CopyStarted,
    EnterGate,
    GatePassed,
    GradientsCompleted,
    Interrupted,
    Leave,
    LoadCheckpoint,
    PlanAnnounced,
    Publish,
    RedoStep,
    SafePointReached,
    VotesCounted,
    WorkerEvent,
)
from keepstep.core.worker_phase import MASKED, WorkerPhase
from tests.model.world import Content, Entry, Process, State, World, lineage_of

P = WorkerPhase
LEARNT = (P.RUN, P.GATE, P.DONOR)
GONE_ON = (*LEARNT, P.UPDATE)
Move = tuple[str, State, bool]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The controller's rules (protocol.md); a hole switches one off."""

    complaint: bool = True
    retell: bool = True
    durable: bool = True
    fence: bool = True
    donor: bool = True
    pending: bool = True
    announce: bool = True


class Model:
    """Successors and promises of one world."""

    def __init__(
        self,
        world: World,
        rules: Rules | None = None,
        machine: type[WorkerMachine] = WorkerMachine,
        decide: Callable[[Sequence[Vote]], Verdict] = shipped_verdict,
    ) -> None:
        self.world = world
        self.rules = rules or Rules()
        self.machine = machine
        self._decide = decide
        self._verdicts: dict[tuple[Vote, ...], Verdict] = {}

    def decide(self, votes: Sequence[Vote]) -> Verdict:
        key = tuple(sorted(votes, key=lambda vote: vote.worker))
        if key not in self._verdicts:
            self._verdicts[key] = self._decide(key)
        return self._verdicts[key]

    def start(self) -> State:
        state = State()
        size = len(self.world.shards)
        w = self.world
        state.budget = {
            "crash": w.crash,
            "zombie": w.zombie,
            "flaky": w.flaky,
            "controller": w.controller,
            "plan": w.plan,
        }
        first = Generation(number=0, ranks=tuple(range(size)), fresh=True)
        state.ledger = [Entry(first)]
        state.processes = [Process(self.machine(x)) for x in range(size + w.spares)]
        for x in range(size):
            self.interrupt(state, x, 0)
        return state

    # ---- a worker and its machine ---------------------------------------------------------------

    def take(self, state: State, x: int, event: WorkerEvent) -> None:
        """Give the machine an event and carry out what it answers."""
        process = state.process(x)
        for action in process.machine.step(event):
            match action:
                case EnterGate():
                    self.contribute(state, x, 2, action.pending)
                case Connect():
                    self.connect(state, x, action.generation)
                case CastVote():
                    self.vote(state, x, action.vote)
                case ApplyUpdate():
                    process.stage = "passed"
                case RedoStep():
                    process.gradients = -1
                case LoadCheckpoint():
                    self.load(state, x)
                case Publish() if not process.fenced:
                    state.published = max(state.published, action.step)
                case Leave():
                    process.destroyed = process.content is not None and not process.fenced
                    process.alive, process.content = False, None
                case _:
                    pass

    def contribute(self, state: State, x: int, kind: int, value: int = 0) -> None:
        process = state.processes[x]
        assert process.machine.generation is not None
        entry = state.entry(process.machine.generation.number)
        step = process.machine.step_count
        entry.position[x] = 2 * step + kind
        if kind == 2:
            entry.gates[step] = max(entry.gates.get(step, 0), value)

    def begin(self, state: State, x: int) -> None:
        """The start of a step: in a coarse world nobody can see the time before the contribution."""
        process = state.process(x)
        if not process.alive or process.machine.phase is not P.RUN:
            return
        process.gradients, process.stage = -1, "compute"
        if not self.world.fine and process.machine.step_count < self.world.steps:
            self.send(state, x)

    def send(self, state: State, x: int) -> None:
        self.contribute(state, x, 1)
        state.process(x).stage = "sent"

    def interrupt(self, state: State, x: int, number: int) -> None:
        process = state.process(x)
        if process.machine.phase in MASKED:  # only a machine without the rule comes here
            begun = process.stage == "applied"
            process.machine.turn_round(begun)  # type: ignore[attr-defined]
            if begun:
                process.content, process.torn, process.destroyed = None, False, True
        self.take(state, x, Interrupted(generation=state.ledger[number].generation))
        if state.processes[x].machine.phase is P.TURN:
            self.take(state, x, SafePointReached())

    def connect(self, state: State, x: int, generation: Generation) -> None:
        """Connect and vote at once: what a member holds does not change in between."""
        process = state.process(x)
        process.machine.shard = self.world.shards[generation.rank_of(x) or 0]
        process.stage = ""
        base = state.ledger[generation.number - 1].generation if generation.number else None
        if generation.planned and base is not None and x in base.members:
            state.entry(generation.number).told = True  # it reports "in p", and all are told
        self.take(state, x, Connected(generation=generation.number))
        if generation.fresh:
            process.content, process.shard = (), process.machine.shard
            self.begin(state, x)

    def vote(self, state: State, x: int, vote: Vote) -> None:
        process = state.processes[x]
        assert process.machine.generation is not None
        entry = state.entry(process.machine.generation.number)
        entry.votes[x] = vote
        if len(entry.votes) == len(entry.generation.members):
            self.check_rollback(state, entry)

    def complete(self, state: State, x: int) -> None:
        process = state.process(x)
        assert process.machine.generation is not None
        process.gradients = process.machine.generation.number
        self.take(state, x, GradientsCompleted())

    def pass_gate(self, state: State, x: int) -> None:
        process = state.processes[x]
        assert process.machine.generation is not None
        entry = state.ledger[process.machine.generation.number]
        self.take(state, x, GatePassed(pending=entry.gates[process.machine.step_count]))
        if not self.world.fine:
            self.finish_update(state, x)

    def finish_update(self, state: State, x: int) -> None:
        self.apply(state, x)
        self.end_block(state, x)

    def apply(self, state: State, x: int) -> None:
        process = state.process(x)
        assert process.content is not None
        if process.gradients < 0:
            state.bad = f"w{x} applies gradients that it does not hold"
        process.content, process.gradients = (*process.content, process.gradients), -1
        process.torn, process.stage = True, "applied"

    def end_block(self, state: State, x: int) -> None:
        process = state.process(x)
        process.torn, process.stage = False, ""
        self.take(state, x, BlockEnded())
        self.begin(state, x)

    def learn(self, state: State, x: int) -> str:
        process = state.processes[x]
        assert process.machine.generation is not None
        entry = state.ledger[process.machine.generation.number]
        decided = self.decide(tuple(entry.votes.values()))
        playing = x in entry.generation.ranks
        if decided.target is not None and playing and not process.fenced and decided.target < state.published:
            live = max((len(c) for c in self.live_contents(state, entry)), default=-1)
            if not self.rules.announce or live >= state.published:
                state.bad = f"the job went back from step {state.published} to {decided.target}, silently"
            state.published = decided.target
        self.take(
            state,
            x,
            VotesCounted(generation=entry.generation.number, votes=tuple(entry.votes.values())),
        )
        process = state.processes[x]
        if process.machine.phase is P.ROLL and not self.world.fine:
            self.finish_update(state, x)
        self.begin(state, x)
        if process.machine.phase is P.DONOR and not process.machine.has_state:
            process.content = None
        return f"{decided.courses[x]}@{decided.target}"

    def load(self, state: State, x: int) -> None:
        """Without checkpoints a rollback goes to the script's start."""
        process = state.process(x)
        process.content, process.shard, process.gradients = (), process.machine.shard, -1
        process.torn = process.destroyed = False
        if not process.fenced:
            state.published = 0
        self.take(state, x, CheckpointLoaded())

    # ---- moves ----------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        """(label, successor, whether it is a fault) of every move."""
        for x, process in enumerate(state.processes):
            if process.alive:
                yield from self.worker_moves(state, x, process)
        yield from self.controller_moves(state)

    def worker_moves(self, state: State, x: int, process: Process) -> Iterator[Move]:
        machine, name = process.machine, f"w{x}"
        phase, generation = machine.phase, machine.generation
        world = self.world

        def go(label: str, act: Callable[[State], object], fault: bool = False) -> Move:
            new = state.copy()
            said = act(new)
            return (f"{label}: {said}" if isinstance(said, str) else label, new, fault)

        if state.budget["crash"] and not (process.fenced and generation is None):
            yield go(f"CRASH {name}", lambda s: self.crash(s, x), True)
        for j, entry in enumerate(state.ledger):
            newer = generation is None or entry.generation.number > generation.number
            removed = entry.generation.planned and generation is not None and not process.fenced
            if (
                not (x in entry.generation.members or removed)
                or not newer
                or (phase in MASKED and self.deferred(machine))
            ):
                continue
            if entry.told:
                yield go(
                    f"{name} is interrupted, connects and votes in g{j}",
                    lambda s, j=j: self.interrupt(s, x, j),
                )
            elif entry.generation.planned and phase is P.PARKED and x in entry.generation.ranks:
                plan = PlanAnnounced(generation=entry.generation)
                yield go(f"{name} connects ahead to g{j}", lambda s, plan=plan: self.take(s, x, plan))
        if generation is None:
            return
        entry = state.ledger[generation.number]
        step = machine.step_count
        playing = x in generation.ranks

        def full(kind: int) -> bool:
            return all(entry.position.get(y, 0) >= 2 * step + kind for y in generation.ranks)

        newest = state.ledger[state.known]
        known = not process.fenced and x in newest.generation.members
        if playing and state.budget["zombie"] and state.up and known:
            yield go(f"SUSPECT {name}: fenced, lives on", lambda s: self.suspect(s, x), True)
        if newest.generation.planned and not newest.told and state.up:
            base = generation.number == state.known - 1
            if base and machine._plan is None and phase in (P.RUN, P.GATE) and x in newest.generation.members:
                plan = PlanAnnounced(generation=newest.generation)
                if phase is P.RUN or world.fine:
                    yield go(f"{name} hears of planned g{state.known}", lambda s: self.take(s, x, plan))
        if phase is P.RUN and step < world.steps:
            if process.stage == "compute":
                yield go(f"{name} contributes gradients of step {step}", lambda s: self.send(s, x))
            elif full(1):
                yield go(f"{name} has complete gradients of step {step}", lambda s: self.complete(s, x))
        if phase is P.GATE and full(2):
            yield go(
                f"{name} sees the gate of step {step} pass in g{generation.number}",
                lambda s: self.pass_gate(s, x),
            )
        if phase in MASKED and process.stage == "passed":
            yield go(f"{name} applies its update", lambda s: self.apply(s, x))
        if phase in MASKED and process.stage == "applied":
            yield go(f"{name} ends its block", lambda s: self.end_block(s, x))
        if phase is P.VOTE and len(entry.votes) == len(generation.members):
            yield go(f"{name} learns the verdict of g{generation.number}", lambda s: self.learn(s, x))
        if phase is P.RECEIVE:
            yield from self.copy_moves(state, x, entry, go)
        if phase in (P.GATE, P.VOTE, P.RECEIVE) or (phase is P.RUN and process.stage == "sent"):
            cause = any(self.has_left(state, y, generation) for y in generation.members)
            if cause and world.fine:
                yield go(f"{name} sees a failure", lambda s: self.fail(s, x))
            elif not cause and state.budget["flaky"]:
                yield go(f"{name} sees a failure though nobody died", lambda s: self.fail(s, x, 1), True)

    def deferred(self, machine: WorkerMachine) -> bool:
        """A masked machine only notes the interrupt; the search need not look at that."""
        return not getattr(machine, "unmasked", False)

    def copy_moves(self, state: State, x: int, entry: Entry, go: Callable) -> Iterator[Move]:
        process = state.processes[x]
        if not process.torn:
            yield go(f"w{x} receives the first byte", lambda s: self.first_byte(s, x))
            return
        decided = self.decide(tuple(entry.votes.values()))
        for y in entry.generation.members:
            source = state.processes[y]
            ready = (
                source.alive and source.machine.generation is entry.generation and source.content is not None
            )
            ready = ready and source.machine.phase in LEARNT and not source.torn
            right = source.shard == process.machine.shard and len(source.content or ()) == decided.target
            if y != x and ready and right:
                yield go(f"w{x} holds state from w{y}", lambda s, y=y: self.last_byte(s, x, y))

    def first_byte(self, state: State, x: int) -> None:
        process = state.process(x)
        process.content, process.torn, process.gradients = None, True, -1
        self.take(state, x, CopyStarted())

    def last_byte(self, state: State, x: int, y: int) -> None:
        process, source = state.process(x), state.processes[y]
        process.content, process.shard, process.torn = source.content, source.shard, False
        self.take(state, x, CopyCompleted())
        self.begin(state, x)

    def has_left(self, state: State, y: int, generation: Generation) -> bool:
        process = state.processes[y]
        at = process.machine.generation
        return not process.alive or (at is not None and at.number > generation.number)

    def fail(self, state: State, x: int, spent: int = 0) -> None:
        state.budget["flaky"] -= spent
        self.take(state, x, CollectiveFailed(reason="closed"))
        if state.processes[x].machine.phase is P.TURN:
            self.take(state, x, SafePointReached())

    def crash(self, state: State, x: int) -> None:
        process = state.process(x)
        process.alive, process.content, process.destroyed = False, None, False
        state.budget["crash"] -= 1

    def suspect(self, state: State, x: int) -> None:
        state.process(x).fenced = True
        state.budget["zombie"] -= 1

    # ---- the controller's rows ------------------------------------------------------------------

    def controller_moves(self, state: State) -> Iterator[Move]:
        def go(label: str, act: Callable[[State], object], fault: bool = False) -> Move:
            new = state.copy()
            act(new)
            return (label, new, fault)

        if not state.up:
            yield go("the controller restarts", self.restart)
            return
        if state.budget["controller"]:
            yield go("CONTROLLER CRASH", lambda s: self.lose_controller(s, 0), True)
            if not self.rules.durable and state.known:
                yield go("CONTROLLER CRASH, last write lost", lambda s: self.lose_controller(s, 1), True)
        newest = state.ledger[state.known]
        g = newest.generation
        used = {x for entry in state.ledger for x in entry.generation.members}
        if self.rules.fence:
            pool = [x for x, p in enumerate(state.processes) if x not in used and not p.fenced]
        else:
            pool = [
                x
                for x, p in enumerate(state.processes)
                if x not in g.members and not p.fenced and (p.alive or x not in used)
            ]
        retired = tuple(g.donors) if newest.retired else ()
        bad = [
            x
            for x in g.members
            if (not state.processes[x].alive or state.processes[x].fenced) and x not in retired
        ]
        for count in range(1, len(bad) + 1):
            for gone in combinations(bad, count):
                need = len(vacant_ranks(g, gone, retired))
                choices = [tuple(pool[:need])] if self.rules.fence else combinations(pool, need)
                for spares in choices:
                    if len(spares) == need:
                        new = succeeding_generation(g, gone, spares, "", retired)
                        yield go(
                            f"controller appends g{new.number}: {g.ranks} -> {new.ranks}",
                            lambda s, new=new, gone=gone: self.append(s, new, gone),
                        )
        waiting = [x for x, p in enumerate(state.processes) if p.alive and p.machine.phase is P.WAIT]
        numbers = {x: state.processes[x].machine.generation.number for x in waiting}  # type: ignore[union-attr]
        failed = any(numbers[x] == g.number and x in g.members for x in waiting)
        if self.rules.complaint and not bad and failed:
            new = succeeding_generation(g, (), (), "", retired)
            yield go(
                f"controller appends g{new.number}: same map", lambda s, new=new: self.append(s, new, ())
            )
        in_base = any(numbers[x] == g.number - 1 and not state.processes[x].fenced for x in waiting)
        if self.rules.pending and g.planned and not newest.told and not bad and in_base:
            yield go(f"controller tells planned g{g.number} to all", self.tell_plan)
        if state.budget["plan"] and not bad and pool and not g.donors and self.settled(state, g):
            for rank in range(len(g.ranks)) if len(set(self.world.shards)) > 1 else (0,):
                new = planned_generation(g, rank, pool[0], "")
                if not self.rules.donor:
                    new = Generation(number=new.number, ranks=new.ranks, planned=True)
                yield go(
                    f"PLAN g{new.number}: {g.ranks} -> {new.ranks}", lambda s, new=new: self.plan(s, new)
                )
        if g.donors and not newest.retired:
            donor, rank = next(iter(g.donors.items()))
            target = state.processes[g.ranks[rank]]
            inside = target.alive and target.machine.generation is g and target.machine.phase in LEARNT
            if inside and target.content is not None and not target.torn:
                yield go(f"controller retires w{donor}", lambda s: self.retire(s, donor))

    def settled(self, state: State, g: Generation) -> bool:
        machines = [state.processes[x].machine for x in g.members]
        return all(m.generation is g and m.phase in GONE_ON for m in machines)

    def append(self, state: State, generation: Generation, gone: Sequence[int]) -> None:
        for x in gone:
            state.process(x).fenced = True
        if any(e.votes and e.generation.number == generation.number for e in state.ledger):
            state.bad = "two maps with one generation number"
        state.ledger.append(Entry(generation))
        state.known = len(state.ledger) - 1

    def plan(self, state: State, generation: Generation) -> None:
        state.budget["plan"] -= 1
        state.ledger.append(Entry(generation, told=False))
        state.known = len(state.ledger) - 1

    def tell_plan(self, state: State) -> None:
        state.entry(state.known).told = True

    def retire(self, state: State, donor: int) -> None:
        state.entry(state.known).retired = True
        process = state.process(donor)
        process.alive, process.content, process.fenced = False, None, True

    def lose_controller(self, state: State, lost_writes: int) -> None:
        state.budget["controller"] -= 1
        state.up = False
        for i in range(len(state.ledger)):
            state.entry(i).told = False  # what was still on its way is lost
        state.known -= lost_writes

    def restart(self, state: State) -> None:
        state.up = True
        if self.rules.retell:
            state.entry(state.known).told = True
        if not self.rules.fence:
            for x, process in enumerate(state.processes):
                if process.alive and process.fenced:
                    state.process(x).fenced = False

    # ---- promises -------------------------------------------------------------------------------

    def live(self, state: State, entry: Entry) -> list[Process]:
        members = {*entry.generation.members, *state.ledger[state.known].generation.members}
        return [
            state.processes[x]
            for x in sorted(members)
            if state.processes[x].alive and not state.processes[x].fenced
        ]

    def live_contents(self, state: State, entry: Entry) -> Iterator[Content]:
        """Contents of which every shard has a live copy, or the gradients to make it."""
        held: dict[Content, set[str]] = {}
        for process in self.live(state, entry):
            if process.content is not None and not process.torn:
                held.setdefault(process.content, set()).add(process.shard)
                if process.gradients >= 0:
                    held.setdefault((*process.content, process.gradients), set()).add(process.shard)
        yield from (content for content, shards in held.items() if shards == set(self.world.shards))

    def check_rollback(self, state: State, entry: Entry) -> None:
        members = [state.processes[x] for x in entry.generation.members]
        if self.decide(tuple(entry.votes.values())).target is not None:
            return
        if not any(p.alive and not p.fenced for p in members):
            return
        if any(p.destroyed for p in state.processes):
            state.bad = "a rollback because the protocol itself destroyed a live copy"
        for content in self.live_contents(state, entry):
            state.bad = f"a rollback although every shard had a live copy of {content}"

    def broken(self, state: State) -> str:
        """The first promise that this state breaks, or nothing."""
        if state.bad:
            return state.bad
        truth: dict[tuple[int, int], Content] = {}
        members = state.ledger[state.known].generation.members
        for x, process in enumerate(state.processes):
            machine = process.machine
            if not process.alive:
                continue
            if machine.has_state and machine.phase not in MASKED:
                content = process.content
                if content is None or process.torn:
                    return f"w{x} claims a state that it does not hold whole"
                if machine.lineage != lineage_of(content):
                    return f"w{x} claims step {machine.step_count}, but holds {content}"
            if x in members and not process.fenced and machine.phase in (P.RUN, P.GATE):
                assert machine.generation is not None
                content = process.content
                if content is None:
                    return f"w{x} trains without state"
                if process.shard != self.world.shards[machine.generation.ranks.index(x)]:
                    return f"w{x} trains with the state of another shard"
                key = (machine.generation.number, len(content))
                for (number, steps), other in truth.items():
                    common = min(steps, len(content))
                    if number == key[0] and other[:common] != content[:common]:
                        return f"replicas diverged: {other} and {content}"
                truth[key] = content
        return ""

    def is_goal(self, state: State) -> bool:
        known = state.known
        if state.ledger[known].generation.planned and not state.ledger[known].told:
            known -= 1  # training ended while a switch was still pending
        g = state.ledger[known].generation
        return state.up and all(
            p.alive
            and not p.fenced
            and p.machine.generation is g
            and p.machine.phase is P.RUN
            and p.machine.step_count == self.world.steps
            for p in (state.processes[x] for x in g.ranks)
        )

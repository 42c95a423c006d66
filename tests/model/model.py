"""Every interleaving of worker steps, controller rows, messages and faults, up to a world's bounds.

The workers are shipped WorkerMachines and the maps come from the shipped `core.generations`; here
are only the network, the faults and when the controller acts. `Rules` switches single rules of the
controller off, `machine` and `decide` replace the worker and the verdict, for the holes alone.

A move of the protocol always raises (generation, step, phase), and faults bound the generations:
"no state without a move short of the goal" is therefore "training resumes".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keepstep.core.types import Generation
from keepstep.core.worker_events import (
    PlanAnnounced,
    PlanDue,
)
from keepstep.core.worker_phase import MASKED
from keepstep.core.worker_phase import WorkerPhase as P
from tests.model.controller import Controller
from tests.model.world import LEARNT, Entry, Move, Process, State


class Model(Controller):
    """Successors of one world's states."""

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
                or (phase in MASKED and self.deferred(process))
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
                source = self.lending(state, entry.generation, x)
                if source is not None and state.processes[source].content != process.content:
                    yield go(f"{name} adopts the state of w{source}", lambda s, y=source: self.adopt(s, x, y))
        if process.late >= 0:
            yield go(f"{name} ends the update that its vote did not count", lambda s: self.apply_late(s, x))
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
        plan = machine._plan
        if (
            plan is not None
            and x in (plan.donors or plan.ranks)
            and machine._due is None
            and phase in (P.RUN, P.GATE)
        ):
            due = PlanDue(number=plan.number, step=None)
            yield go(f"{name} hears that g{plan.number} is due", lambda s: self.take(s, x, due))
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

    def deferred(self, process: Process) -> bool:
        """A masked machine only notes the interrupt; the search need not look at that."""
        unmasked: frozenset[str] = getattr(process.machine, "unmasked", frozenset())
        return process.stage not in unmasked

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

    def has_left(self, state: State, y: int, generation: Generation) -> bool:
        process = state.processes[y]
        at = process.machine.generation
        return not process.alive or (at is not None and at.number > generation.number)

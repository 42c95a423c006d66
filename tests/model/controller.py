"""The controller's rows: which generation it may append, and what it forgets when it crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from keepstep.core.generations import planned_generation, succeeding_generation, vacant_ranks
from keepstep.core.types import Generation
from keepstep.core.worker_phase import WorkerPhase as P
from tests.model.workers import Workers
from tests.model.world import GONE_ON, LEARNT, Entry, Move, State


class Controller(Workers):
    """When the controller acts, and on what."""

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
                new = planned_generation(g, {rank: pool[0]}, "")
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

    def suspect(self, state: State, x: int) -> None:
        state.process(x).fenced = True
        state.budget["zombie"] -= 1

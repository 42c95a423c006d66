"""What must hold in every state: the invariants of protocol.md, over machines and the truth about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from keepstep.core.types import Verdict, Vote
from keepstep.core.verdict import verdict as shipped_verdict
from keepstep.core.worker import WorkerMachine
from keepstep.core.worker_phase import MASKED
from keepstep.core.worker_phase import WorkerPhase as P
from tests.model.world import Content, Entry, Process, Rules, State, World, lineage_of


class Promises:
    """Looks at states, changes none but to note what is broken."""

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
        there = [p for p in members if p.machine.generation is entry.generation]
        if not any(p.alive and not p.fenced for p in there):  # nobody will learn this verdict
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
                if machine.lineage.digest != lineage_of(content).digest or machine.step_count != len(content):
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

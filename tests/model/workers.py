"""What a worker does in one move: its shipped machine takes an event, the model carries out what it answers."""

from __future__ import annotations

from keepstep.core.types import Checkpoint, Generation, Vote
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
    Publish,
    RedoStep,
    SafePointReached,
    StateAdopted,
    VotesCounted,
    WorkerEvent,
)
from keepstep.core.worker_phase import MASKED
from keepstep.core.worker_phase import WorkerPhase as P
from tests.model.promises import Promises
from tests.model.world import Content, Process, State, lineage_of


class Workers(Promises):
    """Workers, votes and copies of one world."""

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
        if process.machine.phase in MASKED:  # only a machine without its rule comes here
            begun = process.stage == "applied"
            process.machine.turn_round(begun)  # type: ignore[attr-defined]
            if begun:
                process.content, process.torn, process.destroyed = None, False, True
            elif process.machine.loud:  # type: ignore[attr-defined]
                process.late = process.gradients
        self.take(state, x, Interrupted(generation=state.ledger[number].generation))
        if state.processes[x].machine.phase is P.TURN:
            self.take(state, x, SafePointReached())

    def connect(self, state: State, x: int, generation: Generation) -> None:
        """Connect and vote at once: what a member holds does not change in between."""
        process = state.process(x)
        process.machine.shard = self.world.shards[generation.rank_of(x) or 0]
        process.machine.checkpoint = self.newest_checkpoint(state)
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
        self.save(state, process)
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

    def apply_late(self, state: State, x: int) -> None:
        """The update that went on while its worker voted as if there were none."""
        process = state.process(x)
        if process.content is not None:
            process.content = (*process.content, process.late)
        process.late = -1

    # ---- checkpoints ----------------------------------------------------------------------------

    def save(self, state: State, process: Process) -> None:
        """A worker, fenced or not, saves its shard at the block's end of the world's checkpoint step."""
        if process.content is None or len(process.content) != self.world.checkpoint:
            return
        kept = state.saved
        if not self.rules.cktag:  # one file for each shard and step, whoever writes it last
            kept = frozenset(shard for shard in kept if shard[0] != process.shard)
        state.saved = kept | {(process.shard, process.content)}

    def complete_contents(self, state: State) -> list[dict[str, Content]]:
        """What each shard would load, for every checkpoint that looks complete; the newest comes last."""
        shards = set(self.world.shards)
        if not self.rules.cktag:
            mixed = dict(state.saved)
            return [mixed] if set(mixed) == shards else []
        by_content: dict[Content, set[str]] = {}
        for shard, content in state.saved:
            by_content.setdefault(content, set()).add(shard)
        whole = sorted(content for content, having in by_content.items() if having == shards)
        return [dict.fromkeys(shards, content) for content in whole]

    def newest_checkpoint(self, state: State) -> Checkpoint | None:
        """What the voter can see of it: the step, and the tag of the first shard's file."""
        if not (contents := self.complete_contents(state)):
            return None
        lineage = lineage_of(contents[-1][self.world.shards[0]])
        return Checkpoint(step=lineage.step, lineage=lineage.digest)

    def load(self, state: State, x: int) -> None:
        """The checkpoint that the verdict names; without one a rollback goes to the script's start."""
        process = state.process(x)
        assert process.machine.verdict is not None
        named = process.machine.verdict.checkpoint
        shard = process.machine.shard
        process.content = ()
        for contents in self.complete_contents(state):
            lineage = lineage_of(contents[self.world.shards[0]])
            if not self.rules.cknamed or (named is not None and lineage.digest == named.lineage):
                process.content = contents[shard]
        process.shard, process.gradients = shard, -1
        process.torn = process.destroyed = False
        if not process.fenced:
            state.published = named.step if named is not None else 0
        self.take(state, x, CheckpointLoaded())

    def first_byte(self, state: State, x: int) -> None:
        process = state.process(x)
        process.content, process.torn, process.gradients = None, True, -1
        self.take(state, x, CopyStarted())

    def last_byte(self, state: State, x: int, y: int) -> None:
        process, source = state.process(x), state.processes[y]
        process.content, process.shard, process.torn = source.content, source.shard, False
        self.take(state, x, CopyCompleted())
        self.begin(state, x)

    def lending(self, state: State, plan: Generation, x: int) -> int | None:
        """The source of target `x`, while its state stands still."""
        for donor, rank in plan.donors.items():
            source = state.processes[donor]
            still = source.alive and source.machine.phase not in MASKED and not source.torn
            if plan.ranks[rank] == x and still and source.content is not None:
                return donor
        return None

    def adopt(self, state: State, x: int, y: int) -> None:
        """Copied ahead and, after the source's gate, brought forward by its gradients: what the source holds."""
        process, source = state.process(x), state.processes[y]
        process.content, process.shard, process.torn = source.content, source.shard, False
        process.machine.shard = source.shard
        lineage = source.machine.lineage
        self.take(state, x, StateAdopted(step=source.machine.step_count, lineage=lineage))

    def fail(self, state: State, x: int, spent: int = 0) -> None:
        state.budget["flaky"] -= spent
        self.take(state, x, CollectiveFailed(reason="closed"))
        if state.processes[x].machine.phase is P.TURN:
            self.take(state, x, SafePointReached())

    def crash(self, state: State, x: int) -> None:
        process = state.process(x)
        process.alive, process.content, process.destroyed = False, None, False
        state.budget["crash"] -= 1

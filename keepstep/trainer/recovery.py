"""From a failure to the next step: connect, vote, and what the verdict asks of this worker.

Runs on the user's thread, at a safe point. Any of it may fail or be overtaken by a newer
generation; then it starts again from the newest one. What to do is the machine's decision; how a
worker's state looks is `keepstep.trainer.state`'s affair.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from keepstep.core.events import StateReceived, VerdictReached
from keepstep.core.types import Generation, Vote
from keepstep.core.worker_events import (
    ApplyUpdate,
    CastVote,
    CollectiveFailed,
    Connect,
    Connected,
    LoadCheckpoint,
    ReceiveState,
    RedoStep,
    SafePointReached,
    ServeState,
    VotesCounted,
)
from keepstep.errors import KeepstepError, ProtectionError, UsageError
from keepstep.trainer import futex
from keepstep.trainer.adapters import resets
from keepstep.trainer.gloo import GlooFabric
from keepstep.trainer.node_gate import NodeGate
from keepstep.trainer.session import Session
from keepstep.trainer.store import AgentStore
from keepstep.wire import codec
from keepstep.wire.page import Phase

MEMBERS_TIMEOUT_S = 600.0  # a cold replacement may compile for minutes; its death is the agent's to see
GROUP_TIMEOUT_S = 15.0
VOTE_TIMEOUT_S = 120.0


class Outcome(enum.Enum):
    """What the user's thread does after recovery."""

    REDO = "redo"
    ROLL = "roll"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True)
class Copied:
    """What a state transfer did."""

    bytes: int
    seconds: float
    sources: tuple[int, ...]
    bit_exact: bool


def open_fabric(session: Session, generation: Generation) -> None:
    """Make store and gloo device of `generation`; drops those of the older one."""
    older = session.store
    store = AgentStore(f"g{generation.number}/")
    with session.lock:
        if older is not None:
            older.close()
            session.retired_stores.append(older)  # torch's C++ side may still hold it
        session.store = store  # from here on a newer generation frees whoever waits for its connection
        if session.machine.next_generation is not None:
            store.cut()
    store.connect(session.directory.dial_store(generation))
    fabric = make_fabric(session)
    with session.lock:
        if session.node_gate is not None:
            session.node_gate.close()
            session.node_gate = None
        session.fabric = fabric
        session.page.generation = generation.number
        session.copying.clear()
        if session.machine.next_generation is not None:
            session.cut("a newer generation was announced")


def make_fabric(session: Session) -> GlooFabric:
    """The inner groups' transport of this process: NCCL beside gloo where the script asked for a GPU."""
    host = session.link.welcome.advertise
    if session.device_type == "cuda":
        import torch

        from keepstep.trainer.nccl import NcclFabric

        return NcclFabric(host, torch.device("cuda", torch.cuda.current_device()))
    return GlooFabric(host)


def meet(session: Session, generation: Generation) -> None:
    """Wait for all members and learn where they are. Raises what the store raises."""
    store, fabric, identity = session.store, session.fabric, session.identity
    assert store is not None
    assert fabric is not None
    own = {"endpoints": fabric.endpoints, "node": identity.node, "page": identity.page_path}
    store.set(f"member/{session.worker}", json.dumps(own))
    pages = {}
    for member in generation.members:
        other = json.loads(store.get_within(f"member/{member}", MEMBERS_TIMEOUT_S))
        if member != session.worker:
            fabric.add_peers([(str(host), int(port)) for host, port in other["endpoints"]])
        if other["node"] == identity.node:
            pages[member] = str(other["page"])
    playing = session.worker in generation.ranks
    if playing and pages.keys() >= set(generation.ranks) and futex.available():
        others = [pages[worker] for worker in generation.ranks if worker != session.worker]
        gate = NodeGate(generation.number, identity.page_path, others)
        with session.lock:
            session.node_gate = gate


def connect_group(session: Session, group: Any) -> None:
    """Give one elastic group an inner group of the session's generation."""
    assert session.store is not None
    assert session.fabric is not None
    store = dist.PrefixStore(f"group/{group.key}", session.store)
    inner = session.fabric.connect(store, group.getRank(), group.size(), GROUP_TIMEOUT_S)
    group.connected(inner, session.page.generation)


class Recovery:
    """Carries out what the machine queued until training can go on."""

    def __init__(
        self,
        session: Session,
        receive: Callable[[ReceiveState], Copied],
        serve: Callable[[ServeState], None],
    ) -> None:
        self._session = session
        self._receive = receive
        self._serve = serve
        self._connect_s = 0.0
        self.in_step = False  # whether a step was begun that is served again now

    def run(self) -> Outcome:
        """Recover. Returns how the user's thread goes on; raises Released when everybody has finished."""
        session = self._session
        session.page.enter(Phase.WAITING)
        session.tell(SafePointReached())
        while True:
            action = session.next_action()
            match action:
                case Connect(generation=generation):
                    self._attempt(self._connect, generation)
                case CastVote(vote=vote):
                    self._attempt(self._vote, self._generation(), vote)
                case ServeState():
                    self._attempt(lambda generation, action: self._serve(action), self._generation(), action)
                case ReceiveState():
                    if self._attempt(self._copy, self._generation(), action):
                        return Outcome.RECEIVED
                case RedoStep():
                    return Outcome.REDO
                case ApplyUpdate():
                    return Outcome.ROLL
                case LoadCheckpoint(verdict=verdict):
                    # The controller restarts every rank from the script's own checkpoint.
                    session.say(f"rollback: {verdict.reason}")
                    session.strand()

    def _generation(self) -> Generation:
        generation = self._session.machine.generation
        assert generation is not None
        return generation

    def _attempt(self, work: Callable[..., None], generation: Generation, *arguments: Any) -> bool:
        """`work(generation, ...)`; a failure is a complaint unless a newer generation explains it."""
        session = self._session
        try:
            work(generation, *arguments)
        except UsageError:
            raise  # the script's fault: trying again would not help
        except (RuntimeError, OSError, KeepstepError, dist.DistStoreError) as error:
            lines = str(error).splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            with session.lock:
                if session.is_current(generation):
                    session.say(f"recovery failed: {reason}")
                    session.tell(CollectiveFailed(reason=reason))
            return False
        return True

    def _connect(self, generation: Generation) -> None:
        session = self._session
        started_s = time.monotonic()
        lent = generation.planned and session.worker in generation.donors
        if lent:
            session.lender.prove()
        elif session.lender.active:
            session.lender.end()
        session.groups.settle(poisoned=True)
        if session.fabric is not None:
            session.fabric.cut()
        session.groups.drain()
        session.groups.detach()
        resets.reset(session.protected.modules.values())
        open_fabric(session, generation)
        meet(session, generation)
        if session.worker in generation.ranks:  # a donor only lends its state
            for group in session.groups:
                connect_group(session, group)
        self._connect_s = time.monotonic() - started_s
        with session.lock:
            if session.is_current(generation):
                session.groups.settle(poisoned=False)
                session.tell(Connected(generation=generation.number))

    def _vote(self, generation: Generation, vote: Vote) -> None:
        session = self._session
        store = session.store
        assert store is not None
        started_s = time.monotonic()
        store.set(f"vote/{session.worker}", codec.encode(vote))
        votes = []
        for member in generation.members:
            other = codec.decode(store.get_within(f"vote/{member}", VOTE_TIMEOUT_S))
            if not isinstance(other, Vote) or other.worker != member:
                raise ProtectionError(f"member {member} voted with a {type(other).__name__}")
            votes.append(other)
        session.tell(VotesCounted(generation=generation.number, votes=tuple(votes)))
        verdict = session.machine.verdict
        if verdict is None or not session.is_current(generation):
            return
        session.resumption_due = True
        session.link.send(
            VerdictReached(
                worker=session.worker,
                generation=generation.number,
                target=verdict.target,
                course=verdict.courses[session.worker].value,
                reason=verdict.reason,
                connect_s=self._connect_s,
                vote_s=time.monotonic() - started_s,
                recomputed=0 if generation.planned and not self.in_step else None,
            )
        )

    def _copy(self, generation: Generation, action: ReceiveState) -> None:
        session = self._session
        copied = self._receive(action)
        session.link.send(
            StateReceived(
                worker=session.worker,
                generation=generation.number,
                transfer_s=copied.seconds,
                bytes=copied.bytes,
                sources=copied.sources,
                bit_exact=copied.bit_exact,
            )
        )
        if not copied.bit_exact:
            session.say("no record of this rank was found: the continuation is not bit for bit")

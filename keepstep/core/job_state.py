"""What the controller knows at one moment, and the small moves that change it and say so.

The rules that decide stand in `recovery`; the events that bring facts are taken in `job`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.core import placement
from keepstep.core.actions import (
    Action,
    Announce,
    EndJob,
    KillWorker,
    Persist,
    Release,
    Say,
    StandBy,
    StartWorker,
)
from keepstep.core.fingerprints import FingerprintBook
from keepstep.core.generations import generation_to_body
from keepstep.core.incident import Incident, Victim
from keepstep.core.job_config import JobConfig
from keepstep.core.membership import Membership, Standing, Worker
from keepstep.core.move_facts import Moves
from keepstep.core.node_facts import Link, NodeFacts, natural
from keepstep.core.policy import PolicyBook
from keepstep.core.replicas import ReplicaBook
from keepstep.core.types import Generation


@dataclass(slots=True, kw_only=True)
class Complaint:
    """The first complaint about the newest generation; decided on at `until_s`."""

    worker: int
    reason: str
    seen_s: float
    until_s: float


@dataclass(slots=True, kw_only=True)
class Waiting:
    """What is waited for, since when; said again at `next_say_s`, given up at `until_s`."""

    what: str
    since_s: float
    next_say_s: float
    until_s: float | None


@dataclass(slots=True, kw_only=True)
class SpareMark:
    """When a spare last proved itself, since when it is being asked again, and its free memory then."""

    proven_s: float
    asked_s: float | None = None
    free_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Ending:
    """The job will end with `exit_code`, at the latest at `until_s`.

    `awaits`: the worker whose exit status is the job's. None: until no process is left.
    """

    exit_code: int
    reason: str
    until_s: float
    awaits: int | None = None


@dataclass(slots=True, kw_only=True)
class JobState:
    """Facts and marks of time; `actions` collects what the present step wants done."""

    config: JobConfig
    members: Membership = field(default_factory=Membership)
    generations: list[Generation] = field(default_factory=list)
    fingerprints: FingerprintBook = field(default_factory=FingerprintBook)
    actions: list[Action] = field(default_factory=list)
    begun: bool = False
    # None of the generations counts: the world is to be started from the script's first line.
    restarting: bool = True
    published: int = 0
    setup_over: bool = False
    incident: Incident | None = None
    incident_count: int = 0
    resumed: set[int] = field(default_factory=set)
    gather_until_s: float | None = None
    park_until_s: float | None = None
    complaint: Complaint | None = None
    waiting: Waiting | None = None
    refill_at_s: float | None = None
    restarts: int = 0
    start_failures: int = 0
    same_map_streak: int = 0
    same_failures: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    last_exit_code: int = 1
    finishing: bool = False
    final_step: int = 0  # how many steps there were; 0 while unknown
    # Rank -> who died playing it with all steps done, when those whom a replacement needs had left or did leave.
    cut_short: dict[int, int] = field(default_factory=dict)
    release_at_s: float | None = None
    status_until_s: float | None = None
    ending: Ending | None = None
    stopping: Ending | None = None
    over: EndJob | None = None
    absent: set[str] = field(default_factory=set)  # nodes that an earlier controller knew
    absent_until_s: float | None = None
    ledger_lost: bool = False
    spare_marks: dict[int, SpareMark] = field(default_factory=dict)
    slow_links: dict[str, list[str]] = field(default_factory=dict)  # node -> where it was found too slow
    link_due_s: dict[str, float] = field(default_factory=dict)
    replicas: ReplicaBook = field(default_factory=lambda: ReplicaBook(0))
    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    looked_s: float = 0.0  # when the suspects were last looked at
    watch_due_s: float | None = None  # when the suspects were to be looked at again
    suspected: set[str] = field(default_factory=set)
    keepers: dict[str, str] = field(default_factory=dict)  # node -> the node that keeps its records
    shards: dict[int, str] = field(default_factory=dict)  # rank -> identity of the bytes it must hold
    ever: set[int] = field(default_factory=set)  # members of any generation so far
    _map: tuple[Generation | None, dict[int, int]] = (None, {})
    _gone: tuple[object, list[int]] = (None, [])
    _member_nodes: tuple[object, set[str]] = (None, set())
    _spares: tuple[object, list[Worker]] = (None, [])
    _twins: tuple[int, dict[str, list[int]]] = (-1, {})
    unkept: dict[int, str] = field(default_factory=dict)  # worker -> why its records are not held elsewhere
    self_checks: dict[int, dict[str, str]] = field(default_factory=dict)  # worker -> check that fails -> why
    twins_differ: str = ""
    moves: Moves = field(default_factory=Moves)
    observed: dict[int, int] = field(default_factory=dict)  # suspect -> its step when it was told (observe)

    policy: PolicyBook = field(init=False)
    policy_barred: set[tuple[str, int]] = field(default_factory=set)  # slots that the policy keeps out

    def __post_init__(self) -> None:
        self.policy = PolicyBook(self.config.policy)
        self.replicas = ReplicaBook(self.config.world_size)

    # ---- reading --------------------------------------------------------------------------------

    @property
    def newest(self) -> Generation | None:
        return self.generations[-1] if self.generations else None

    def is_member(self, worker: int) -> bool:
        """Whether the worker belongs to the generation that counts now."""
        return not self.restarting and worker in self.places

    @property
    def places(self) -> dict[int, int]:
        """Worker -> rank, over the members of the newest generation (a donor: the rank that it holds)."""
        newest = self.newest
        if self._map[0] is not newest:
            found = {} if newest is None else {worker: rank for rank, worker in enumerate(newest.ranks)}
            if newest is not None:
                retired = self.moves.retired
                found.update({donor: rank for donor, rank in newest.donors.items() if donor not in retired})
            self._map = (newest, found)
        return self._map[1]

    def forget_places(self) -> None:
        """A donor has retired: it is a member no more, though the map names it."""
        self._map, self._gone = (None, {}), (None, [])

    def gone(self) -> list[int]:
        """Members of the newest generation that are dead or on their way out."""
        if self.restarting or self.newest is None:
            return []
        key = (self.members.version, self.newest.number)
        if self._gone[0] != key:
            useless = [worker.number for worker in self.members.useless() if worker.number in self.places]
            self._gone = (key, sorted(useless, key=self.places.__getitem__))
        return self._gone[1]

    def rank_of(self, worker: int) -> int | None:
        return self.places.get(worker)

    def spares(self) -> list[Worker]:
        """Parked workers that may be given a rank, the best first. Once a member is never a spare again."""
        avoided = self.suspected | self.moves.draining.keys()
        key = (self.members.version, len(self.generations), frozenset(avoided))
        if self._spares[0] != key:
            parked = self.members.spares(self.ever)
            self._spares = (key, [spare for spare in parked if spare.node not in avoided])
        return self._spares[1]

    def suspects(self) -> list[NodeFacts]:
        """The nodes whose agents are silent or not connected."""
        return [self.nodes[name] for name in sorted(self.suspected)]

    def free_slots(self) -> list[tuple[str, int]]:
        """Where a worker can be started now: not on a node that may not hear of it, or is being drained."""
        free, avoided = self.members.free_slots(), self.suspected | self.moves.draining.keys()
        return [slot for slot in free if slot[0] not in avoided] if avoided else free

    def link(self, node: NodeFacts, link: Link) -> None:
        """How the controller stands with a node's agent from now on."""
        node.link = link
        if node.suspect:
            self.suspected.add(node.name)
        else:
            self.suspected.discard(node.name)

    def has_workers(self, node: str) -> bool:
        return bool(self.members.of_node(node))

    def has_members(self, node: str) -> bool:
        """Whether a rank is played on this node."""
        return any(self.is_member(worker.number) for worker in self.members.of_node(node))

    def member_nodes(self) -> set[str]:
        """The nodes on which ranks are played."""
        if self._member_nodes[0] != (key := (self.newest, len(self.moves.retired))):
            workers = self.members.workers
            names = {workers[number].node for number in self.current_members() if number in workers}
            self._member_nodes = (key, names)
        return self._member_nodes[1]

    def node_of_rank(self, rank: int) -> str:
        """Where a rank is played; "" when nobody plays it."""
        newest = self.newest
        worker = self.members.workers.get(newest.ranks[rank]) if newest is not None else None
        return worker.node if worker is not None and worker.useful else ""

    def twins_of(self, rank: int) -> list[int]:
        """Ranks that hold the same bytes, as far as shards are known."""
        if self._twins[0] != len(self.shards):
            groups: dict[str, list[int]] = {}
            for one, identity in sorted(self.shards.items()):
                groups.setdefault(identity, []).append(one)
            self._twins = (len(self.shards), groups)
        shard = self.shards.get(rank)
        return [] if shard is None else [one for one in self._twins[1][shard] if one != rank]

    def current_members(self) -> tuple[int, ...]:
        members = self.newest.members if self.newest is not None else ()
        return tuple(number for number in members if number not in self.moves.retired)

    def name(self, worker: int) -> str:
        """How the human reads of a worker: "rank 2: worker 7" or "spare worker 9"."""
        rank = self.rank_of(worker) if self.is_member(worker) else None
        return f"spare worker {worker}" if rank is None else f"rank {rank}: worker {worker}"

    def store_node(self, members: Collection[int]) -> str:
        """A node that will hold the store of a generation: one with a member, in order of names.

        Never one that is silent or not connected, where there is another.
        """
        workers = self.members.workers
        having = {workers[number].node for number in members if number in workers} & self.members.slots.keys()
        return min(having - self.suspected or having, key=natural, default="")

    # ---- small moves ----------------------------------------------------------------------------

    def say(self, text: str, level: str = "info") -> None:
        self.actions.append(Say(text=text, level=level))

    def persist(self, kind: str, body: Mapping[str, Any]) -> None:
        self.actions.append(Persist(kind=kind, body=body))

    def start_worker(self, node: str, slot: int, reason: str) -> int:
        """Returns the new worker's number."""
        worker = self.members.start(node, slot)
        # Written down first, so that a number is never given twice, whoever forgets.
        self.persist("note", {"about": "worker", "worker": worker.number, "node": node, "slot": slot})
        self.actions.append(StartWorker(worker=worker.number, node=node, slot=slot, reason=reason))
        return worker.number

    def kill(self, number: int, reason: str, grace_s: float = 0.0) -> None:
        worker = self.members.workers[number]
        if worker.alive:
            worker.standing = Standing.ENDING
            self.actions.append(KillWorker(worker=number, reason=reason, grace_s=grace_s))

    def release(self, workers: tuple[int, ...]) -> None:
        for number in workers:
            self.members.workers[number].released = True
        self.actions.append(Release(workers=workers))

    def stand_by(self, worker: Worker) -> None:
        """Tell a parked spare to build, as a rank that is never 0 where there is another."""
        if worker.stood_by:
            return
        worker.stood_by = True
        others = max(1, self.config.world_size - 1)
        rank = 0 if self.config.world_size == 1 else 1 + worker.number % others
        self.actions.append(StandBy(worker=worker.number, rehearse_rank=rank))

    def append(self, generation: Generation, reason: str, now_s: float) -> None:
        """Write the generation down; only then tell everybody."""
        before = self.newest
        self.moves.pending = self.moves.pending and generation.planned
        self.generations.append(generation)
        self.ever.update(generation.members)
        self.persist("generation", {**generation_to_body(generation), "reason": reason})
        replacements = {}
        old = (None,) * len(generation.ranks) if generation.fresh or before is None else before.ranks
        for rank, (was, number) in enumerate(zip(old, generation.ranks, strict=True)):
            if was != number:
                self.members.workers[number].standing = Standing.PLAYING
                replacements[rank] = number
        if generation.fresh:
            self.restarting, self.published, self.setup_over = False, 0, False
            self.replicas = ReplicaBook(self.config.world_size)
            self.shards.clear()
            self._twins = (-1, {})  # counted by size: another world may have as many
            self.twins_differ = ""
        self.resumed, self.complaint, self.waiting = set(), None, None
        self.gather_until_s = self.park_until_s = None
        if self.incident is not None:
            self.incident.decide(generation, replacements, now_s)
            self.persist("incident_phase", self.incident.body())
        self.say(f"generation {generation.number}: {reason}")
        self.announce(reason)
        for line in placement.crowded(self, [*replacements] if not generation.fresh else ()):
            self.say(f"{line}: one failure of it would take every copy", "warning")
            self.persist("note", {"about": "placement", "text": line, "generation": generation.number})
        for worker in self.spares():
            self.stand_by(worker)

    def announce(self, reason: str) -> None:
        """Tell every agent of the newest generation."""
        assert self.newest is not None
        self.actions.append(
            Announce(
                generation=self.newest,
                reason=reason,
                peers=placement.peers(self),
                keepers=placement.keepers(self),
                ahead=self.moves.pending,
            )
        )

    def open_incident(
        self, cause: str, reason: str, now_s: float, first_evidence_s: float | None, victim: Victim | None
    ) -> Incident:
        """A new incident, or one victim more for the one that is open."""
        if self.incident is None:
            self.incident_count += 1
            evidence_s = now_s if first_evidence_s is None else min(first_evidence_s, now_s)
            self.incident = Incident(
                number=self.incident_count,
                cause=cause,
                reason=reason,
                opened_s=now_s,
                first_evidence_s=evidence_s,
            )
            kind = "incident"
        else:
            kind = "incident_phase"
        if victim is not None:
            self.incident.victims.append(victim)
        self.persist(kind, self.incident.body())
        return self.incident

    def close_incident(self, now_s: float, resolution: str | None = None) -> Incident | None:
        incident, self.incident = self.incident, None
        if incident is not None:
            incident.close(now_s, resolution)
            self.persist("incident_closed", incident.body())
        self.same_map_streak = 0
        return incident

    def end(self, exit_code: int, reason: str, now_s: float) -> None:
        """The job is over, whatever is still running."""
        if self.over is not None:
            return
        self.close_incident(now_s, None if self.finishing else "unresolved")
        self.persist("end", {"exit_code": exit_code, "reason": reason})
        self.say(reason, "info" if exit_code == 0 else "error")
        self.over = EndJob(exit_code=exit_code, reason=reason)
        self.actions.append(self.over)

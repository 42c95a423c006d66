"""What the controller does with what ranks say of their state: keep it, say it in one line, answer for it.

The line comes once all ranks of a world have described themselves, and again after each recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.core.events import FingerprintTaken, StateDescribed
from keepstep.core.job_state import JobState
from keepstep.core.replica_words import replica_line
from keepstep.core.replicas import Holder, ReplicaBook

ABOUT = "state"  # the ledger's note that keeps the whole book


def state_described(state: JobState, event: StateDescribed) -> bool:
    """One rank's manifest. The last of them makes the table, which is said and written down: then True."""
    if not state.is_member(event.worker) or state.rank_of(event.worker) != event.rank:
        return False
    if not state.replicas.describe(event):
        return False
    state.persist("note", {"about": ABOUT, **state.replicas.body()})
    say_replicas(state)
    return True


def fingerprint_seen(state: JobState, event: FingerprintTaken) -> None:
    """One rank's digests, compared when all ranks are described."""
    if state.rank_of(event.worker) == event.rank:
        state.replicas.fingerprint(event)


def say_replicas(state: JobState) -> None:
    """The table in one line, once it is complete."""
    if state.replicas.complete:
        text, level = replica_line(state.replicas.table(holders(state)))
        state.say(text, level)


def holders(state: JobState) -> dict[int, Holder]:
    """By rank: the live worker that holds its state. One that is still receiving holds nothing yet."""
    if state.restarting or state.newest is None:
        return {}
    incident, found = state.incident, {}
    coming = {} if incident is None else incident.replacements
    for rank, number in enumerate(state.newest.ranks):
        worker = state.members.workers.get(number)
        arrives = coming.get(rank) == number and number not in state.resumed
        if worker is not None and (worker.useful or worker.finished) and not arrives:
            found[rank] = Holder(number, worker.node, _rack(state, worker.node))
    return found


def _rack(state: JobState, node: str) -> str:
    facts = state.nodes.get(node)
    return "" if facts is None else facts.labels.get("rack", "")


def replicas(state: JobState) -> dict[str, Any]:
    """What `keepstep replicas` shows of a running job."""
    generation = None if state.newest is None else state.newest.number
    return answer(state.replicas, holders(state), generation)


def answer(book: ReplicaBook, held_by: Mapping[int, Holder], generation: int | None) -> dict[str, Any]:
    """The table with its line; of a job that is still young, how many ranks have spoken."""
    table = book.table(held_by)
    line = (
        replica_line(table)[0]
        if book.complete
        else f"not known yet: {table['described_ranks']} of {book.world_size} ranks have made two updates"
    )
    return {"generation": generation, "line": line, **table}


def past_replicas(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The same from a ledger's (kind, body), oldest first: who held what in its last generation."""
    book, ranks, places, racks = ReplicaBook(0), [], {}, {}
    number: int | None = None
    for kind, body in entries:
        if kind == "job":
            book = ReplicaBook(int(body["world_size"]))
        elif kind == "generation":
            number, ranks = int(body["number"]), [int(worker) for worker in body["ranks"]]
            if body["fresh"]:
                book = ReplicaBook(book.world_size)
        elif kind == "note" and body.get("about") == ABOUT:
            book = ReplicaBook.load(body)
        elif kind == "note" and body.get("about") == "worker":
            places[int(body["worker"])] = str(body["node"])
        elif kind == "note" and body.get("about") == "node":
            racks[str(body["node"])] = str((body.get("labels") or {}).get("rack", ""))
    held_by = {}
    for rank, worker in enumerate(ranks):
        node = places.get(worker, "")
        held_by[rank] = Holder(worker, node, racks.get(node, ""))
    return answer(book, held_by, number)

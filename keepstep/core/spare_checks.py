"""Spares are proven before they count, and again from time to time: a spare that fails is ended, never used.

A worker tells what it found of itself before it parks (its device computes, its memory), and when it is
asked. Where there are several nodes its node's network is measured as well. A slot whose workers failed
twice is quarantined: nothing is started there any more.
"""

from __future__ import annotations

from keepstep.core.actions import CheckSpare, MeasureLink
from keepstep.core.events import LinkMeasured, SpareChecked
from keepstep.core.job_state import JobState, SpareMark
from keepstep.core.membership import Standing, Worker
from keepstep.core.replica_words import size
from keepstep.core.waiting import refill_later

FAILURES_UNTIL_QUARANTINE = 2
MEASUREMENTS_UNTIL_FAILURE = 2


def spare_checked(state: JobState, event: SpareChecked, now_s: float) -> None:
    """What a worker found of itself. Of one that has a rank by now it is no matter."""
    worker = state.members.workers.get(event.worker)
    if worker is None or worker.standing not in (Standing.STARTING, Standing.PARKED):
        return
    if not event.ok:
        _failed(state, worker, event.detail, now_s)
        return
    state.spare_marks[worker.number] = SpareMark(proven_s=now_s, free_bytes=event.free_bytes)
    _has_room(state, worker, now_s)


def link_measured(state: JobState, event: LinkMeasured, now_s: float) -> None:
    """How fast a node reaches another one. Slow twice (to two nodes, where there are): its spares fail."""
    least = state.config.least_link_bytes_per_s
    if not event.detail and event.bytes_per_s >= least:
        state.slow_links.pop(event.node, None)
        return
    found = event.detail or f"reaches {event.to} with {size(event.bytes_per_s)}/s only"
    slow = state.slow_links.setdefault(event.node, [])
    slow.append(event.to)
    if len(slow) < MEASUREMENTS_UNTIL_FAILURE:
        _measure(state, event.node, now_s, again=True)
        return
    del state.slow_links[event.node]
    for worker in [w for w in state.spares() if w.node == event.node and w.number in state.spare_marks]:
        _failed(state, worker, f"its node {found} (at least {size(least)}/s are needed)", now_s)


def state_size_learned(state: JobState, now_s: float) -> None:
    """How large a rank's state is has become known: spares without room for it are of no use."""
    for worker in state.spares():
        if worker.number in state.spare_marks:
            _has_room(state, worker, now_s)


def pursue_checks(state: JobState, now_s: float) -> None:
    """Ask spares that were proven long ago; give up those that do not answer."""
    every_s, config = state.config.spare_check_s, state.config
    several = len(state.members.slots) > 1 and state.setup_over
    for number, mark in list(state.spare_marks.items()):
        worker = state.members.workers[number]
        if worker.standing is not Standing.PARKED and worker.standing is not Standing.STARTING:
            del state.spare_marks[number]
        elif mark.asked_s is not None:
            if now_s >= mark.asked_s + config.spare_check_timeout_s:
                _failed(state, worker, f"no answer within {config.spare_check_timeout_s:.0f} s", now_s)
        elif every_s and worker.standing is Standing.PARKED and now_s >= mark.proven_s + every_s:
            mark.asked_s = now_s
            state.actions.append(CheckSpare(worker=number))
        elif several and worker.standing is Standing.PARKED:
            _measure(state, worker.node, now_s)


def check_marks(state: JobState) -> list[float | None]:
    """When `pursue_checks` has something to do."""
    config = state.config
    return [
        mark.proven_s + config.spare_check_s
        if mark.asked_s is None
        else mark.asked_s + config.spare_check_timeout_s
        for number, mark in state.spare_marks.items()
        if mark.asked_s is not None
        or (config.spare_check_s and state.members.workers[number].standing is Standing.PARKED)
    ]


def _has_room(state: JobState, worker: Worker, now_s: float) -> bool:
    """Whether a rank's state fits beside what a spare holds; a hot one has allocated it already."""
    mark, needed = state.spare_marks[worker.number], state.replicas.largest_bytes()
    if worker.readiness == "hot" or not mark.free_bytes or mark.free_bytes >= needed:
        return True
    found = f"{size(mark.free_bytes)} of memory free, the state of a rank has {size(needed)}"
    _failed(state, worker, found, now_s)
    return False


def _measure(state: JobState, node: str, now_s: float, *, again: bool = False) -> None:
    """From a spare's node to one that ranks play on; each node as seldom as spares are checked."""
    if not again and now_s < state.link_due_s.get(node, now_s):
        return
    others = sorted({w.node for w in state.members.useful()} - {node})
    if not others:
        return
    state.link_due_s[node] = now_s + (state.config.spare_check_s or float("inf"))
    tried = len(state.slow_links.get(node, ()))
    to = others[(sum(map(ord, node)) + tried) % len(others)]
    state.actions.append(MeasureLink(node=node, to=to))


def _failed(state: JobState, worker: Worker, found: str, now_s: float) -> None:
    """End a spare that cannot be relied on; the second failure takes its slot out of use."""
    where = f"slot {worker.slot} of {worker.node}"
    state.spare_marks.pop(worker.number, None)
    body = {"worker": worker.number, "node": worker.node, "slot": worker.slot, "reason": found}
    if state.config.observe:
        text = f"would end spare worker {worker.number} ({where}), which failed its check: {found}"
        state.persist("note", {"about": "would", "text": text, "reason": found})
        state.say(f"observe: {text}", "warning")
        return
    state.persist("note", {"about": "spare_check", **body})
    state.say(f"spare worker {worker.number} ({where}) failed its check and is not used: {found}", "warning")
    place = (worker.node, worker.slot)
    state.members.failed_checks[place] += 1
    if state.members.failed_checks[place] >= FAILURES_UNTIL_QUARANTINE:
        state.members.quarantined.add(place)
        state.persist("note", {"about": "quarantine", **body})
        state.say(
            f"{where} is quarantined: its workers failed {FAILURES_UNTIL_QUARANTINE} checks, none is started there "
            "any more",
            "error",
        )
    state.kill(worker.number, f"it failed its check: {found}")
    if not state.restarting:
        refill_later(state, now_s)

"""What members report: how far they are, what failed, what the verdict was, that training goes on."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.core.events import (
    Complained,
    VerdictReached,
)
from keepstep.core.job_state import Complaint, JobState
from keepstep.core.moves import enter_now, retire_donors
from keepstep.core.replica_rules import say_replicas
from keepstep.core.waiting import refill_later
from keepstep.core.world import restart_world


def counts(state: JobState, worker: int, generation: int) -> bool:
    """Whether a report comes from a member about the newest generation."""
    newest = state.newest
    return newest is not None and generation == newest.number and state.is_member(worker)


def learn_published(state: JobState, worker: int, published: int) -> None:
    """How many steps all ranks hold. Only members count: another world's steps mean nothing."""
    if not state.is_member(worker) or published <= state.published:
        return
    state.published = published
    if not state.setup_over and published >= state.config.setup_steps:
        assert state.newest is not None
        state.setup_over = True
        # A restarted controller must know that ranks may be replaced from now on.
        state.persist("note", {"about": "setup_over", "generation": state.newest.number})


def complained(state: JobState, event: Complained, now_s: float) -> None:
    worker = state.members.workers.get(event.worker)
    if worker is None or not state.is_member(event.worker) or state.newest is None:
        return
    worker.step = max(worker.step, event.step)
    if state.finishing:
        state.release((event.worker,))
        return
    if state.moves.pending and event.generation == state.newest.number - 1:
        # The switch cannot come through the gate any more: what failed is mended by entering it now.
        enter_now(state, f"{state.name(event.worker)} reports: {event.reason}")
    if event.generation != state.newest.number:
        return
    learn_published(state, event.worker, event.published)
    if state.complaint is None:
        until_s = now_s + state.config.complaint_grace_s
        state.complaint = Complaint(worker=event.worker, reason=event.reason, seen_s=now_s, until_s=until_s)


def progressed(state: JobState, published: int, steps: Mapping[int, int]) -> None:
    """`steps`: worker -> committed steps."""
    for number, step in steps.items():
        if state.is_member(number):
            state.members.workers[number].step = step
            learn_published(state, number, published)


def verdict_reached(state: JobState, event: VerdictReached, now_s: float) -> None:
    if not counts(state, event.worker, event.generation):
        return
    if state.moves.pending:
        enter_now(state, f"{state.name(event.worker)} has entered generation {event.generation}")
        if state.incident is not None:
            state.incident.announced_s = (
                now_s - event.connect_s - event.vote_s
            )  # until then it waited for its step
    if event.target is None:
        state.say(f"generation {event.generation}: {event.reason}", "error")
        incident = state.open_incident("complaint", event.reason, now_s, None, None)
        incident.learn_verdict(event)
        incident.steps_lost = max(incident.steps_lost, state.published)
        restart_world(state, "rollback", f"no live copy is left ({event.reason})", now_s)
        return
    if state.incident is not None:
        state.incident.learn_verdict(event)
    if event.target < state.published:
        lost = state.published - event.target
        text = f"generation {event.generation} goes back from step {state.published} to {event.target}"
        state.say(f"{text}: {lost} committed steps are lost ({event.reason})", "error")
        state.persist("note", {"about": "rollback", "text": text})
        state.published = event.target
        if state.incident is not None:
            state.incident.steps_lost += lost


def resumed(state: JobState, generation: int, steps: Mapping[int, int], now_s: float) -> None:
    """`steps`: worker -> committed steps."""
    told = {number: step for number, step in steps.items() if counts(state, number, generation)}
    if not told or state.newest is None:
        return
    for number, step in told.items():
        state.members.workers[number].step = step
        if state.incident is not None:
            state.incident.learn_resumed(number, state.rank_of(number), now_s)
    state.resumed.update(told)
    state.start_failures = 0
    if len(state.resumed) < len(state.newest.ranks):
        return  # the usual case, as often as there are ranks
    if not state.resumed.issuperset(state.newest.ranks) or state.gone():
        return
    incident = state.close_incident(now_s)
    if incident is None:  # an earlier controller's
        retire_donors(state)
        return
    total_s = incident.total_s() or 0.0
    state.say(
        f"incident {incident.number} is over ({incident.resolution}) after {total_s:.3f} s: training goes on "
        f"at step {max(told.values())}; committed steps lost {incident.steps_lost}, "
        f"steps computed again {incident.steps_recomputed}"
    )
    retire_donors(state)
    say_replicas(state)
    refill_later(state, now_s)

"""Whether a failure would be repaired: self-checks that fail switch protection off, never training.

A rank whose record cannot be kept would not be continued bit for bit, so its death ends the job as it would
without Keepstep; the other ranks stay protected. Twins that hold different bytes leave nobody to copy from:
then the whole job is unprotected. Nothing here stops a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.core.events import FingerprintTaken, SelfCheckFailed, SelfCheckPassed
from keepstep.core.job_state import JobState
from keepstep.core.replica_rules import fingerprint_seen

TORCH = "torch"  # the check of a worker whose PyTorch lacks a piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """`ranks`: those whose death would end the job; none named while `on` is False: all of them."""

    on: bool
    reason: str = ""
    ranks: tuple[int, ...] = ()


def protection(state: JobState) -> Protection:
    """What `status` says of the newest generation."""
    if state.config.observe:
        return Protection(on=False, reason="mode observe: failures are watched, nothing is done")
    if state.twins_differ:
        return Protection(on=False, reason=state.twins_differ)
    newest = None if state.restarting else state.newest
    failing = {
        state.places[worker]: reason
        for worker, reasons in state.self_checks.items()
        for reason in list(reasons.values())[:1]
        if newest is not None and worker in state.places
    }
    if not failing:
        return Protection(on=True)
    first = min(failing)
    more = f", and {len(failing) - 1} more ranks" if len(failing) > 1 else ""
    return Protection(on=False, reason=f"rank {first}: {failing[first]}{more}", ranks=tuple(sorted(failing)))


def unprotected(state: JobState, gone: Sequence[int]) -> str | None:
    """Why the death of these members cannot be repaired; None when it can."""
    found = protection(state)
    if found.on or (found.ranks and not any(state.self_checks.get(number) for number in gone)):
        return None
    return found.reason


def never_protected(state: JobState, gone: Sequence[int]) -> str | None:
    """Why these members could not be protected from their start: their PyTorch lacks what it takes."""
    return next((why for n in gone if (why := state.self_checks.get(n, {}).get(TORCH))), None)


def end_unprotected(state: JobState, why: str, now_s: float) -> None:
    """As without Keepstep: the death of a worker ends the job with its exit code."""
    death = state.incident.reason if state.incident is not None else "a member is gone"
    state.close_incident(now_s, "unprotected")
    state.end(state.last_exit_code or 1, f"{death}; protection is off ({why})", now_s)


def self_check_failed(state: JobState, event: SelfCheckFailed) -> None:
    """Told once, until it holds again."""
    failing = state.self_checks.setdefault(event.worker, {})
    known = event.check in failing
    if event.check == TORCH:  # one installation serves all of them: said once
        known = any(TORCH in others for others in state.self_checks.values())
    failing[event.check] = event.reason
    if known or event.worker not in state.members.workers:
        return
    _note(state, event.worker, event.check, event.reason)
    name = state.name(event.worker)
    state.say(
        f"protection off: {name}: {event.reason}. Training goes on; its death would end the job", "error"
    )


def self_check_passed(state: JobState, event: SelfCheckPassed) -> None:
    """A check that had failed holds again."""
    failing = state.self_checks.get(event.worker, {})
    if failing.pop(event.check, None) is None:
        return
    _note(state, event.worker, event.check, "")
    still = protection(state)
    outcome = "protection is on again" if still.on else f"protection stays off: {still.reason}"
    state.say(f"{state.name(event.worker)}: its {event.check} is kept again; {outcome}")


def fingerprint_taken(state: JobState, event: FingerprintTaken) -> None:
    """Twins must hold the same bytes. Which of two that differ is right nobody knows: no copy can be trusted."""
    if not state.is_member(event.worker):
        return
    fingerprint_seen(state, event)
    rank = state.rank_of(event.worker)
    if rank is not None and event.shard:
        state.shards[rank] = event.shard
    other = state.fingerprints.disagreement(event)
    if other is None:
        return
    text = (
        f"ranks {other.rank} (worker {other.worker}) and {event.rank} (worker {event.worker}) should hold "
        f"the same bytes after step {event.step}, but differ: silent corruption, or state that is not "
        f"replicated"
    )
    body = {"about": "fingerprint", "text": text, "step": event.step, "ranks": [other.rank, event.rank]}
    state.say(text, "error")
    state.persist("note", body)
    if not state.twins_differ and not state.config.observe:
        state.say(
            "protection off: a replacement would copy bytes that may be wrong. Training goes on", "error"
        )
    state.twins_differ = state.twins_differ or text


def _note(state: JobState, worker: int, check: str, reason: str) -> None:
    body = {"about": "self_check", "worker": worker, "check": check, "reason": reason}
    state.persist("note", body)

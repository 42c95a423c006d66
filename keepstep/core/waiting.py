"""What a job waits for is said, now and every so often; and no wait is endless."""

from __future__ import annotations

from keepstep.core.job_state import JobState, Waiting

NO_SPARE_EXIT_CODE = 75  # EX_TEMPFAIL: nothing is wrong with the script, try again with more machines


def wait_for(
    state: JobState, what: str, now_s: float, *, gives_up: bool, quiet_at_first: bool = False
) -> None:
    """Say what is waited for, now and every so often; end the job when it has been too long."""
    config = state.config
    until_s = now_s + config.spare_timeout_s if gives_up else None
    if state.waiting is None:
        state.waiting = Waiting(
            what=what, since_s=now_s, next_say_s=now_s + config.waiting_say_s, until_s=until_s
        )
        if not quiet_at_first:
            state.say(f"waiting for {what}", "warning")
        if until_s is None or until_s > now_s:
            return
    waiting = state.waiting
    if gives_up != (waiting.until_s is not None):
        waiting.until_s = until_s
    if what != waiting.what:
        waiting.what = what
        if not quiet_at_first:
            state.say(f"waiting for {what}", "warning")
    waited_s = now_s - waiting.since_s
    if waiting.until_s is not None and now_s >= waiting.until_s:
        state.end(
            NO_SPARE_EXIT_CODE, f"waited {waited_s:.0f} s for {what}: nothing is left to go on with", now_s
        )
    elif now_s >= waiting.next_say_s:
        limit = "" if waiting.until_s is None else f", giving up after {config.spare_timeout_s:.0f} s"
        state.say(f"still waiting for {what}, for {waited_s:.0f} s now{limit}", "warning")
        waiting.next_say_s = now_s + config.waiting_say_s


def waiting_marks(state: JobState) -> list[float | None]:
    """When something has to be said or given up."""
    return [state.waiting.next_say_s, state.waiting.until_s] if state.waiting is not None else []


def refill_later(state: JobState, now_s: float) -> None:
    """Spares are made good once training goes on, not before."""
    if state.refill_at_s is None:
        state.refill_at_s = now_s + state.config.refill_delay_s

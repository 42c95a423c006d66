"""How a process ended, as an exit code and in words."""

from __future__ import annotations

import signal


def exit_code_of(status: int | None) -> int:
    """The shell's exit code for a process status: 128 + signal, and 1 when it is unknown."""
    if status is None:
        return 1
    return status if status >= 0 else 128 - status


def say_status(status: int | None, oom_killed: bool = False) -> str:
    """A process status in words; None: nobody was there to see it."""
    why = " (the kernel ran out of memory)" if oom_killed else ""
    if status is None:
        return "is gone" + why
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}" + why

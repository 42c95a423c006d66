"""How many files an agent may hold open: every worker of a job connects to the one that holds a generation's store.

The agent raises its own soft limit to the hard one; its workers keep what they would have had without it.
"""

from __future__ import annotations

import contextlib
import resource

ENOUGH_FILES = 65_536

_inherited: tuple[int, int] | None = None


def raise_open_files() -> None:
    """Once, at the agent's start. What the machine refuses is left as it is."""
    global _inherited
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _inherited = _inherited or (soft, hard)


def give_back(pid: int) -> None:
    """A child that was just started: it gets the limit that this process was started with."""
    if _inherited is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _inherited)

"""A target that prepares itself stands back: it must not take the processor from those who train.

Only where it may come forward again afterwards, which the kernel allows to few; found out on a thread of its
own, since a thread's priority is its own.
"""

from __future__ import annotations

import os
import threading

BACK = 10

_steps_back: int | None = None


def _may_come_forward() -> bool:
    allowed = [False]

    def attempt() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, min(before + 1, 19))
            os.setpriority(os.PRIO_PROCESS, 0, before)
            allowed[0] = True
        except OSError:
            pass

    thread = threading.Thread(target=attempt, name="keepstep-niceness")
    thread.start()
    thread.join()
    return allowed[0]


def step_back() -> None:
    """The calling thread yields to others from now on, if that can be undone."""
    global _steps_back
    if _steps_back is None and _may_come_forward():
        _steps_back = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, min(_steps_back + BACK, 19))


def step_forward() -> None:
    """As it was before `step_back`, on the same thread."""
    global _steps_back
    before, _steps_back = _steps_back, None
    if before is not None:
        os.setpriority(os.PRIO_PROCESS, 0, before)

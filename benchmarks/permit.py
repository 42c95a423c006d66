"""A number in a file: so many steps may be done. Whoever conducts a job raises it, the job waits where it is reached.

What the job computes does not depend on the pauses.
"""

from __future__ import annotations

import time
from pathlib import Path

PAUSE_S = 0.005


def permit_steps(permit: Path, steps: int) -> None:
    """Replace the number at once, so that no reader sees half of it."""
    draft = permit.with_suffix(".draft")
    draft.write_text(str(steps))
    draft.rename(permit)


def pause(permit: Path | None, steps_done: int, limit_s: float) -> None:
    """Wait, between two steps, until more of them are permitted. Without a file nothing is waited for."""
    deadline = time.monotonic() + limit_s
    while permit is not None and int(permit.read_text()) <= steps_done:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step after {steps_done} was permitted for {limit_s:.0f} s")
        time.sleep(PAUSE_S)

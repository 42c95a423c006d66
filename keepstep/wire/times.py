"""Moments on the way between machines, whose monotonic clocks have nothing in common: sent as ages.

A moment of the sender's clock leaves as minus the seconds that have passed since; the receiver counts them
back from its own now. What the way takes (milliseconds) is lost.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_MOMENT = "first_evidence_s"


def aged(message: Any, now_s: float) -> Any:
    """The message as it is sent, `now_s` on the sender's clock."""
    moment = getattr(message, _MOMENT, None)
    return message if moment is None else dataclasses.replace(message, **{_MOMENT: min(0.0, moment - now_s)})


def placed(message: Any, now_s: float) -> Any:
    """The message as the receiver reads it, `now_s` on its own clock. A moment to come is now."""
    age = getattr(message, _MOMENT, None)
    return message if age is None else dataclasses.replace(message, **{_MOMENT: now_s + min(0.0, age)})

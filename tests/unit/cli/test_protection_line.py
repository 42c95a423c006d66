"""`keepstep status` says when a failure would not be repaired, and of whom."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.cli.live import progress_line, protection_line


def status(mode: str = "run", **shield: Any) -> dict[str, Any]:
    protection = {"on": True, "reason": "", "ranks": [], **shield}
    return {
        "mode": mode,
        "state": "running",
        "step": 4,
        "generation": 0,
        "waiting_for": None,
        "workers": [],
        "protection": protection,
    }


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (status(), ""),
        (status("observe", on=False, reason="mode observe"), "observe: failures are watched and told"),
        (status(on=False, reason="twins differ"), "protection off: twins differ"),
        (status(on=False, reason="full", ranks=[3]), "protection off for rank 3: full"),
        (status(on=False, reason="full", ranks=list(range(20))), "protection off for rank 0, 1, 2, 3, 4, 5, 6, 7, ...: full"),
        ({**status(), "protection": None}, ""),
    ],
)  # fmt: skip
def test_the_line_about_protection(picture: dict[str, Any], said: str) -> None:
    line = protection_line(picture)
    assert line.startswith(said) and bool(line) == bool(said)
    assert progress_line(picture).endswith(line)

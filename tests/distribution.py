"""Which test runs when, and where: the long ones first, and together what shares a job.

A test process (pytest-xdist's) takes one unit after the other. A unit is a class, whose tests share one job; or one
integration test; or a file of quick tests. The quick ones come last, so that no process ends long before the others.
"""

from __future__ import annotations

from typing import Any

import pytest

# What comes first has units of a minute and more. A path that stands nowhere here comes before the quick ones.
FIRST = ("tests/integration/test_failures.py", "tests/chaos", "tests/integration", "tests/sim", "tests/model")
QUICK = ("tests/integration/agent", "tests/integration/test_run_jobs.py", "tests/unit", "tests/scenarios")


def by_length(items: list[pytest.Item]) -> None:
    """Sort by the expected length of the unit; tests of one file stay in their order."""
    items.sort(key=lambda item: _place(item.nodeid))


def unit(nodeid: str) -> str:
    """The unit that a test belongs to."""
    path, _, name = nodeid.partition("::")
    if "::" in name:
        return f"{path}::{name.partition('::')[0]}"
    return path if path.startswith(QUICK) else nodeid


def scheduler(config: Any, log: Any) -> Any:
    """Hands units out in the order of collection, each to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # it would put the units with the most tests first
    return Units(config, log)


def _place(nodeid: str) -> int:
    for number, path in enumerate(QUICK):
        if nodeid.startswith(path):
            return len(FIRST) + 1 + number
    return next((number for number, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST))

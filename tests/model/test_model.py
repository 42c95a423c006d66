"""The shipped WorkerMachine, verdict and maps under every interleaving of small worlds.

`python -m tests.model --full` explores the larger worlds as well.
"""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.model import Model
from tests.model.worlds import FULL, HOLES, LONG_HOLES, QUICK


@pytest.mark.parametrize("name", QUICK)
def test_every_promise_holds_in_every_state(name: str) -> None:
    found = explore(Model(QUICK[name]))
    assert not found.broken, f"{name}: {found}"
    assert found.goals > 0


@pytest.mark.parametrize("name", [name for name in HOLES if name not in LONG_HOLES])
def test_without_its_rule_the_world_breaks_and_with_it_it_holds(name: str) -> None:
    hole = HOLES[name]
    found = explore(Model(hole.world, **hole.options))
    assert hole.finding in found.broken, f"without {name}: {found}"
    assert found.way, "a counter-example is told step by step"
    healed = explore(Model(hole.world))
    assert not healed.broken, f"with {name}: {healed}"


def test_every_world_and_every_hole_has_another_name() -> None:
    assert not set(QUICK) & set(FULL)
    assert set(HOLES) >= LONG_HOLES

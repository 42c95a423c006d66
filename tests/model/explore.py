"""Breadth-first search; the first broken promise is told with its shortest way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from keepstep.core import worker as worker_module
from keepstep.errors import InvariantError
from tests.model.model import Model
from tests.model.world import State


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search saw. `broken` is empty when every promise holds in every state."""

    states: int
    goals: int
    broken: str = ""
    way: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:3} {label}" for number, label in enumerate(self.way, 1))
        return f"{self.states} states, {self.goals} goals: {self.broken or 'every promise holds'}\n{steps}"


def explore(model: Model, limit: int = 2_000_000) -> Found:
    """Search all states, up to `limit`. Visited states are kept as 64-bit hashes of the whole state."""
    shipped = worker_module.verdict
    worker_module.verdict = model.decide  # cached: the same votes are counted in many states
    try:
        return _search(model, limit)
    finally:
        worker_module.verdict = shipped


def _search(model: Model, limit: int) -> Found:
    start = model.start()
    first = start.key()
    came: dict[int, tuple[int, str] | None] = {first: None}
    todo: deque[tuple[State, int]] = deque([(start, first)])
    goals = 0

    def found(broken: str, key: int | None = None, last: str = "") -> Found:
        way = [last] if last else []
        while key is not None and (step := came[key]) is not None:
            key, label = step
            way.append(label)
        return Found(states=len(came), goals=goals, broken=broken, way=tuple(reversed(way)))

    while todo:
        state, key = todo.popleft()
        progress = False
        try:
            for label, new, fault in model.moves(state):
                progress |= not fault
                new_key = new.key()
                if new_key in came and not new.bad:
                    continue
                broken = model.broken(new)
                if broken:
                    return found(broken, key, label)
                came[new_key] = (key, label)
                todo.append((new, new_key))
        except InvariantError as error:
            return found(f"the machine itself: {error}", key)
        if model.is_goal(state):
            goals += 1
        elif not progress:
            return found("no move is left: training does not resume", key)
        if len(came) > limit:
            return found(f"the limit of {limit} states was reached")
    return found("")

"""Which worker must hear what: the newest generation, who was ever a member, who is fenced.

Values only; it sends nothing. Fencing is derived: once a member and no longer one, never again.
"""

from __future__ import annotations

from typing import Any

from keepstep.core.actions import Announce, Release, StandBy
from keepstep.wire.changes import changed
from keepstep.wire.codec import as_json, from_json
from keepstep.wire.messages import AnnounceChange, Fenced


class Announcements:
    """What the controller has announced to this node so far."""

    def __init__(self) -> None:
        self.newest: Announce | None = None
        self.certain = (
            True  # False: out of the memory of an agent that died, which may lag behind its workers
        )
        # Pages and records of an earlier world (before a restart of every rank) say nothing about this one.
        self.fresh_since = 0
        self._standing_by: dict[int, StandBy] = {}
        self._released: set[int] = set()
        self._member_since: dict[int, int] = {}
        self._players: dict[int, dict[int, int]] = {}

    @property
    def generation(self) -> int | None:
        """The newest generation's number."""
        return None if self.newest is None else self.newest.generation.number

    def whole(self, news: Announce | AnnounceChange) -> Announce:
        """The announcement in full. Raises WireError when a change does not fit what is known here."""
        return changed(self.newest, news) if isinstance(news, AnnounceChange) else news

    def accept(self, announce: Announce) -> bool:
        """Note an announcement; a repeated one counts. False when a newer one is known."""
        generation = announce.generation
        if self.newest is not None and generation.number < self.newest.generation.number:
            return False
        self.newest, self.certain = announce, True
        if generation.fresh and generation.number > self.fresh_since:
            self.fresh_since = generation.number
            self._players.clear()
        for rank, worker in enumerate(generation.ranks):
            self._players.setdefault(rank, {})[worker] = generation.number
        for worker in generation.members:
            self._member_since.setdefault(worker, generation.number)
        return True

    def stand_by(self, action: StandBy) -> None:
        self._standing_by[action.worker] = action

    def release(self, worker: int) -> None:
        self._released.add(worker)

    def released(self, worker: int) -> bool:
        return worker in self._released

    def may_end(self, worker: int) -> bool:
        """Whether its end is nothing to wonder about: released, or fenced."""
        return worker in self._released or self.fenced(worker) is not None

    def standing_by(self, worker: int) -> bool:
        """Whether it is a spare: told so, and not promoted since."""
        return worker in self._standing_by and worker not in self._member_since

    def rank_of(self, worker: int) -> int | None:
        """The rank in the newest generation."""
        return None if self.newest is None else self.newest.generation.rank_of(worker)

    def fenced(self, worker: int) -> str | None:
        """Why a worker may not take part any more; None when it may."""
        if self.newest is None or worker not in self._member_since:
            return None
        generation = self.newest.generation
        if worker in generation.members:
            return None
        return f"worker {worker} has no place in generation {generation.number}: {self.newest.reason}"

    def news_for(self, worker: int) -> Announce | Fenced | None:
        """What the newest announcement means for a worker; None before the first."""
        reason = self.fenced(worker)
        return self.newest if reason is None else Fenced(reason=reason)

    def greetings(self, worker: int) -> list[Announce | Fenced | StandBy | Release]:
        """All that a worker missed before its connection was there, in order."""
        missed: list[Announce | Fenced | StandBy | Release] = []
        if self.standing_by(worker):
            missed.append(self._standing_by[worker])
        if (news := self.news_for(worker)) is not None:
            missed.append(news)
        if worker in self._released:
            missed.append(Release(workers=(worker,)))
        return missed

    def players(self, rank: int) -> list[int]:
        """Every worker that ever played a rank of this world, the newest generation's first."""
        found = self._players.get(rank, {})
        return sorted(found, key=lambda worker: found[worker], reverse=True)

    def played_in(self, rank: int, worker: int) -> int:
        """The newest generation in which a worker played a rank of this world; -1: never."""
        return self._players.get(rank, {}).get(worker, -1)

    def since_the_start(self, worker: int) -> bool:
        """Whether a worker was a member of this world's first generation."""
        return self._member_since.get(worker) == self.fresh_since

    def ranks_played(self, worker: int) -> list[int]:
        """The ranks that a worker ever played in this world."""
        return [rank for rank, workers in self._players.items() if worker in workers]

    def forget(self, worker: int) -> None:
        """A dead worker's page is gone: it no longer counts as a player."""
        for workers in self._players.values():
            workers.pop(worker, None)

    # ---- for the agent after this one -----------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {
            "newest": None if self.newest is None else as_json(self.newest),
            "fresh_since": self.fresh_since,
            "standing_by": [as_json(action) for action in self._standing_by.values()],
            "released": sorted(self._released),
            "member_since": list(self._member_since.items()),
            "players": [[rank, list(workers.items())] for rank, workers in self._players.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `to_state` described. Raises ValueError, KeyError, TypeError or WireError for anything else."""
        newest = None if state["newest"] is None else from_json(state["newest"])
        if newest is not None and not isinstance(newest, Announce):
            raise ValueError("the newest generation is no announcement")
        self.newest, self.certain = newest, False
        self.fresh_since = int(state["fresh_since"])
        self._standing_by = {action.worker: action for action in map(from_json, state["standing_by"])}
        self._released = set(state["released"])
        self._member_since = {int(worker): int(since) for worker, since in state["member_since"]}
        self._players = {
            int(rank): {int(w): int(g) for w, g in players} for rank, players in state["players"]
        }

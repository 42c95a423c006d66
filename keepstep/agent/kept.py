"""The records of other nodes' ranks, kept in this agent's memory so that the loss of a node costs none.

By rank and player: the newest three steps of each, and of a player that was replaced until its successor
has newer ones. What is kept for whom is the controller's affair (Announce.keepers); this takes what comes.
It does not outlive the agent's process: an agent that comes back is sent the newest records again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.wire.keeping import RecordSent

KEPT_STEPS = 3
# As far ahead as a successor's record must be before those of the player before it are dropped.
SUPERSEDED_STEPS = 2
MAX_KEPT_BYTES = 4 << 30

_StepKey = tuple[int, str]


@dataclass(slots=True)
class _Player:
    """What one worker sent, oldest step first."""

    generation: int = 0
    newest_step: int = -1
    steps: dict[_StepKey, dict[str, RecordSent]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(len(record.payload) for kinds in self.steps.values() for record in kinds.values())


class KeptRecords:
    """Bounded memory of records. `keep` says whether there was room."""

    def __init__(self, limit_bytes: int = MAX_KEPT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._ranks: dict[int, dict[int, _Player]] = {}
        self._fresh_since = 0
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Memory that the records take."""
        return self._bytes

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose records lie here."""
        return tuple(sorted(self._ranks))

    def keep(self, worker: int, record: RecordSent) -> bool:
        """Take a record; it replaces its namesake. False when it belongs to another world, or there is no room."""
        if record.generation < self._fresh_since:
            return False
        player = self._ranks.get(record.rank, {}).get(worker)
        key = (record.step, record.lineage)
        old = player.steps.get(key, {}).get(record.kind) if player is not None else None
        growth = len(record.payload) - (0 if old is None else len(old.payload))
        if self._bytes + growth > self._limit_bytes:
            self._drop_where(lambda other: other.newest_step + KEPT_STEPS < record.step)
        if self._bytes + growth > self._limit_bytes:
            return False
        players = self._ranks.setdefault(record.rank, {})
        player = players.setdefault(worker, player or _Player())
        kinds = player.steps.pop(key, {})  # written last: it is the newest now
        kinds[record.kind] = record
        player.steps[key] = kinds
        self._bytes += growth
        player.generation = max(player.generation, record.generation)
        player.newest_step = record.step
        while len(player.steps) > KEPT_STEPS:
            gone = player.steps.pop(next(iter(player.steps)))
            self._bytes -= sum(len(one.payload) for one in gone.values())
        self._drop_superseded(players, player)
        return True

    def announce(self, generation: int, fresh: bool, published: int) -> None:
        """A new generation: drop what belongs to another world, and what `published` has left behind.

        Every rank holds step `published`, so no record of an earlier one can be wanted again.
        """
        if fresh:
            self._fresh_since = max(self._fresh_since, generation)
        self._drop_where(
            lambda player: player.generation < self._fresh_since or player.newest_step < published
        )

    def of_rank(self, rank: int) -> list[tuple[int, int, RecordSent, bool]]:
        """(worker, generation, record, final) of every record of a rank, the newest player's first.

        `final`: the same worker sent a later step, so nothing about this one can be missing here.
        """
        found = []
        players = self._ranks.get(rank, {})
        for worker, player in sorted(players.items(), key=lambda item: item[1].generation, reverse=True):
            last = next(reversed(player.steps), None)
            for key, kinds in reversed(player.steps.items()):
                found += [
                    (worker, player.generation, record, key != last or record.kind == "start")
                    for record in kinds.values()
                ]
        return found

    def _drop_superseded(self, players: dict[int, _Player], newest: _Player) -> None:
        for worker, player in list(players.items()):
            if (
                player.generation < newest.generation
                and newest.newest_step >= player.newest_step + SUPERSEDED_STEPS
            ):
                self._drop(players, worker)

    def _drop_where(self, useless: Callable[[_Player], bool]) -> None:
        for players in self._ranks.values():
            for worker, player in list(players.items()):
                if useless(player):
                    self._drop(players, worker)
        self._ranks = {rank: players for rank, players in self._ranks.items() if players}

    def _drop(self, players: dict[int, _Player], worker: int) -> None:
        self._bytes -= players.pop(worker).bytes

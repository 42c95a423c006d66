"""A generation told as what changed since the one before: thousands of ranks stay where they are.

Pure functions over announcements; who was told what is the sender's business.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.core.actions import Announce
from keepstep.core.types import Generation
from keepstep.errors import WireError
from keepstep.wire.messages import AnnounceChange


def change_between(old: Announce, new: Announce) -> AnnounceChange | None:
    """What turns `old` into `new`; None where only the whole will do (another world)."""
    before, after = old.generation, new.generation
    if after.fresh or len(before.ranks) != len(after.ranks):
        return None
    return AnnounceChange(
        base=before.number,
        number=after.number,
        ranks={
            rank: now
            for rank, (was, now) in enumerate(zip(before.ranks, after.ranks, strict=True))
            if was != now
        },
        donors=after.donors,
        planned=after.planned,
        store=after.store,
        reason=new.reason,
        ahead=new.ahead,
        peers=_different(old.peers, new.peers),
        peers_gone=tuple(old.peers.keys() - new.peers.keys()),
        keepers=_different(old.keepers, new.keepers),
        keepers_gone=tuple(old.keepers.keys() - new.keepers.keys()),
    )


def changed(old: Announce | None, change: AnnounceChange) -> Announce:
    """The announcement that `change` stands for. Raises WireError when it does not fit `old`."""
    if old is None or old.generation.number != change.base:
        known = "none" if old is None else str(old.generation.number)
        raise WireError(f"a change of generation {change.base} does not fit: {known} is known here")
    ranks = list(old.generation.ranks)
    for rank, worker in change.ranks.items():
        if not 0 <= rank < len(ranks):
            raise WireError(f"a change names rank {rank} of {len(ranks)}")
        ranks[rank] = worker
    generation = Generation(
        number=change.number,
        ranks=tuple(ranks),
        donors=change.donors,
        planned=change.planned,
        store=change.store,
    )
    return Announce(
        generation=generation,
        reason=change.reason,
        peers=_merged(old.peers, change.peers, change.peers_gone),
        keepers=_merged(old.keepers, change.keepers, change.keepers_gone),
        ahead=change.ahead,
    )


def _different(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in new.items() if old.get(key) != value}


def _merged(old: Mapping[str, str], new: Mapping[str, str], gone: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in {**old, **new}.items() if key not in gone}

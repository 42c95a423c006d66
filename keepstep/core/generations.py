"""Which map follows from which: pure functions over the ledger's generations.

Fencing is not stored anywhere: who was once a member and is no longer one never comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keepstep.core.types import Generation


def fenced_workers(generations: Sequence[Generation]) -> frozenset[int]:
    """The workers that were members once and are none of the newest generation."""
    if not generations:
        return frozenset()
    ever = {worker for generation in generations for worker in generation.members}
    return frozenset(ever - set(generations[-1].members))


def fresh_generation(generations: Sequence[Generation], workers: Sequence[int], store: str) -> Generation:
    """Every rank starts at the script's first line, played by `workers` in order of rank."""
    return Generation(number=len(generations), ranks=tuple(workers), fresh=True, store=store)


def vacant_ranks(newest: Generation, gone: Collection[int], retired: Collection[int] = ()) -> tuple[int, ...]:
    """The ranks whose player is gone and that no live donor can take back."""
    back = {rank for donor, rank in newest.donors.items() if donor not in gone and donor not in retired}
    return tuple(rank for rank, worker in enumerate(newest.ranks) if worker in gone and rank not in back)


def succeeding_generation(
    newest: Generation,
    gone: Collection[int],
    spares: Sequence[int],
    store: str,
    retired: Collection[int] = (),
) -> Generation:
    """The next map without those who are gone: a live donor takes its rank back, else a spare does.

    Raises ValueError when there are fewer spares than vacant ranks.
    """
    gone = frozenset(gone)
    donors = {d: rank for d, rank in newest.donors.items() if d not in gone and d not in retired}
    waiting = list(spares)
    ranks = list(newest.ranks)
    for rank, worker in enumerate(newest.ranks):
        if worker not in gone:
            continue
        source = next((donor for donor, held in donors.items() if held == rank), None)
        if source is not None:
            ranks[rank] = source
            del donors[source]
        elif waiting:
            ranks[rank] = waiting.pop(0)
        else:
            raise ValueError(f"no spare for rank {rank}")
    return Generation(number=newest.number + 1, ranks=tuple(ranks), donors=donors, store=store)


def planned_generation(newest: Generation, targets: Mapping[int, int], store: str) -> Generation:
    """`targets`: rank -> who takes it over; its player stays a member, as a donor, until the target is ready."""
    ranks = tuple(targets.get(rank, worker) for rank, worker in enumerate(newest.ranks))
    donors = {newest.ranks[rank]: rank for rank in sorted(targets)}
    return Generation(number=newest.number + 1, ranks=ranks, donors=donors, planned=True, store=store)


def generation_to_body(generation: Generation) -> dict[str, Any]:
    """What the ledger keeps of a generation, as JSON takes it."""
    return {
        "number": generation.number,
        "ranks": list(generation.ranks),
        "donors": {str(worker): rank for worker, rank in generation.donors.items()},
        "planned": generation.planned,
        "fresh": generation.fresh,
        "store": generation.store,
    }


def generation_from_body(body: Mapping[str, Any]) -> Generation:
    """The generation that `generation_to_body` wrote."""
    return Generation(
        number=int(body["number"]),
        ranks=tuple(int(worker) for worker in body["ranks"]),
        donors={int(worker): int(rank) for worker, rank in body["donors"].items()},
        planned=bool(body["planned"]),
        fresh=bool(body["fresh"]),
        store=str(body["store"]),
    )

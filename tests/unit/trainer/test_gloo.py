"""A cut frees everybody, wherever in a collective it stands: gloo alone would forget some who wait."""

from __future__ import annotations

import random
import threading
import time

import torch
import torch.distributed as dist

from keepstep.trainer.gloo import GlooFabric

RANKS, ROUNDS, FREE_S = 3, 60, 20.0


def connected(round_number: int) -> tuple[list[GlooFabric], list[dist.ProcessGroup]]:
    fabrics = [GlooFabric("127.0.0.1") for _ in range(RANKS)]
    for fabric in fabrics:
        for other in fabrics:
            if other is not fabric:
                fabric.add_peers(other.endpoints)
    store = dist.PrefixStore(f"{round_number}", dist.HashStore())
    groups: list[dist.ProcessGroup | None] = [None] * RANKS

    def connect(rank: int) -> None:
        groups[rank] = fabrics[rank].connect(store, rank, RANKS, 30.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [group for group in groups if group is not None]
    assert len(made) == RANKS
    return fabrics, made


def train(group: dist.ProcessGroup, rank: int) -> None:
    """Collectives of several sizes until one fails."""
    tensors = [torch.full((size,), float(rank)) for size in (1, 3000, 100_000)]
    try:
        while True:
            for tensor in tensors:
                group.broadcast(tensor, 0).wait()
                group.allreduce(tensor).wait()
    except RuntimeError:
        return  # that is what a cut looks like


def test_whoever_stands_in_a_collective_is_free_after_a_cut() -> None:
    dice = random.Random(5)
    for number in range(ROUNDS):
        fabrics, groups = connected(number)
        running = [
            threading.Thread(target=train, args=(group, rank), daemon=True)
            for rank, group in enumerate(groups)
        ]
        for thread in running:
            thread.start()
        time.sleep(dice.uniform(0.0, 0.01))
        cutting = [threading.Thread(target=fabric.cut) for fabric in fabrics]
        for thread in cutting:
            thread.start()
        for thread in running:
            thread.join(FREE_S)
        assert not any(thread.is_alive() for thread in running), f"round {number}: a rank waits for ever"
        for thread in cutting:
            thread.join()
        del groups

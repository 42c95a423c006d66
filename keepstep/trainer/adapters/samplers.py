"""What samplers have in common under the names people give it: parts, epochs, ranks, generators.

Duck typing on purpose: many projects write their own DistributedSampler with the same attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import RandomSampler

from keepstep.errors import UsageError
from keepstep.trainer.adapters.rng import is_generator

_PART_NAMES = ("batch_sampler", "sampler", "_sampler", "base_sampler", "data_source")


def sampler_chain(loader: Any) -> list[Any]:
    """Batch sampler, sampler and the samplers they wrap, outermost first, each once."""
    found: list[Any] = []
    queue = [loader.batch_sampler, loader.sampler]
    while queue:
        part = queue.pop(0)
        if part is None or isinstance(part, (list, tuple, range)) or any(part is other for other in found):
            continue
        if hasattr(part, "__getitem__"):  # a dataset, not a sampler
            continue
        found.append(part)
        queue += [getattr(part, name, None) for name in _PART_NAMES]
    return found


def own_generators(loader: Any, samplers: Sequence[Any]) -> list[Any]:
    """Random generators that the loader or its samplers hold as attributes, each once."""
    found: list[Any] = []
    for owner in (loader, *samplers):
        for value in getattr(owner, "__dict__", {}).values():
            if is_generator(value) and not any(value is other for other in found):
                found.append(value)
    return found


def set_epoch(samplers: Sequence[Any], epoch: int) -> None:
    """Call `set_epoch(epoch)` on every sampler that has it."""
    for sampler in samplers:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def shards_by_rank(sampler: Any) -> bool:
    """True when the sampler serves one rank's share."""
    return type(getattr(sampler, "rank", None)) is int and _shares(sampler) is not None


def _shares(sampler: Any) -> int | None:
    for name in ("num_replicas", "world_size"):
        if type(value := getattr(sampler, name, None)) is int:
            return value
    return None


def set_sampler_rank(samplers: Sequence[Any], old: int, new: int, world: int) -> None:
    """Give every sharding sampler the share of rank `new`.

    Raises UsageError when the share of rank `old` cannot be explained by `old` and `world`.
    """
    for sampler in samplers:
        if shards_by_rank(sampler):
            sampler.rank = _share_of(sampler, old, new, world)


def _share_of(sampler: Any, old: int, new: int, world: int) -> int:
    """Ranks of one data-parallel share are either neighbours or a stride apart."""
    shares = _shares(sampler) or 1
    guesses = set()
    if shares <= world and world % shares == 0:
        if old // (world // shares) == sampler.rank:
            guesses.add(new // (world // shares))
        if old % shares == sampler.rank:
            guesses.add(new % shares)
    if len(guesses) != 1:
        raise UsageError(
            f"{type(sampler).__name__} serves share {sampler.rank} of {shares} at rank {old} of {world}; which one rank "
            f"{new} needs cannot be told: set it in the function given to init(on_rank_change=...)"
        )
    return int(guesses.pop())


def lone_sampler_warning(samplers: Sequence[Any], world_size: int) -> str | None:
    """One sentence when several ranks would be served the same data."""
    if world_size < 2 or any(shards_by_rank(sampler) for sampler in samplers):
        return None
    order = "in an order of its own" if any(isinstance(part, RandomSampler) for part in samplers) else "alike"
    return (
        f"the data loader does not shard by rank: every one of the {world_size} ranks goes through all samples, "
        f"{order}; use torch.utils.data.DistributedSampler unless that is meant"
    )

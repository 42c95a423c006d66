"""Twins compared: ranks of one replica set must hold the same bytes after the same step."""

from __future__ import annotations

from collections import OrderedDict

from keepstep.core.events import FingerprintTaken

KEPT_STEPS = 8


class FingerprintBook:
    """Remembers the digests of the last KEPT_STEPS steps and answers whether a new one fits."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, dict[str, FingerprintTaken]] = OrderedDict()
        self._told: set[tuple[int, str]] = set()

    def disagreement(self, event: FingerprintTaken) -> FingerprintTaken | None:
        """An earlier digest of the same shard and step that differs; told once per step and shard."""
        of_step = self._seen.setdefault(event.step, {})
        while len(self._seen) > KEPT_STEPS:
            oldest = min(self._seen)
            del self._seen[oldest]
            self._told = {key for key in self._told if key[0] != oldest}
        first = of_step.setdefault(event.shard, event)
        if first.digest == event.digest or (event.step, event.shard) in self._told:
            return None
        self._told.add((event.step, event.shard))
        return first

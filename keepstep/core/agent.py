"""When is a living worker given up? The judgement of one node's agent, from samples of its workers.

A worker is suspected when it is stopped (state T), or when it makes no progress in CPU, I/O and
collectives for longer than the job's own pace explains, while others wait for it. Slow is not
dead: whoever computes, reads or writes makes progress. It does not know how samples are taken,
and it kills nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STOPPED = "T"  # "t" is a debugger's stop: somebody is looking, that is no failure
BLOCKED_IN_KERNEL = "D"
# Here a script may be silent for long on its own account: it saves, evaluates, downloads.
PATIENT_PHASES = frozenset({"SETUP", "BLOCK_END", "BETWEEN", "ASIDE"})
# Here nobody can wait for the worker.
IDLE_PHASES = frozenset({"WAITING", "PARKED", "DONE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class VitalsConfig:
    """Limits of patience. Raises ValueError when one makes no sense.

    `stopped_s`: how long in state T. `floor_s`, `pace_factor`: silence is suspect after the larger
    of the floor and that many times the longest of the last steps. `patience_s`: instead of that in
    phases where a script may be silent, in the kernel's hands, and before any step time is known.
    `repeat_s`: a suspicion that lasts is told again, since a crashed controller may have lost it.
    `largest_gap_s`: time between two samples beyond this was not watched and counts for nothing.
    """

    stopped_s: float = 0.5
    floor_s: float = 10.0
    pace_factor: float = 20.0
    patience_s: float = 600.0
    largest_gap_s: float = 2.0
    repeat_s: float = 5.0
    least_cpu_s: float = 0.02
    least_cpu_share: float = 0.02
    least_io_bytes: int = 65_536
    kept_steps: int = 32

    def __post_init__(self) -> None:
        if self.floor_s < 10.0:
            raise ValueError(f"floor_s must be at least 10 s, not {self.floor_s}: slow is not dead")
        if self.stopped_s <= 0 or self.pace_factor < 1 or self.patience_s < self.floor_s:
            raise ValueError("stopped_s must be above 0, pace_factor at least 1, patience_s at least floor_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at one worker. `phase`: name of its page's phase. `others_wait`: they wait for it.

    `state`: the letter of /proc/PID/stat; `cpu_s` and `io_bytes` only ever grow, over all its threads.
    """

    worker: int
    state: str
    cpu_s: float
    io_bytes: int
    collectives: int
    step: int = 0
    phase: str = "STEP"
    phase_age_s: float = 0.0
    others_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A worker to give up, with what was seen; `since_s` is the first evidence (caller's clock)."""

    worker: int
    reason: str
    since_s: float
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Watch:
    """What is remembered of one worker: its last progress and since when it is stopped."""

    mark: Sample
    mark_s: float
    step: int
    step_s: float
    stopped_since_s: float | None = None
    told_s: float | None = None


class VitalsMachine:
    """Suspicion rules of one node: `step` takes all workers' samples of one moment."""

    def __init__(self, config: VitalsConfig | None = None) -> None:
        self.config = config or VitalsConfig()
        self._watches: dict[int, _Watch] = {}
        self._step_times_s: deque[float] = deque(maxlen=self.config.kept_steps)
        self._last_s: float | None = None

    def step(self, samples: Sequence[Sample], now_s: float) -> list[Suspicion]:
        """Look at every worker that still lives. `now_s` never goes back."""
        if self._last_s is not None and now_s - self._last_s > self.config.largest_gap_s:
            # The agent itself (or the machine) stood still: silence meanwhile proves nothing.
            self._watches.clear()
        self._last_s = now_s
        self._watches = {s.worker: self._watches[s.worker] for s in samples if s.worker in self._watches}
        found = []
        for sample in samples:
            watch = self._watches.setdefault(
                sample.worker, _Watch(mark=sample, mark_s=now_s, step=sample.step, step_s=now_s)
            )
            self._learn_pace(watch, sample, now_s)
            suspicion = self._stopped(watch, sample, now_s) or self._silent(watch, sample, now_s)
            due = watch.told_s is None or now_s - watch.told_s >= self.config.repeat_s
            if suspicion is not None and due:
                watch.told_s = now_s
                found.append(suspicion)
        return found

    def silence_limit_s(self, sample: Sample) -> float:
        """How long this worker may be silent while others wait for it."""
        if sample.phase in PATIENT_PHASES or sample.state == BLOCKED_IN_KERNEL or not self._step_times_s:
            return self.config.patience_s
        return max(self.config.floor_s, self.config.pace_factor * max(self._step_times_s))

    def _learn_pace(self, watch: _Watch, sample: Sample, now_s: float) -> None:
        # Up to its first commit a worker also imports, builds and compiles: that is no step's pace.
        if sample.step > watch.step > 0:
            self._step_times_s.append((now_s - watch.step_s) / (sample.step - watch.step))
        if sample.step != watch.step:
            watch.step, watch.step_s = sample.step, now_s

    def _stopped(self, watch: _Watch, sample: Sample, now_s: float) -> Suspicion | None:
        if sample.state != STOPPED:
            watch.stopped_since_s = None
            return None
        if watch.stopped_since_s is None:
            watch.stopped_since_s = now_s
        stopped_s = now_s - watch.stopped_since_s
        if stopped_s < self.config.stopped_s:
            return None
        return Suspicion(
            worker=sample.worker,
            reason=f"stopped (state T) for {stopped_s:.1f} s",
            since_s=watch.stopped_since_s,
            evidence=_evidence(sample, stopped_s),
        )

    def _silent(self, watch: _Watch, sample: Sample, now_s: float) -> Suspicion | None:
        if self._moves(watch, sample, now_s) or not sample.others_wait or sample.phase in IDLE_PHASES:
            watch.mark, watch.mark_s = sample, now_s
            if sample.state != STOPPED:
                watch.told_s = None
            return None
        silent_s, limit_s = now_s - watch.mark_s, self.silence_limit_s(sample)
        if silent_s <= limit_s:
            return None
        return Suspicion(
            worker=sample.worker,
            reason=(
                f"no CPU, I/O or collective for {silent_s:.1f} s (limit {limit_s:.1f} s) in phase "
                f"{sample.phase.lower()} while others wait"
            ),
            since_s=watch.mark_s,
            evidence=_evidence(sample, silent_s),
        )

    def _moves(self, watch: _Watch, sample: Sample, now_s: float) -> bool:
        """Whether there was progress since the mark; a heartbeat thread's crumbs are none."""
        config, mark = self.config, watch.mark
        if sample.state == STOPPED.lower():
            return True
        crumbs_s = max(config.least_cpu_s, config.least_cpu_share * (now_s - watch.mark_s))
        return (
            sample.collectives != mark.collectives
            or sample.step != mark.step
            or sample.phase != mark.phase
            or sample.cpu_s - mark.cpu_s >= crumbs_s
            or sample.io_bytes - mark.io_bytes >= config.least_io_bytes
        )


def waited_for(collectives: Mapping[int, int]) -> frozenset[int]:
    """The workers of one generation that entered fewer collectives than another: those are waited for."""
    most = max(collectives.values(), default=0)
    return frozenset(worker for worker, count in collectives.items() if count < most)


def _evidence(sample: Sample, lasted_s: float) -> dict[str, Any]:
    return {
        "state": sample.state,
        "lasted_s": round(lasted_s, 3),
        "cpu_s": sample.cpu_s,
        "io_bytes": sample.io_bytes,
        "collectives": sample.collectives,
        "step": sample.step,
        "phase": sample.phase,
        "phase_age_s": round(sample.phase_age_s, 3),
    }

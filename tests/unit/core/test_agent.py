"""Promises of the judgement: who is given up, and above all who is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.core.agent import Sample, Suspicion, VitalsConfig, VitalsMachine, waited_for

LOOK_S = 0.1


def watch(
    look: Callable[[float], Sample],
    seconds: float,
    machine: VitalsMachine | None = None,
    start_s: float = 0.0,
) -> list[Suspicion]:
    machine = machine or VitalsMachine()
    found = []
    for tick in range(int(seconds / LOOK_S) + 1):
        found += machine.step([look(tick * LOOK_S)], start_s + tick * LOOK_S)
    return found


def paced(step_s: float) -> VitalsMachine:
    """A machine that has seen ten steps of `step_s` by worker 9, just before time 0."""
    machine = VitalsMachine()
    for tick in range(int(10 * step_s / LOOK_S) + 1):
        past_s = tick * LOOK_S
        step = int(past_s / step_s + 1e-9)
        sample = Sample(worker=9, state="R", cpu_s=past_s, io_bytes=0, collectives=step, step=step)
        machine.step([sample], past_s - 10 * step_s)
    return machine


def still(**more) -> Sample:
    fields = {"worker": 1, "state": "S", "cpu_s": 5.0, "io_bytes": 100, "collectives": 7, "others_wait": True}
    return Sample(**{**fields, **more})


def test_a_stopped_worker_is_suspected_after_half_a_second() -> None:
    [found] = watch(lambda t: still(state="T", others_wait=False), 5)
    assert found.worker == 1 and found.since_s == 0 and "stopped (state T) for 0.5 s" in found.reason


def test_a_suspicion_that_lasts_is_told_again() -> None:
    assert len(watch(lambda t: still(state="T"), 13)) == 3


def test_a_stop_that_ends_early_is_forgotten() -> None:
    assert watch(lambda t: still(state="T" if t % 1 < 0.4 else "S"), 9) == []


def test_a_debuggers_stop_is_never_a_death() -> None:
    assert watch(lambda t: still(state="t"), 100, paced(0.1)) == []


def test_silence_while_others_wait_is_suspected_beyond_ten_seconds() -> None:
    [found] = watch(lambda t: still(), 12, paced(0.1))
    assert "no CPU, I/O or collective" in found.reason
    assert watch(lambda t: still(), 9.9, paced(0.1)) == []


def test_the_limit_follows_the_jobs_own_pace() -> None:
    assert watch(lambda t: still(), 39, paced(2.0)) == []
    assert len(watch(lambda t: still(), 45, paced(2.0))) == 1


def test_silence_while_nobody_waits_is_nobodys_business() -> None:
    assert watch(lambda t: still(others_wait=False), 1000, paced(0.1)) == []


@pytest.mark.parametrize("moving", ["cpu_s", "io_bytes", "collectives"])
def test_whoever_computes_reads_or_communicates_is_only_slow(moving: str) -> None:
    rate = {"cpu_s": 0.5, "io_bytes": 1e6, "collectives": 1.0}[moving]
    kind = float if moving == "cpu_s" else int
    assert watch(lambda t: still(**{moving: kind(10 + rate * t)}), 120, paced(0.1)) == []


def test_a_heartbeat_threads_crumbs_are_no_progress() -> None:
    assert watch(lambda t: still(cpu_s=5 + 0.001 * t, io_bytes=int(20 * t)), 30, paced(0.1))


@pytest.mark.parametrize("phase", ["ASIDE", "BETWEEN", "BLOCK_END", "SETUP"])
def test_rank_zero_may_save_for_half_a_minute(phase: str) -> None:
    assert watch(lambda t: still(phase=phase), 60, paced(0.1)) == []


def test_a_process_in_the_kernels_hands_gets_the_long_patience() -> None:
    assert watch(lambda t: still(state="D"), 60, paced(0.1)) == []


@pytest.mark.parametrize("phase", ["WAITING", "PARKED", "DONE"])
def test_who_only_waits_itself_is_not_suspected(phase: str) -> None:
    assert watch(lambda t: still(phase=phase), 1000, paced(0.1)) == []


def test_time_that_nobody_watched_counts_for_nothing() -> None:
    machine = paced(0.1)
    machine.step([still(state="T")], 0.1)
    assert machine.step([still(state="T")], 3600.0) == []


def test_before_any_step_the_long_patience_counts() -> None:
    assert watch(lambda t: still(), 60) == []


def test_the_one_behind_in_collectives_is_waited_for() -> None:
    assert waited_for({0: 8, 1: 7, 2: 8}) == {1}
    assert waited_for({0: 8, 1: 8}) == frozenset()
    assert waited_for({}) == frozenset()


def test_a_limit_under_ten_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match="slow is not dead"):
        VitalsConfig(floor_s=5)

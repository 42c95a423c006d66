"""Silence is called when an agent is silent, and never for the listener's own absence."""

from __future__ import annotations

import pytest

from keepstep.core.events import AgentHeard, AgentSilent
from keepstep.core.silence import Heard, SilenceWatch, heartbeat_s


def said(**last_s: float) -> dict[str, Heard]:
    return {node: Heard(last_s=at, heartbeat_s=0.25) for node, at in last_s.items()}


def watch_until(watch: SilenceWatch, end_s: float, start_s: float = 0.0, **last_s: float) -> list[object]:
    """Look ten times a second; nobody says anything."""
    found: list[object] = []
    for tenth in range(int(start_s * 10), int(end_s * 10) + 1):
        found += watch.step(said(**last_s), tenth / 10)
    return found


def test_a_silent_agent_is_called_once_and_called_back() -> None:
    watch = SilenceWatch()
    assert watch_until(watch, 1.0, a=0.0, b=0.9) == []
    (event,) = watch_until(watch, 1.5, 1.1, a=0.0, b=1.0)
    assert isinstance(event, AgentSilent) and event.node == "a" and event.silent_s == pytest.approx(1.1)
    assert watch.step(said(a=1.55, b=1.5), 1.6) == [AgentHeard(node="a")]
    assert watch.step(said(a=1.6, b=1.5), 1.7) == []


def test_a_silence_that_lasts_is_told_again_once_a_second() -> None:
    found = watch_until(SilenceWatch(), 4.5, a=0.0)
    silences = [event.silent_s for event in found if isinstance(event, AgentSilent)]
    assert silences == pytest.approx([1.1, 2.1, 3.1, 4.1], abs=0.11)


def test_a_listener_that_was_stopped_calls_nobody_silent() -> None:
    watch = SilenceWatch()
    watch_until(watch, 1.0, a=0.9)
    assert watch.step(said(a=0.9), 6.0) == [], "five seconds that were ours"
    assert watch_until(watch, 7.0, 6.1, a=0.9) == []
    (event,) = watch_until(watch, 7.2, 7.1, a=0.9)
    assert isinstance(event, AgentSilent) and event.silent_s < 1.2


def test_a_listener_that_was_stopped_still_knows_who_had_been_silent() -> None:
    watch = SilenceWatch()
    assert len(watch_until(watch, 1.5, a=0.0)) == 1
    assert watch.step(said(a=0.0), 9.0) == []
    assert watch.step(said(a=9.05), 9.1) == [AgentHeard(node="a")]


def test_who_shall_speak_seldom_may_be_silent_longer() -> None:
    watch = SilenceWatch(timeout_s=1.0)
    heard = {"a": Heard(last_s=0.0, heartbeat_s=1.0)}
    for tenth in range(41):
        assert watch.step(heard, tenth / 10) == []
    assert len(watch.step(heard, 4.1)) == 1


def test_an_agent_that_disconnects_is_forgotten() -> None:
    watch = SilenceWatch()
    assert len(watch_until(watch, 1.5, a=0.0)) == 1
    assert watch.step({}, 1.6) == []
    assert watch.step(said(a=1.65), 1.7) == [], "it is back on another connection: no news of silence"


def test_two_thousand_agents_speak_once_a_second_and_few_four_times() -> None:
    assert [heartbeat_s(count) for count in (0, 1, 500, 1000, 2000, 4000)] == [
        0.25,
        0.25,
        0.25,
        0.5,
        1.0,
        2.0,
    ]


def test_a_timeout_that_makes_no_sense_is_refused() -> None:
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="heartbeat_timeout_s"):
            SilenceWatch(value)

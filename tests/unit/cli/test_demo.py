"""The demo's own judgement: what it plans from a seed, what it calls identical, what it shows and refuses."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console

import keepstep
from keepstep.cli import demo
from keepstep.cli.charts import IncidentMark, draw_twin_runs
from keepstep.cli.demo_view import DemoView, trend
from keepstep.cli.jobs import Harm
from keepstep.cli.main import run as run_command
from keepstep.cli.reports import Final, Line, Reports
from keepstep.errors import UsageError


def reports(*, kill_after: int | None = None, digest: str = "aa") -> Reports:
    """Ten steps of two ranks, one step a second; after `kill_after` rank 1 is played by worker 2."""
    found = Reports()
    for step in range(10):
        struck = kill_after is not None and step > kill_after
        for rank in (0, 1):
            worker = 2 if struck and rank == 1 else rank
            line = Line(
                rank=rank,
                step=step,
                generation=int(struck),
                worker=worker,
                time_s=float(step) + (0.25 if struck else 0.0),
                values={"loss": 3.0 - 0.1 * step},
            )
            found.lines.setdefault(rank, []).append(line)
            if struck and rank not in found.commits:
                found.commits[rank] = [line]
    for rank in (0, 1):
        found.finals[rank] = Final(rank=rank, step=10, digest=digest, tensors={})
    return found


HARM = Harm(rank=1, worker=1, pid=4242, signal=signal.SIGKILL, at_s=4.5)
INCIDENT = {"phases_s": {"detect": 0.001, "resume": 0.2}, "steps_lost": 0, "steps_recomputed": 1}


def test_a_seed_repeats_the_choice_of_rank_and_moment() -> None:
    assert demo.Plan.draw(7, 80) == demo.Plan.draw(7, 80)
    plans = [demo.Plan.draw(seed, 80) for seed in range(200)]
    assert {plan.rank for plan in plans} == set(range(demo.RANKS))
    assert all(80 // 3 <= plan.step < 2 * 80 // 3 and 0 <= plan.fraction < 1 for plan in plans)


def test_equal_runs_are_judged_identical_with_the_incidents_costs() -> None:
    outcome = demo.judge(reports(), reports(kill_after=4), HARM, INCIDENT)
    assert outcome.as_json() == {
        "identical": True,
        "steps": 10,
        "committed_steps_lost": 0,
        "recomputed_steps": 1,
        "kill_to_next_new_step_s": 0.75,
        "phases_s": {"detect": 0.001, "resume": 0.2},
    }


def test_another_final_state_is_not_identical() -> None:
    assert not demo.judge(reports(), reports(kill_after=4, digest="ab"), HARM, INCIDENT).identical


@pytest.mark.parametrize(("digest", "lost", "code"), [("aa", 0, 0), ("ab", 0, 1), ("aa", 1, 1)])
def test_the_exit_code_is_0_only_when_equal_and_nothing_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, lost: int, code: int
) -> None:
    incident = {**INCIDENT, "steps_lost": lost}
    monkeypatch.setattr(demo, "run_struck", lambda *_: (reports(kill_after=4, digest=digest), HARM, incident))
    monkeypatch.setattr(demo, "run_undisturbed", lambda *_: reports())
    result = tmp_path / "result.json"
    assert run_command(["demo", "--out", str(tmp_path), "--json", str(result), "--seed", "1"]) == code
    written = json.loads(result.read_text())
    assert written["identical"] is (digest == "aa")
    assert written["committed_steps_lost"] == lost
    assert len(list(tmp_path.glob("*/loss.png"))) == 1


def test_a_run_too_short_for_a_kill_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["demo", "--steps", "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_checkout_it_says_where_the_examples_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepstep, "__file__", str(tmp_path / "site-packages" / "keepstep" / "__init__.py"))
    with pytest.raises(UsageError, match="clone the repository"):
        demo.find_example("gpt.py")


def test_two_demos_of_one_second_do_not_share_a_folder(tmp_path: Path) -> None:
    assert demo.new_folder(tmp_path) != demo.new_folder(tmp_path)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_ranks_spares_and_the_incident(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, height=40)
    struck = reports(kill_after=4)
    with DemoView(console, "a demo", ranks=2, steps=10) as view:
        view.spares({2: "hot"})
        view.reported([line for line in struck.lines[1] if line.generation == 0])
        view.struck(HARM)
        for rank in (0, 1):
            view.reported(struck.lines[rank])
        view.note("over", "green")
    text = out.getvalue()
    for part in ("a demo", "SIGKILL sent to rank 1: worker 1, pid 4242", "over", "hot"):
        assert part in text
    assert ("taken over from worker 1" in text) is terminal


def test_a_trend_goes_from_the_lowest_bar_to_the_highest() -> None:
    assert trend([]) == ""
    assert trend([1.0, 1.0]) == "▁▁"
    assert trend([3.0, 2.0, 1.0])[0] == "█"
    assert trend([3.0, 2.0, 1.0])[-1] == "▁"


def test_the_chart_is_a_png_of_some_size(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "loss.png"
    draw_twin_runs(
        path,
        title="two runs",
        undisturbed=reports(),
        struck=reports(kill_after=4),
        mark=IncidentMark(step=5, rank=1, lasted_s=0.75),
        identical=True,
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000

"""What `status` and `incidents` tell of a job that has ended, from its ledger alone."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from keepstep.cli.main import run
from keepstep.controller.incidents import IncidentBook
from keepstep.controller.ledger import Ledger
from keepstep.core.actions import Persist
from keepstep.core.events import (
    AgentJoined,
    Progressed,
    Resumed,
    StopRequested,
    Ticked,
    VerdictReached,
    WorkerExited,
    WorkerParked,
)
from keepstep.core.job import JobConfig, JobMachine


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The ledger that the shipped machine writes for one killed rank."""
    machine = JobMachine(JobConfig(world_size=2, spares=1, job="story"))
    events = [
        (0.0, AgentJoined(node="a", slots=3)),
        *((1.0, WorkerParked(worker=number, readiness="warm")) for number in range(3)),
        (5.0, Ticked()),
        (6.0, Progressed(worker=0, generation=0, step=9, published=9)),
        (10.0, WorkerExited(worker=1, status=-9, step=9, published=9, first_evidence_s=9.75)),
        (10.5, Ticked()),
        *(
            (
                11.0,
                VerdictReached(
                    worker=number,
                    generation=1,
                    target=9,
                    course="keep",
                    reason="nobody passed the gate",
                    connect_s=0.125,
                    vote_s=0.0625,
                ),
            )
            for number in (0, 2)
        ),
        *((12.0, Resumed(worker=number, generation=1, step=10)) for number in (0, 2)),
        (20.0, StopRequested(signal="SIGTERM", hard=True)),
        *((21.0, WorkerExited(worker=number, status=-9)) for number in (0, 2, 3)),
        (60.0, Ticked()),
    ]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for now_s, event in events:
            for action in machine.step(event, now_s):
                if isinstance(action, Persist):
                    ledger.append(action.kind, action.body)
    return tmp_path


def test_an_incident_is_listed_with_its_price(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["incidents", "--run", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert "rank 1: worker 1 was ended by SIGKILL" in told
    assert "rebuilt from live copies: 2.250 s, 0 steps lost, 1 recomputed" in told


def test_one_incident_is_told_in_full_with_bars(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["incidents", "show", "1", "--run", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    bars = {line.split()[0]: line for line in lines if "█" in line}
    assert "0.2500" in bars["detect"] and "0.1250" in bars["connect"] and "0.0625" in bars["vote"]
    assert bars["detect"].count("█") > bars["connect"].count("█") > bars["vote"].count("█")
    text = "\n".join(lines)
    assert "decision    generation 1: rank 1 to worker 2" in text
    assert "nobody passed the gate" in text and "total" in text and "2.250 s" in text


def test_json_is_the_same_before_and_after_show(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["incidents", "--json", "--run", str(run_dir)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert run(["incidents", "--run", str(run_dir), "show", "1", "--json"]) == 0
    assert listed == [json.loads(capsys.readouterr().out)]
    assert list(listed[0]["phases_s"]) and listed[0]["state"] == "closed"


def test_an_incident_that_is_not_there_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["incidents", "show", "2", "--run", str(run_dir)]) == 2
    assert "no incident 2" in capsys.readouterr().err


def test_the_status_of_an_ended_job_comes_from_its_ledger(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", str(run_dir), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["live"] is False and status["state"] == "failed" and status["exit_code"] == 143
    assert [(one["rank"], one["worker"], one["slot"]) for one in status["workers"]] == [(0, 0, 0), (1, 2, 2)]
    assert status["incidents"] == 1 and status["generation"] == 1
    assert run(["status", str(run_dir)]) == 0
    assert "ended with exit code 143: stopped by SIGTERM" in capsys.readouterr().out


def test_a_stale_address_does_not_hide_the_ledger(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A controller that was killed leaves controller.json; its id may belong to another process by now."""
    (run_dir / "token").write_text("t")
    address = {"url": "http://127.0.0.1:9", "job": "story", "pid": 1, "token_file": "token"}
    (run_dir / "controller.json").write_text(json.dumps(address))
    assert run(["status", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["live"] is False


def test_verify_names_the_first_wrong_entry(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["incidents", "--verify", "--run", str(run_dir)]) == 0
    assert "the chain holds" in capsys.readouterr().err
    db = sqlite3.connect(run_dir / "ledger.sqlite")
    db.execute("DROP TRIGGER entries_are_never_changed")
    db.execute("UPDATE entries SET body = '{}' WHERE sequence = 3")
    db.commit()
    db.close()
    assert run(["incidents", "--verify", "--run", str(run_dir)]) == 1
    assert "entry 3 (note) was altered" in capsys.readouterr().err


def test_a_newer_ledger_is_refused_in_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = sqlite3.connect(run_dir / "ledger.sqlite")
    db.execute("PRAGMA user_version = 9")
    db.close()
    script = run_dir / "train.py"
    script.write_text("")
    for command in (
        ["status", str(run_dir)],
        ["incidents", "--run", str(run_dir)],
        ["run", "--log-dir", str(run_dir), str(script)],
    ):
        assert run(command) == 2
        said = capsys.readouterr().err
        assert "newer Keepstep" in said and said.count("\n") == 1


def test_later_entries_complete_earlier_ones() -> None:
    book = IncidentBook()
    book.add("incident", {"number": 1, "reason": "r", "phases_s": {"detect": 0.5}}, 10.0)
    book.add("incident_phase", {"number": 1, "phases_s": {"decide": 0.25}}, 11.0)
    assert book.newest() == {
        "number": 1,
        "state": "open",
        "time_s": 10.0,
        "reason": "r",
        "phases_s": {"detect": 0.5, "decide": 0.25},
    }
    book.add("incident_closed", {"number": 1, "total_s": 2.0}, 12.0)
    book.add("note", {"number": 7}, 12.0)
    assert book.count() == 1 and book.all()[0]["state"] == "closed" and book.all()[0]["total_s"] == 2.0

"""Which runs may be taken up by another controller, and which are refused in one line."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import pytest

from keepstep.controller import resume
from keepstep.controller.ledger import Ledger
from keepstep.controller.rundir import RunDirectory
from keepstep.core.actions import Announce, Persist, StartWorker
from keepstep.core.events import AgentJoined, Ticked, WorkerParked
from keepstep.core.job import JobMachine
from keepstep.core.job_config import JobConfig
from keepstep.errors import UsageError
from keepstep.wire.messages import JobSpec

SPEC = JobSpec(
    job="j-1", script="train.py", args=("--lr", "1"), world_size=2, working_dir="/w", env={"A": "b"}
)
CONFIG = JobConfig(world_size=2, job="j-1")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two ranks whose controller was killed when both had started."""
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.make()
    run_dir.publish_address("http://127.0.0.1:7", "j-1", "secret")
    resume.keep(run_dir, SPEC, "127.0.0.1", 7)
    machine = JobMachine(CONFIG)
    actions = machine.step(AgentJoined(node="n", slots=2), 1.0)
    actions += machine.step(WorkerParked(worker=0, readiness="warm"), 2.0)
    actions += machine.step(WorkerParked(worker=1, readiness="warm"), 3.0)
    assert sum(isinstance(action, StartWorker) for action in actions) == 2
    assert any(isinstance(action, Announce) for action in actions)
    with Ledger(run_dir.ledger) as ledger:
        ledger.append_all([(a.kind, a.body) for a in actions if isinstance(a, Persist)])
    return run_dir


def test_the_next_controller_knows_map_token_address_and_job(run: RunDirectory) -> None:
    described = dataclasses.replace(
        SPEC, job="another-name-by-default", working_dir="/elsewhere", spares=3, env={}
    )
    taken = resume.take_up(run, described)
    assert (taken.host, taken.port, taken.token) == ("127.0.0.1", 7, "secret")
    assert taken.spec == dataclasses.replace(SPEC, spares=3), "what may be given anew is, the rest stays"
    machine = taken.machine(dataclasses.replace(CONFIG, spares=3))
    machine.step(Ticked(), 1.0)
    assert [row["worker"] for row in machine.snapshot()["ranks"]] == [0, 1]
    taken.ledger.append("note", {"text": "the chain goes on"})
    assert taken.ledger.verify().flaw is None
    taken.ledger.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"script": "other.py"}, "there script is 'train.py', not 'other.py'"),
        ({"args": ()}, r"there args is \('--lr', '1'\), not \(\)"),
        ({"world_size": 4}, "there world_size is 2, not 4"),
    ],
)
def test_another_job_is_told_so(run: RunDirectory, changed: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        resume.take_up(run, dataclasses.replace(SPEC, **changed))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there job is 'j-1', not 'j-2'"):
        resume.take_up(run, SPEC, job="j-2")
    resume.take_up(run, SPEC, job="j-1").ledger.close()  # and no lock was left behind


def test_what_has_ended_is_not_taken_up(run: RunDirectory) -> None:
    with Ledger(run.ledger) as ledger:
        ledger.append("end", {"exit_code": 3, "reason": "over"})
        ledger.append("note", {"text": "evidence that came late"})
        assert resume.is_over(ledger)
    with pytest.raises(UsageError, match=r"it has ended \(exit code 3\): choose another --log-dir"):
        resume.take_up(run, SPEC)


def test_two_controllers_never_write_one_ledger(run: RunDirectory) -> None:
    first = resume.take_up(run, SPEC)
    with pytest.raises(UsageError, match="is being written by another controller"):
        resume.take_up(run, SPEC)
    first.ledger.close()


def test_a_ledger_that_was_altered_is_no_ground_to_stand_on(run: RunDirectory) -> None:
    with sqlite3.connect(run.ledger) as db:
        db.execute("DROP TRIGGER entries_are_never_changed")
        db.execute("UPDATE entries SET body = '{}' WHERE sequence = 2")
    with pytest.raises(UsageError, match="is damaged, so nobody goes on from it: entry 2"):
        resume.take_up(run, SPEC)


def test_without_its_token_or_its_description_a_run_cannot_go_on(run: RunDirectory) -> None:
    run.token_file.unlink()
    with pytest.raises(UsageError, match=r"the token of the run in .* is gone .*: give it with --token-file"):
        resume.take_up(run, SPEC)
    resume.take_up(run, SPEC, token="given").ledger.close()
    run.job_file.write_text("{}")
    with pytest.raises(UsageError, match=r"already holds a run that cannot be taken up \(job.json"):
        resume.take_up(run, SPEC, token="given")


def test_the_description_is_its_owners_alone(run: RunDirectory) -> None:
    assert run.job_file.stat().st_mode & 0o777 == 0o600

"""Promises of the controller's machine: suspicion, complaints and verdicts, and what an incident tells of its costs."""

from __future__ import annotations

import json

import pytest

from keepstep.core.actions import (
    EndJob,
    KillWorker,
)
from keepstep.core.events import (
    FingerprintTaken,
    Resumed,
    StateReceived,
    WorkerExited,
    WorkerParked,
    WorkerSuspected,
)
from tests.unit.core.jobs import complain, learn, of, started, training

# ---- suspicion and complaints -------------------------------------------------------------------


def test_a_stopped_rank_is_fenced_and_killed_with_its_evidence_kept() -> None:
    job = training()
    [kill] = of(
        KillWorker,
        job.tell(WorkerSuspected(worker=2, reason="stopped for 0.6 s", evidence={"state": "T"})),
    )
    assert kill.worker == 2 and kill.grace_s == 0
    job.let_time_pass(0.02)
    assert job.generation.ranks == (0, 1, 3)
    job.die(2)
    job.resume_all(step=6)
    [closed] = job.persisted("incident_closed")
    assert closed["cause"] == "suspicion" and closed["evidence"] == {"2": {"state": "T"}}


def test_a_complaint_without_a_death_keeps_the_map() -> None:
    job = training()
    complain(job, 1)
    assert job.let_time_pass(0.1) == []
    job.let_time_pass(0.1)
    assert (job.generation.number, job.generation.ranks) == (1, (0, 1, 2))
    job.resume_all(step=6)
    assert job.persisted("incident_closed")[0]["resolution"] == "same_map"


def test_a_death_within_the_grace_explains_the_complaint() -> None:
    job = training()
    complain(job, 0)
    seen_s = job.now_s
    job.let_time_pass(0.1)
    job.die(1)
    job.let_time_pass(0.5)
    assert (job.generation.number, job.generation.ranks) == (1, (0, 3, 2))
    assert job.persisted("incident")[0]["first_evidence_s"] == seen_s


def test_an_older_complaint_is_ignored() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    complain(job, 0, generation=0)
    job.let_time_pass(1)
    assert job.generation.number == 1


def test_generations_that_come_to_nothing_end_the_job() -> None:
    job = training(same_map_limit=2)
    for _ in range(3):
        complain(job, 1)
        job.let_time_pass(0.2)
    assert "2 generations in a row came to nothing" in of(EndJob, job.past)[0].reason


def test_a_complaint_in_setup_restarts_the_world() -> None:
    job = started()
    complain(job, 1)
    assert len(of(KillWorker, job.let_time_pass(0.2))) == 4


def test_a_late_report_of_an_old_generation_does_not_close_the_incident() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    for worker in (0, 1, 2):
        job.tell(Resumed(worker=worker, generation=0, step=6))
    assert job.persisted("incident_closed") == []


def test_a_complaint_that_fell_due_does_not_spin_while_deaths_are_gathered() -> None:
    job = training(gather_s=5.0)
    complain(job, 0)
    job.die(1)
    job.now_s += 1.0
    due_s = job.machine.next_deadline_s(job.now_s)
    assert due_s is not None and due_s > job.now_s


def test_time_alone_never_asks_for_endless_ticks() -> None:
    job = training(spares=0, max_restarts=0)
    complain(job, 0)
    job.tell(WorkerExited(worker=1, status=-9))
    complain(job, 2)
    job.let_time_pass(500)


# ---- verdicts and costs -------------------------------------------------------------------------


def test_the_incident_tells_its_phases_and_costs() -> None:
    job = training()
    job.die(1, step=7, published=6, first_evidence_s=job.now_s - 0.004)
    job.let_time_pass(0.02)
    learn(job, 0, 7), learn(job, 2, 7), learn(job, 3, 7, course="receive")
    job.tell(StateReceived(worker=3, generation=1, transfer_s=0.05, bytes=1000, sources=(0, 2)), 0.1)
    job.resume_all(step=8)
    [closed] = job.persisted("incident_closed")
    assert (closed["resolution"], closed["steps_lost"], closed["steps_recomputed"]) == ("rebuilt", 0, 1)
    assert closed["bit_exact"] and closed["replacements"] == {"1": 3}
    phases = closed["phases_s"]
    assert phases["connect"] == 0.02 and phases["transfer"] == 0.05 and phases["detect"] >= 0.004
    assert sum(phases.values()) == pytest.approx(closed["total_s"])
    json.dumps(closed)


def test_a_verdict_without_a_live_copy_starts_the_script_again_and_says_so() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    learn(job, 0, None, course="rollback")
    assert {k.worker for k in of(KillWorker, job.last)} == {0, 2, 3}
    for worker in (0, 2, 3):
        job.die(worker)
    for worker in range(4, 8):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    assert job.generation.fresh
    job.resume_all(step=1)
    [closed] = job.persisted("incident_closed")
    assert (closed["resolution"], closed["steps_lost"], closed["bit_exact"]) == ("rollback", 5, False)
    assert "no live copy is left" in job.said()


def test_a_target_below_the_published_step_is_never_silent() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    learn(job, 0, 4)
    assert "goes back from step 5 to 4: 1 committed steps are lost" in job.said()


def test_twins_that_differ_are_named() -> None:
    job = training()
    for worker, digest in ((0, "aa"), (1, "aa"), (2, "bb")):
        job.tell(FingerprintTaken(worker=worker, rank=worker, step=4, shard="s", digest=digest))
    assert "silent corruption, or state that is not replicated" in job.said()
    assert [n["ranks"] for n in job.persisted("note") if n["about"] == "fingerprint"] == [[0, 2]]

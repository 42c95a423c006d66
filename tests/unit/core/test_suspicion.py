"""Who is given up on an agent's suspicion, and who only waits."""

from __future__ import annotations

from keepstep.core.actions import Announce, KillWorker
from keepstep.core.events import WorkerParked, WorkerSuspected
from tests.unit.core.jobs import of, training


def suspicion(worker: int, state: str = "S") -> WorkerSuspected:
    reason = "no CPU, I/O or collective for 10.0 s"
    return WorkerSuspected(worker=worker, reason=reason, evidence={"state": state})


def test_survivors_may_be_silent_while_a_rank_waits_for_a_spare_to_start() -> None:
    """A spare on a busy machine takes longer to start than a survivor may otherwise be silent."""
    job = training(spares=0, slots=4)
    job.die(1)
    job.let_time_pass(5)
    assert "waiting for worker 3 to start" in job.said()
    assert not job.tell(suspicion(2))
    job.tell(WorkerParked(worker=3, readiness="warm"))
    job.let_time_pass(1)
    (announce,) = of(Announce, job.past)[1:]
    assert announce.generation.ranks == (0, 3, 2)
    assert of(KillWorker, job.tell(suspicion(2)))[0].worker == 2, "now nothing excuses it"


def test_a_stopped_survivor_is_given_up_also_while_a_rank_waits() -> None:
    job = training(spares=0, slots=5)
    job.die(1)
    job.let_time_pass(5)
    assert of(KillWorker, job.tell(suspicion(2, state="T")))[0].worker == 2

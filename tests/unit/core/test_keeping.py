"""A rank whose record nobody else holds is said once per stretch, and shown while it lasts."""

from __future__ import annotations

from keepstep.core.events import KeeperMissed, KeeperRegained
from tests.unit.core.jobs import training


def test_a_stretch_without_keepers_is_said_once_and_its_end_too() -> None:
    job = training()
    job.tell(KeeperMissed(worker=1, reason="node-b did not answer in 0.2 s"))
    job.tell(KeeperMissed(worker=2, reason="node-b did not answer in 0.2 s"))
    job.tell(KeeperMissed(worker=1, reason="again"))
    assert job.said().count("not held elsewhere") == 1 and "rank 1" in job.said()
    assert job.machine.snapshot()["unkept_ranks"] == [1, 2]
    job.tell(KeeperRegained(worker=1))
    assert "held elsewhere again" not in job.said()
    job.tell(KeeperRegained(worker=2))
    assert job.said().count("held elsewhere again") == 1
    assert job.machine.snapshot()["unkept_ranks"] == []


def test_a_worker_without_a_rank_has_no_record_to_miss() -> None:
    job = training()
    job.tell(KeeperMissed(worker=3, reason="x"))
    job.tell(KeeperMissed(worker=99, reason="x"))
    job.tell(KeeperRegained(worker=3))
    assert "held elsewhere" not in job.said() and job.machine.snapshot()["unkept_ranks"] == []

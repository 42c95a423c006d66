"""Our own parts die: training goes on without agent and controller, and what happened meanwhile is mended later."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from keepstep.controller.ledger import LedgerReader
from tests.integration.jobs import DDP, HOT, reference
from tests.integration.nodes import Cluster, assert_ended_well, cluster, permit

TRAINED = (*DDP, *HOT, "--step-s", "0.02")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def state_of(job: Cluster, node: str) -> object:
    """How the controller stands with a node's agent."""
    return next(row["state"] for row in job.status()["nodes"] if row["node"] == node)


def steps_go_on(job: Cluster) -> None:
    """Every rank gets further, whoever is away; then the job pauses again, so that no test outruns it."""
    reached = min(job.step_of(rank) for rank in range(job.ranks))
    permit(job.folder, reached + 6)
    job.wait_for_step(reached + 5)


def test_an_agent_is_killed_and_its_successor_looks_after_the_same_workers(
    references: Path, tmp_path: Path
) -> None:
    undisturbed = reference(references, TRAINED, 3)
    with cluster(tmp_path, TRAINED, nodes=1, ranks_per_node=3, spares=2, permitted=6) as job:
        job.wait_for_spares(["hot", "hot"])
        node = job.nodes["node0"]
        workers = node.workers()
        assert node.agent is not None and set(workers) == {0, 1, 2}

        # A rank dies while no agent lives: nobody says so until there is one again.
        kill(node.agent.process)
        steps_go_on(job)
        workers[1].kill()
        node.start()
        permit(tmp_path, 40)
        job.wait_until(lambda: len(job.ledger("incident_closed")) == 1, 60, "the recovery", poll_s=0.1)

        # Nobody dies while no agent lives: nobody notices, and the next death is mended as ever.
        assert node.agent is not None
        kill(node.agent.process)
        steps_go_on(job)
        node.start()
        job.wait_until(lambda: state_of(job, "node0") == "connected", 30, "the new agent", poll_s=0.1)
        steps_go_on(job)
        living = node.workers()
        assert [living[number].pid for number in (0, 2)] == [workers[number].pid for number in (0, 2)]
        assert len(job.ledger("incident")) == 1, "nobody noticed"
        workers[2].kill()
        permit(tmp_path, 1000)
        assert_ended_well(job, undisturbed, incidents=2)
        reasons = [incident["reason"] for incident in job.ledger("incident_closed")]
    assert "rank 1: worker 1 is gone while its agent was away" in reasons[0]
    assert "rank 2: worker 2 is gone" in reasons[1], "not its child: how it ended nobody can know"


def test_a_controller_is_stopped_then_killed_and_training_goes_on(references: Path, tmp_path: Path) -> None:
    undisturbed = reference(references, TRAINED, 3)
    with cluster(tmp_path, TRAINED, nodes=1, ranks_per_node=3, spares=1, permitted=6) as job:
        job.wait_for_spares(["hot"])
        steps_go_on(job)
        job.signal_controller(signal.SIGSTOP)
        steps_go_on(job)
        time.sleep(5.0)  # the time of the promise: far longer than any heartbeat may be late
        job.signal_controller(signal.SIGCONT)
        steps_go_on(job)
        assert job.status()["incidents"] == 0 and "silent" not in job.controller.said
        assert state_of(job, "node0") == "connected"

        another = subprocess.run(
            job._command, env=job.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert another.returncode == 2 and "is being written by another controller" in another.stderr

        kill(job.controller.process)
        steps_go_on(job)
        job.nodes["node0"].workers()[1].kill()
        permit(tmp_path, 1000)
        job.controller = job._start(job._command)
        assert_ended_well(job, undisturbed, incidents=1)
        (incident,) = job.ledger("incident_closed")
        assert "rank 1: worker 1 was ended by SIGKILL" in incident["reason"]
        assert "it goes on from entry" in job.controller.said

        with LedgerReader(job.run.ledger) as ledger:
            assert ledger.verify().flaw is None
        assert not job.run.token_file.exists()
        third = subprocess.run(
            job._command, env=job.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert third.returncode == 2 and "it has ended (exit code 0): choose another --log-dir" in third.stderr


def test_a_node_that_stays_alone_ends_even_ranks_that_stand_in_a_collective(tmp_path: Path) -> None:
    with cluster(tmp_path, TRAINED, nodes=1, ranks_per_node=2, spare_nodes=0) as job:
        node = job.nodes["node0"]
        node.end()
        node.start("--isolation-timeout", "2")
        job.wait_for_step(3)
        os.kill(node.workers()[1].pid, signal.SIGSTOP)
        kill(job.controller.process)
        assert node.agent is not None
        assert node.agent.process.wait(60) == 75, node.agent.said
        assert node.workers() == {} and "the controller was gone for 2 s" in node.agent.said
    assert list(Path("/dev/shm").glob(f"keepstep-{job.job}*")) == []

"""Jobs over several nodes: nodes that die, stand still or are cut off; each run equals the undisturbed one."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from keepstep.cli.reports import kill_to_next_new_step_s
from tests.integration.jobs import DDP, HOT, HSDP, reference
from tests.integration.nodes import assert_ended_well, cluster, permit

PACE = (*HOT, "--step-s", "0.02")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.mark.parametrize("arguments", [(*DDP, *PACE), (*HSDP, *PACE)], ids=["ddp", "hsdp"])
def test_a_killed_node_is_replaced_bit_for_bit(
    references: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    undisturbed = reference(references, arguments, 4)
    with cluster(tmp_path, arguments, spares=2, permitted=6) as job:
        job.wait_for_spares(["hot", "hot"])
        permit(tmp_path, 1000)
        job.wait_for_step(10)
        killed_s = job.nodes["node1"].kill()
        assert_ended_well(job, undisturbed)
        reports = job.reports()
    took = [kill_to_next_new_step_s(reports, rank, killed_s) for rank in (2, 3)]
    print("node loss to the next new step:", took)
    assert all(one is not None for one in took)


def test_a_controller_that_stands_still_raises_no_alarm(references: Path, tmp_path: Path) -> None:
    undisturbed = reference(references, DDP, 4)
    with cluster(tmp_path, (*DDP, *PACE), spares=2, permitted=6) as job:
        job.wait_for_spares(["hot", "hot"])
        job.signal_controller(signal.SIGSTOP)
        permit(tmp_path, 1000)
        job.wait_for_step(12)
        time.sleep(5.0)  # the length of the standstill is what is tested
        job.signal_controller(signal.SIGCONT)
        assert_ended_well(job, undisturbed, incidents=0)

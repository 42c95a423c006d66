"""A health signal moves a rank of a real job by the policy; the ledger says why, and the losses stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.source import request
from keepstep.controller.rundir import RunDirectory
from keepstep.errors import UsageError
from tests.integration.jobs import assert_identical, reference
from tests.integration.test_moves import CASES, moving


@pytest.mark.timeout(240)
def test_a_signal_moves_its_rank_and_the_ledger_says_why(references: Path, tmp_path: Path) -> None:
    arguments = CASES["ddp, a hot spare"][0]
    undisturbed = reference(references, arguments, 2)
    xid = {"node": "node0", "slot": 1, "source": "kernel", "kind": "xid", "severity": "critical"}
    with moving(tmp_path, arguments, ranks=2) as job:
        job.ready("hot")
        for wrong, text in (
            (xid | {"code": "79"}, "code makes no sense"),
            (xid | {"node": "x"}, "no node x"),
        ):
            with pytest.raises(UsageError, match=text):
                request(RunDirectory(job.run_dir), "/api/signals", wrong)
        job.ask("signals", **xid, code=13)
        job.ask("signals", **xid, code=92, detail="high single-bit ECC error rate")
        job.wait_for(lambda s: s["moves"], "the policy's move")
        job.free()
        ended = job.finish()
    assert_identical(undisturbed, ended)
    (incident,) = ended.ledger("incident_closed")
    assert (incident["cause"], incident["resolution"]) == ("migration", "moved")
    assert incident["steps_recomputed"] == incident["steps_lost"] == 0
    harmless, decided = [note for note in ended.ledger("note") if note["about"] == "policy"]
    assert harmless["did"] == "ignore"
    assert (decided["did"], decided["rule"], decided["ranks"]) == ("migrate", "xid-warning", [1])
    assert "xid 92 on slot 1 of node0, seen by kernel: high single-bit" in decided["reason"]
    assert decided["reason"] in incident["reason"]

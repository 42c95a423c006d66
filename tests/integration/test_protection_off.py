"""Mode observe with a real death, and protection that ends because shared memory is really full."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import DDP, HOT, Job, assert_identical, command, environment, reference, run_job
from tests.unit.controller.test_webhook import Receiver

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PLAIN = ("--epochs", "1", "--samples", "96", "--symmetric")


def test_observing_changes_no_step(tmp_path: Path, references: Path) -> None:
    job = run_job(tmp_path / "run", (*DDP, *HOT), ranks=2, spares=1, options=["--mode", "observe"])
    assert_identical(reference(references, DDP, 2), job)


def test_the_first_death_ends_an_observed_job_and_the_incident_says_what_was_not_done(tmp_path: Path) -> None:
    receiver = Receiver()
    try:
        job = run_job(
            tmp_path / "run",
            PLAIN,
            ranks=2,
            spares=1,
            faults=["rank=1,step=5,at=backward"],
            options=["--mode", "observe", "--webhook", receiver.url],
            env={"KEEPSTEP_WEBHOOK_SECRET": "the-receivers-own-secret"},
        )
    finally:
        receiver.close()
    posted = [(json.loads(body), headers) for _, headers, body in receiver.seen]
    assert [body["event"] for body, _ in posted] == ["incident.opened", "incident.closed"], job.output
    assert posted[1][0]["incident"]["state"] == "observed"
    assert all(headers["Keepstep-Signature"].startswith("sha256=") for _, headers in posted)
    assert job.status == 137, job.output + job.worker_log()
    assert len(job.ledger("generation")) == 1, "no rank was given away"
    told = subprocess.run(
        [sys.executable, "-m", "keepstep", "incidents", "--json", "--run", str(job.run_dir)],
        stdout=subprocess.PIPE,
        check=True,
    )
    [incident] = json.loads(told.stdout)
    assert incident["state"] == "observed" and incident["victims"][0]["rank"] == 1
    assert incident["would"]["replacements"] == {"1": 2} and incident["would"]["generation"] == 1
    shown = subprocess.run(
        [sys.executable, "-m", "keepstep", "incidents", "show", "1", "--run", str(job.run_dir)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert "would append generation 1 and promote worker 2 to rank 1" in shown and "observed only" in shown


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_rank_whose_record_finds_no_memory_goes_on_unprotected_until_there_is_some(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "scripts" / "full_memory.py")
    run_dir = tmp_path / "run"
    line = command(run_dir, [script], ranks=2, spares=1)
    inside = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside, "sh", *line],
        env=environment(KEEPSTEP_FAULTS=json.dumps(["rank=1,step=25,at=forward"])),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    job = Job(ended.returncode, ended.stdout, run_dir)
    checks = [note for note in job.ledger("note") if note["about"] == "self_check"]
    assert [bool(note["reason"]) for note in checks] == [True, False, True], job.output + job.worker_log()
    assert "No space left on device" in checks[0]["reason"]
    assert "protection off: rank 1" in job.output and "protection is on again" in job.output
    assert job.status == 137, "the death of a rank that is not protected ends the job, as without Keepstep"
    [incident] = job.ledger("incident_closed")
    assert incident["resolution"] == "unprotected" and incident["victims"][0]["step"] == 25


WITHOUT_A_PIECE = """
import sys
import torch
from torch import nn

del torch.nn.parallel.DistributedDataParallel._update_process_group
import keepstep

run = keepstep.init()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
for step in run.steps(until=5):
    with step:
        if "raise" in sys.argv and run.rank == 1 and step.number == 3:
            raise ValueError("of the script")
        model(torch.ones(1, 4)).sum().backward()
        run.report(loss=1.0)
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {run.rank} of {run.world_size}, protected: {run.is_protected}", flush=True)
"""


def test_a_pytorch_that_lacks_a_piece_trains_unprotected_and_says_so_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_A_PIECE)
    job = run_job(tmp_path / "run", [str(script)], ranks=2)
    assert job.status == 0, job.output + job.worker_log()
    printed = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.stdout"))
    assert sorted(re.findall(r"rank \d of 2, protected: \w+", printed)) == [
        "rank 0 of 2, protected: False",
        "rank 1 of 2, protected: False",
    ]
    said = [
        line for line in job.output.splitlines() if "protection off: " in line and "keepstep: error" in line
    ]
    assert len(said) == 1, job.output
    assert "DistributedDataParallel._update_process_group is missing" in said[0]


def test_an_exception_of_an_unprotected_script_ends_the_job_with_its_code_and_starts_nothing_again(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_A_PIECE)
    job = run_job(tmp_path / "run", [str(script), "raise"], ranks=2, spares=1)
    assert job.status == 1, job.output
    assert "ValueError: of the script" in job.output
    assert "starts again" not in job.output

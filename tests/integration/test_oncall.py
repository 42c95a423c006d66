"""What the person on call is given: the guilty rank by name, evidence of every node, a rank's log across its players."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.integration.jobs import run_job
from tests.integration.nodes import Cluster, cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SECRET = "sk-do-not-tell-4711"
# After many quick steps, so that the limit of patience is a short one, rank 1 sleeps once in a function of its own while the others wait in a collective; the last steps wait for "go".
HUNG = """
import os, sys, time, pathlib, torch, keepstep
folder = pathlib.Path(sys.argv[1])
def forgotten_lock():
    time.sleep(600)
run = keepstep.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
for step in run.steps(until=52):
    while step.number == 49 and run.live and not (folder / "go").exists():
        time.sleep(0.1)
    with step:
        if step.number == 45 and run.rank == 1 and not (folder / "hung").exists():
            (folder / "hung").touch()
            print("about to hang, key", os.environ["MY_API_KEY"], flush=True)
            forgotten_lock()
        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    if run.live:
        print(f"rank {run.rank} did step {step.number}", flush=True)
"""


def keepstep(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_no_secret(archive: Path, *secrets: str) -> dict[str, bytes]:
    """The files of a bundle, none of which holds a secret; names and modes are harmless too."""
    files = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            assert entry.isreg() and not entry.name.startswith("/") and ".." not in entry.name
            content = tar.extractfile(entry)
            assert content is not None
            files[entry.name] = content.read()
    for name, data in files.items():
        for secret in secrets:
            assert secret.encode() not in data, f"{name} holds a secret"
    assert not any(secret.encode() in archive.read_bytes() for secret in secrets)
    return files


def test_a_hung_rank_is_named_and_its_evidence_comes_from_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    script = tmp_path / "hung.py"
    script.write_text(HUNG)
    with cluster(
        tmp_path, [str(script), str(tmp_path)], nodes=2, ranks_per_node=1, spare_nodes=1, spares=1
    ) as job:
        run = str(job.run.path)
        job.wait_until(lambda: (tmp_path / "hung").exists(), 90, "the hang")
        follower = subprocess.Popen(
            [sys.executable, "-m", "keepstep", "logs", "-f", "--rank", "1", "--run", run],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            look_while_it_lives(job, tmp_path, run)
            (tmp_path / "go").touch()
            assert job.wait_for_exit() == 0, job.last_output() + job.worker_logs()
            followed = follower.communicate(timeout=60)[0].splitlines()
        finally:
            follower.kill()
    assert follower.returncode == 0
    steps = [line.rpartition(" ")[2] for line in followed if "rank 1 did step" in line]
    assert steps[:49] == [str(number) for number in range(49)], followed  # each once, in order


def look_while_it_lives(job: Cluster, folder: Path, run: str) -> None:
    job.wait_until(lambda: job.ledger("incident_closed"), 150, "the incident's end", poll_s=0.2)
    found = [note for note in job.ledger("note") if note["about"] == "evidence"]
    job.wait_until(
        lambda: found or any(note["about"] == "evidence" for note in job.ledger("note")), 20, "the evidence"
    )
    # Who stood outside, where, and in which collective the other one waited.
    shown = keepstep("incidents", "show", "1", "--run", run)
    blame = next(line for line in shown.splitlines() if line.startswith("  blame"))
    assert "rank 1 had not entered all_reduce #" in blame and "of group 0-1, in which rank 0 waited" in blame
    assert "its main thread was in hung.py:" in blame and "in forgotten_lock" in blame
    assert "rank 0    worker 0    on node0: step 45" in shown and "waited" in shown

    # The bundle: every node's files, the summary first, no secret anywhere.
    archive = folder / "bundle.tar.gz"
    told = keepstep("incidents", "bundle", "1", "--run", run, "--out", str(archive))
    assert "node0" in told and "node1" in told and "without" not in told
    files = assert_no_secret(archive, SECRET, job.token)
    assert (
        next(iter(files)) == "incident-1/README.txt"
        and b"in forgotten_lock" in files["incident-1/README.txt"]
    )
    waited = files["incident-1/node0/worker-0/stacks.txt"].decode()
    assert "hung.py" in waited and "forgotten_lock" not in waited
    guilty = next(
        name
        for name in files
        if name.startswith("incident-1/node1/worker-1-") and name.endswith("stacks.txt")
    )
    assert b"forgotten_lock" in files[guilty]
    groups = json.loads(files["incident-1/node0/worker-0/collectives.json"])
    assert groups[0]["group"] == "0-1" and groups[0]["calls"][-1]["state"] != "ended"
    assert {"incident-1/node1/node.json", "incident-1/node1/host.json", "incident-1/node1/kernel.txt"} <= set(
        files
    )
    assert b"about to hang, key ***" in files["incident-1/node1/worker-1/stdout.tail"]

    # Rank 1's log: node1's worker until it lost the rank, then the spare's, with a line between them.
    lines = keepstep("logs", "--rank", "1", "--run", run).splitlines()
    before = next(n for n, line in enumerate(lines) if "rank 1 did step 44" in line)
    change = next(n for n, line in enumerate(lines) if "on spare0 plays rank 1 from generation 1 on" in line)
    after = next(n for n, line in enumerate(lines) if "rank 1 did step 45" in line)
    assert before < change < after and "gen 0" in lines[before] and "gen 1" in lines[after]
    assert not any("rank 0 did" in line for line in lines)
    node0 = ("logs", "--node", "node0", "--run", run)
    job.wait_until(lambda: "rank 0 did step 48" in keepstep(*node0), 60, "step 48", poll_s=0.2)
    assert "rank 1 did" not in keepstep(*node0)
    status = json.loads(keepstep("status", "--json", "--run", run))
    assert sorted(node["node"] for node in status["nodes"]) == ["node0", "node1", "spare0"]
    assert status["incident"]["blame"]["ranks"] == [1]


def test_a_stopped_rank_is_named_and_a_crash_leaves_the_survivors_counts(tmp_path: Path) -> None:
    arguments = ["--parallel", "ddp", "--until", "24", "--symmetric"]
    faults = ["rank=1,step=7,at=backward,kind=stop", "rank=2,step=14,at=backward"]
    job = run_job(tmp_path / "run", arguments, ranks=3, spares=2, faults=faults)
    assert job.status == 0, job.output + job.worker_log()
    stopped, crashed = (note for note in job.ledger("note") if note["about"] == "evidence")
    assert stopped["blame"]["ranks"] == [1] and "its process was stopped" in stopped["blame"]["text"]
    waited = {stand["rank"]: stand for stand in stopped["stands"] if stand["waited_s"] > 0.3}
    assert {0, 2} <= set(waited) and all(waited[rank]["stacks_from"] == "faulthandler" for rank in (0, 2))
    assert "incident 1: rank 1 had not entered" in job.output
    dead = next(stand for stand in crashed["stands"] if stand["rank"] == 2)
    assert dead["alive"] is False and dead["ended"] == "SIGKILL"
    (node,) = crashed["nodes"]
    assert f"evidence/worker-{dead['worker']}-1" in node["workers"]
    folder = job.run_dir / node["folder"]
    survivors = list(folder.glob("worker-*/collectives.json"))
    assert len(survivors) == 3
    archive = tmp_path / "two.tar.gz"
    keepstep("incidents", "bundle", "2", "--run", str(job.run_dir), "--out", str(archive))
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        names = tar.getnames()
    assert any(name.endswith(f"worker-{dead['worker']}-1/summary.json") for name in names)
    assert os.stat(archive).st_mode & 0o777 == 0o600
    lines = keepstep("logs", str(job.run_dir)).splitlines()
    assert lines == sorted(lines, key=lambda line: line[:12])

"""A spare learns what the ranks told each other, leaves no trace while it rehearses, and may change its rank."""

from __future__ import annotations

from pathlib import Path

from tests.integration.jobs import run_job

SCRIPT = """
import os, pathlib, random, sys, time
import torch, torch.distributed as dist, keepstep
from torch import nn

folder = pathlib.Path(sys.argv[1])
symmetric = "symmetric" in sys.argv

def changed(old, new):
    print(f"hook: {old} became {new}", flush=True)

assert "RANK" not in os.environ, "RANK is not known before init()"
run = keepstep.init(symmetric=symmetric, on_rank_change=changed)
identity = [f"run-{random.SystemRandom().random()}" if run.rank == 0 else None]
dist.broadcast_object_list(identity, src=0)
shapes = [None] * run.world_size
dist.all_gather_object(shapes, {"rank": run.rank, "secret": run.rank * 11})
pair = dist.new_group([0, 1])
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
run.protect(model=model, optimizer=optimizer)
for step in run.steps(until=14):
    with step:
        total = torch.ones(1)
        if run.rank in (0, 1):
            dist.all_reduce(total, group=pair)
        if run.live:
            with (folder / "trace").open("a") as trace:
                trace.write(f"{os.environ['KEEPSTEP_WORKER']} {run.rank} {step.number}\\n")
        model(torch.ones(4, 8)).square().mean().backward()
        run.report(loss=float(total))
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {run.rank} of worker {os.environ['KEEPSTEP_WORKER']} knows {identity[0]} {sorted(s['secret'] for s in shapes)}", flush=True)
"""


def knowledge(run_dir: Path) -> dict[int, str]:
    """What each worker said at its end: rank -> identity and secrets."""
    found = {}
    for path in (run_dir / "logs").glob("*.stdout"):
        for line in path.read_text().splitlines():
            if line.startswith("rank "):
                found[int(line.split()[1])] = line.split("knows ")[1]
    return found


def test_a_warm_replacement_hears_what_the_ranks_told_each_other_in_setup(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    fault = "rank=1,step=7,at=backward"
    job = run_job(tmp_path / "run", [str(script), str(tmp_path)], ranks=3, spares=1, faults=[fault])
    assert job.status == 0, job.output + job.worker_log()
    known = knowledge(tmp_path / "run")
    assert set(known) == {0, 1, 2}
    assert len(set(known.values())) == 1
    assert known[0].endswith("[0, 11, 22]")


def test_a_hot_spare_is_turned_into_the_rank_that_it_takes_and_rehearses_without_a_trace(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    alike = SCRIPT.replace("[0, 1]", "[0, 1, 2]").replace("(0, 1)", "(0, 1, 2)")
    script.write_text(
        alike.replace("        optimizer.step()", "        time.sleep(0.4)\n        optimizer.step()")
    )
    fault = "rank=0,step=11,at=backward"
    arguments = [str(script), str(tmp_path), "symmetric"]
    job = run_job(tmp_path / "run", arguments, ranks=3, spares=1, faults=[fault])
    assert job.status == 0, job.output + job.worker_log()
    hooks = [
        line
        for path in (tmp_path / "run" / "logs").glob("*.stdout")
        for line in path.read_text().splitlines()
        if line.startswith("hook:")
    ]
    assert len(hooks) == 1, job.output
    assert hooks[0].endswith("became 0")
    traces = [line.split() for line in (tmp_path / "trace").read_text().splitlines()]
    spare = str(job.reports.counted(0)[13].worker)
    assert {rank for worker, rank, _ in traces if worker == spare} == {"0"}
    assert min(int(step) for worker, _, step in traces if worker == spare) == 11
    assert all(report.values["loss"] == 3.0 for report in job.reports.counted(0).values())


def test_a_spare_built_with_other_groups_than_the_rank_needs_is_refused_and_a_fresh_one_serves(
    tmp_path: Path,
) -> None:
    """Of two ranks only rank 0 has a group of its own, and a spare never rehearses as rank 0."""
    script = tmp_path / "script.py"
    unlike = SCRIPT.replace("[0, 1]", "[0]").replace("(0, 1)", "(0,)")
    script.write_text(
        unlike.replace("        optimizer.step()", "        time.sleep(0.4)\n        optimizer.step()")
    )
    arguments = [str(script), str(tmp_path), "symmetric"]
    job = run_job(tmp_path / "run", arguments, ranks=2, spares=1, faults=["rank=0,step=11,at=backward"])
    assert job.status == 0, job.output + job.worker_log()
    assert "needs the same groups on every rank" in job.worker_log()


def test_a_script_that_never_reaches_its_loop_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import keepstep\nrun = keepstep.init()\n")
    job = run_job(tmp_path / "run", [str(script)], ranks=2)
    assert "run.steps" in job.output, job.output
    assert job.status != 0


def test_a_script_that_cannot_be_imported_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import keepstep, no_such_module\nkeepstep.init()\n")
    job = run_job(tmp_path / "run", [str(script)], ranks=2, spares=1)
    assert job.status == 1, job.output
    assert "No module named 'no_such_module'" in job.output


def test_a_spare_that_fails_its_check_while_it_waits_is_ended_and_one_on_another_slot_serves(
    tmp_path: Path,
) -> None:
    arguments = ("--parallel", "ddp", "--epochs", "9", "--until", "60", "--symmetric", "--step-s", "0.1")
    job = run_job(
        tmp_path / "run",
        arguments,
        ranks=2,
        spares=1,
        faults=["slot=2,check=bad,since=2", "rank=1,step=50,at=backward"],
        options=("--slots", "4", "--spare-check", "1"),
    )
    assert job.status == 0, job.output + job.worker_log()
    assert "spare worker 2 (slot 2 of node0) failed its check and is not used" in job.output
    notes = [note for note in job.ledger("note") if note.get("about") in ("worker", "spare_check")]
    assert [(note["about"], note["slot"]) for note in notes[3:5]] == [("spare_check", 2), ("worker", 3)]
    newest = job.ledger("generation")[-1]
    assert newest["ranks"][0] == 0
    assert newest["ranks"][1] > 2, "the failed spare never plays a rank"

"""Which bytes have how many live twins: told from what ranks said, compared by digests, kept in the ledger."""

from __future__ import annotations

import json
import time

from keepstep.core.actions import Say
from keepstep.core.events import AgentJoined, FingerprintTaken, Progressed, StateDescribed, WorkerParked
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.replica_rules import past_replicas
from keepstep.core.replica_words import numbers, replica_line, size
from keepstep.core.replicas import Holder, ReplicaBook
from keepstep.core.types import StatePart
from tests.unit.core.jobs import Job, of

GIGA = 10**9


def parts(shard: int, *, optimizer: str | None = None) -> tuple[StatePart, ...]:
    """1 GB of parameters and 2 GB of optimizer state of one shard, and 4 kB of a rank's own."""
    kept = optimizer or f"o{shard}"
    return (
        StatePart(part="parameters", identity=f"p{shard}", tensors=3, bytes=GIGA, largest={"w": GIGA}),
        StatePart(part="optimizer state", identity=kept, tensors=6, bytes=2 * GIGA, largest={"w/exp_avg": GIGA}),
        StatePart(part="per rank", identity="own", tensors=3, bytes=4000, largest={"bn.mean": 4000}),
    )  # fmt: skip


def described(rank: int, shard: int, **more: str | None) -> StateDescribed:
    return StateDescribed(
        worker=rank, rank=rank, step=2, shard=f"s{shard}", place=f"shard {shard}", parts=parts(shard, **more)
    )


def hashed(rank: int, shard: int, *, parameters: str = "", step: int = 2) -> FingerprintTaken:
    digests = {"parameters": parameters or f"hash-p{shard}", "optimizer state": f"hash-o{shard}"}
    return FingerprintTaken(
        worker=rank, rank=rank, step=step, shard=f"s{shard}", digest=f"{shard}", parts=digests
    )


def book(shards: list[int], **hashes: str) -> ReplicaBook:
    """One rank for each entry, holding that shard; `hashes`: r2="x" gives rank 2 another digest."""
    made = ReplicaBook(len(shards))
    for rank, shard in enumerate(shards):
        made.fingerprint(hashed(rank, shard, parameters=hashes.get(f"r{rank}", "")))
        made.describe(described(rank, shard))
    return made


def on(*nodes: str) -> dict[int, Holder]:
    return {rank: Holder(rank, node) for rank, node in enumerate(nodes) if node}


def test_twins_on_two_nodes_are_counted_and_verified() -> None:
    table = book([0, 1, 0, 1]).table(on("a", "a", "b", "b"))
    line, level = replica_line(table)
    assert line == (
        "state: 6 GB in 2 shards, every shard has 2 live copies on 2 nodes; "
        "3 tensors and values of each rank (4 kB) have no twin: records"
    )
    assert level == "info"
    assert [(row["ranks"], row["copies"], row["nodes"], row["check"]) for row in table["shards"]] == [
        ([0, 2], 2, ["a", "b"], "verified"),
        ([1, 3], 2, ["a", "b"], "verified"),
    ]
    assert [(row["name"], row["kept"], row["ranks"]) for row in table["alone"]] == [("bn.mean", "records", 4)]


def test_a_shard_without_a_twin_is_named_with_its_size_and_what_its_loss_means() -> None:
    table = book([0, 1, 1]).table(on("a", "a", "b"))
    line, level = replica_line(table)
    assert level == "warning"
    assert "rank 0 has no twin: when it is lost, all ranks go back to the script's own checkpoint" in line
    assert [(row["name"], row["bytes"], row["kept"]) for row in table["alone"][:2]] == [
        ("w", GIGA, "nowhere"),
        ("w/exp_avg", GIGA, "nowhere"),
    ]
    assert table["shards"][0]["check"] == "no twin"


def test_optimizer_state_that_every_rank_keeps_a_part_of_has_one_copy_though_parameters_have_more() -> None:
    made = ReplicaBook(2)
    for rank in range(2):
        event = described(rank, 0, optimizer=f"part {rank}")
        made.describe(StateDescribed(**{**fields(event), "shard": f"s{rank}"}))
    table = made.table(on("a", "b"))
    rows = {row["part"]: row for row in table["parts"]}
    assert (rows["parameters"]["least_copies"], rows["optimizer state"]["least_copies"]) == (2, 1)
    line, _ = replica_line(table)
    assert "one copy only: optimizer state 4 GB; largest on a rank: w/exp_avg 1 GB" in line


def fields(event: StateDescribed) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__dataclass_fields__}


def test_twins_whose_hashes_differ_are_no_twins() -> None:
    made = book([0, 0, 0], r2="other")
    table = made.table(on("a", "a", "b"))
    rows = {row["part"]: row for row in table["parts"]}
    assert (rows["parameters"]["check"], rows["parameters"]["differing_ranks"]) == ("differs", [2])
    assert rows["optimizer state"]["check"] == "verified"
    line, level = replica_line(table)
    assert level == "error"
    assert "parameters of ranks 2 differ from their twins" in line


def test_copies_that_all_lie_on_one_node_of_several_are_said() -> None:
    line, level = replica_line(book([0, 1, 0, 1]).table(on("a", "a", "a", "b")))
    assert level == "warning"
    assert "all copies of shard 0 (ranks 0, 2) are on node a" in line


def test_a_dead_holder_counts_no_longer() -> None:
    table = book([0, 0, 0]).table(on("a", "", "b"))
    assert table["least_copies"] == 2
    assert table["shards"][0]["workers"] == [0, 2]


def test_digests_of_another_step_verify_nothing() -> None:
    made = ReplicaBook(2)
    for rank in range(2):
        made.fingerprint(hashed(rank, 0, step=2 + rank))
        made.describe(described(rank, 0))
    assert made.table(on("a", "b"))["shards"][0]["check"] == "not checked"


def test_the_ledger_keeps_the_whole_table() -> None:
    made = book([0, 1, 0, 1], r3="other")
    again = ReplicaBook.load(json.loads(json.dumps(made.body())))
    places = on("a", "a", "b", "b")
    assert again.table(places) == made.table(places)
    assert again.complete


def test_sizes_and_ranks_in_words() -> None:
    assert [size(n) for n in (0, 999, 1200, 1_234_567, 999_900, 5 * GIGA)] == [
        *("0 B", "999 B", "1.2 kB", "1.23 MB", "1 MB", "5 GB")
    ]
    assert numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert numbers(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_sixteen_thousand_ranks_are_a_table_within_a_moment() -> None:
    world, shards = 16_384, 128
    made = ReplicaBook(world)
    for rank in range(world):
        shard = rank % shards
        made.fingerprint(hashed(rank, shard))
        made.describe(described(rank, shard))
    places = {rank: Holder(rank, f"node{rank // 8}") for rank in range(world)}
    started_s = time.process_time()
    table = made.table(places)
    assert time.process_time() - started_s < 1.0
    assert (table["shard_count"], table["least_copies"], table["least_nodes"]) == (shards, 128, 128)


# ---- the controller's machine ---------------------------------------------------------------------


def of_two_nodes() -> Job:
    job = Job(JobMachine(JobConfig(world_size=3, spares=1)))
    job.tell(AgentJoined(node="a", slots=2))
    job.tell(AgentJoined(node="b", slots=2))
    for worker in range(4):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    job.tell(Progressed(worker=0, generation=0, step=2, published=2))
    return job


def speak(job: Job) -> None:
    for rank, worker in enumerate(job.generation.ranks):
        job.tell(FingerprintTaken(**{**fields(hashed(rank, 0)), "worker": worker}))  # type: ignore[arg-type]
        job.tell(StateDescribed(**{**fields(described(rank, 0)), "worker": worker}))  # type: ignore[arg-type]


def test_the_job_says_its_replicas_once_all_ranks_have_spoken_and_again_after_a_recovery() -> None:
    job = of_two_nodes()
    assert job.machine.replicas()["line"] == "not known yet: 0 of 3 ranks have made two updates"
    speak(job)
    lines = [a.text for a in of(Say, job.past) if a.text.startswith("state: ")]
    assert lines == [
        "state: 3 GB in 1 shard, with 3 live copies on 2 nodes; "
        "3 tensors and values of each rank (4 kB) have no twin: records"
    ]
    job.die(job.generation.ranks[2])
    job.let_time_pass(0.1)
    assert job.machine.replicas()["shards"][0]["copies"] == 2, "the replacement has no state yet"
    job.resume_all(step=3)
    assert job.machine.replicas()["shards"][0]["copies"] == 3
    assert len([a for a in of(Say, job.past) if a.text.startswith("state: ")]) == 2


def test_a_restarted_controller_and_a_reader_of_the_ledger_know_the_table() -> None:
    from keepstep.core.actions import Persist

    job = of_two_nodes()
    speak(job)
    entries = of(Persist, job.past)
    resumed = JobMachine.resume(job.machine.config, entries)
    assert resumed.state.replicas.complete
    past = past_replicas((entry.kind, entry.body) for entry in entries)
    assert past["complete"]
    assert past["shards"][0]["nodes"] == ["a", "b"]


def test_a_world_that_starts_again_forgets_what_the_old_one_said() -> None:
    job = of_two_nodes()
    speak(job)
    job.machine.state.restarting = True
    assert job.machine.replicas()["least_copies"] == 0
    job = Job(JobMachine(JobConfig(world_size=3, spares=1)))
    job.tell(StateDescribed(**{**fields(described(0, 0)), "worker": 77}))  # type: ignore[arg-type]
    assert job.machine.replicas()["described_ranks"] == 0, "only members may speak"

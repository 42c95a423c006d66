"""The control plane at scale: one controller, thousands of agents, a hundred incidents.

The real controller (core, ledger, sockets) runs in a process of its own; simulated agents connect to it over
real sockets, beat at 1 Hz each and report as healthy nodes do. One worker after another is lost. Measured: from
the report of a loss to the next generation's arrival at the first agent (its decision, durable in the ledger)
and at the last one; the controller's share of a core over the whole run, and its memory. Then the core alone
decides at 16,384 ranks, and the simulator plays a month of such a job at published failure rates.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import Options, options, table, write
from control_agents import SETUP_STEPS, Fleet

from keepstep.core.actions import Announce, StartWorker
from keepstep.core.events import AgentJoined, NodeProgressed, NodeResumed, WorkerExited, WorkerParked
from keepstep.core.job import JobConfig, JobMachine

SEED = 20260901
SLOTS = 8
SERVER = Path(__file__).resolve().parent / "control_server.py"
WAIT_S = 120.0
MONTH_TIMEOUT_S = 1800.0
SETTLE_S = 3.0
CORE_RANKS, CORE_SPARES, CORE_DECISIONS = 16_384, 64, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large, how often."""

    nodes: int
    incidents: int
    pause_s: float
    spares: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run of the controller came to. Times in seconds, memory in bytes."""

    decided_s: list[float]
    everywhere_s: list[float]
    cpu_share: float
    memory_bytes: int
    start_s: float


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


async def measure(plan: Plan, folder: Path) -> Outcome:
    """Start the controller, connect the fleet, lose workers one by one."""
    ranks = plan.nodes * SLOTS - plan.spares
    token = f"{random.getrandbits(128):032x}"
    with (folder / "server.txt").open("wb") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, str(SERVER), "--folder", str(folder), "--token", token),
                *("--ranks", str(ranks), "--spares", str(plan.spares)),
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip().replace("http", "ws", 1) + "/agent"
        process = psutil.Process(server.pid)
        fleet = Fleet(url, token)
        started_s = time.monotonic()
        await fleet.start(plan.nodes, SLOTS)
        await fleet.heard_by_all(WAIT_S)
        start_s = time.monotonic() - started_s
        print(f"{plan.nodes} agents, {ranks} ranks: started in {start_s:.1f} s", file=sys.stderr)
        await asyncio.sleep(SETTLE_S)  # every agent has told of published steps

        decided, everywhere = [], []
        cpu_s, wall_s = sum(process.cpu_times()[:2]), time.monotonic()
        for number in range(plan.incidents):
            at_s = await lose_one(fleet)
            await fleet.heard_by_all(WAIT_S)
            decided.append(fleet.first_heard_s - at_s)
            everywhere.append(time.monotonic() - at_s)
            await asyncio.sleep(plan.pause_s)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} of {plan.incidents} incidents", file=sys.stderr)
        cpu_s, wall_s = sum(process.cpu_times()[:2]) - cpu_s, time.monotonic() - wall_s
        memory = process.memory_info().rss
        await fleet.close()
    except Exception:
        print((folder / "server.txt").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)
    return Outcome(
        decided_s=decided,
        everywhere_s=everywhere,
        cpu_share=cpu_s / wall_s,
        memory_bytes=memory,
        start_s=start_s,
    )


async def lose_one(fleet: Fleet) -> float:
    """A random member's process dies; the time at which its agent said so."""
    assert fleet.newest is not None
    members = set(fleet.newest.generation.ranks)
    while True:
        agent = random.choice(fleet.agents)
        worker = random.choice(sorted(agent.living))
        if worker in members:
            break
    fleet.all_heard.clear()
    at_s = time.monotonic()
    await agent.lose_worker(worker)
    return at_s


# ---- the core alone -----------------------------------------------------------------------------------


def core_decisions() -> list[float]:
    """Seconds from the report of a death to the next generation's announcement, at CORE_RANKS ranks."""
    config = JobConfig(world_size=CORE_RANKS, spares=CORE_SPARES, job="core", gather_s=0.0)
    machine, now_s = JobMachine(config), 100.0
    nodes = (CORE_RANKS + CORE_SPARES) // SLOTS
    orders: list[StartWorker] = []
    for number in range(nodes):
        joined = AgentJoined(
            node=f"node{number}",
            slots=SLOTS,
            labels={"rack": f"rack{number // 16}"},
            peer=f"10.0.0.1:{number}",
        )
        orders += [action for action in machine.step(joined, now_s) if isinstance(action, StartWorker)]
    for order in orders:
        machine.step(WorkerParked(worker=order.worker, readiness="warm"), now_s)
    newest = machine.state.newest
    assert newest is not None
    steps = dict.fromkeys(newest.ranks[:SLOTS], SETUP_STEPS + 1)
    machine.step(NodeProgressed(node="node0", generation=0, published=SETUP_STEPS + 1, steps=steps), now_s)
    taken = []
    chance = random.Random(SEED)
    for _ in range(CORE_DECISIONS):
        now_s += 60.0
        generation = machine.state.newest
        assert generation is not None
        victim = chance.choice(generation.ranks)
        began_s = time.perf_counter()
        actions = machine.step(WorkerExited(worker=victim, status=-9, step=9, published=9), now_s)
        taken.append(time.perf_counter() - began_s)
        assert any(isinstance(action, Announce) for action in actions)
        generation = machine.state.newest
        assert generation is not None
        back = NodeResumed(
            node="all", generation=generation.number, steps=dict.fromkeys(generation.ranks, 10)
        )
        machine.step(back, now_s)
    return taken


# ---- the simulator ------------------------------------------------------------------------------------


def month(ranks: int, spares: int) -> dict[str, float]:
    """The figures of a simulated month, from a process of its own: its memory is its own. Raises SystemExit."""
    command = [sys.executable, "-m", "keepstep.sim", "--month", "--json"]
    done = subprocess.run(
        [*command, "--ranks", str(ranks), "--spares", str(spares)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=MONTH_TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"the simulated month failed: {done.stdout}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


# ---- all of it ----------------------------------------------------------------------------------------


def plan(quick: bool) -> Plan:
    return (
        Plan(nodes=100, incidents=10, pause_s=0.5) if quick else Plan(nodes=2000, incidents=100, pause_s=2.0)
    )


def main(chosen: Options) -> None:
    random.seed(SEED)
    scale = plan(chosen.quick)
    with tempfile.TemporaryDirectory(prefix="keepstep-control-") as name:
        outcome = asyncio.run(measure(scale, Path(name)))
    decisions = core_decisions()
    simulated = month(2048 if chosen.quick else CORE_RANKS, CORE_SPARES)
    figures = {
        "decision_p50_s": percentile(outcome.decided_s, 0.5),
        "decision_p99_s": percentile(outcome.decided_s, 0.99),
        "everywhere_p99_s": percentile(outcome.everywhere_s, 0.99),
        "cpu_share": outcome.cpu_share,
        "memory_mb": outcome.memory_bytes / 1e6,
        "core_decision_s": percentile(decisions, 0.5),
        "agents": float(scale.nodes),
        "incidents": float(scale.incidents),
        **simulated,
    }
    rows = [
        (f"decision, {scale.nodes} agents of {SLOTS} workers, median s", figures["decision_p50_s"]),
        (f"decision, the slowest but 1% of {scale.incidents}, s", figures["decision_p99_s"]),
        ("heard by every agent, the slowest but 1%, s", figures["everywhere_p99_s"]),
        ("controller's share of a core", figures["cpu_share"]),
        ("controller's memory, MB", figures["memory_mb"]),
        (f"the core alone, {CORE_RANKS} ranks, median s", figures["core_decision_s"]),
        ("a simulated month: seconds of this machine", figures["month_wall_s"]),
        ("its memory, GB", figures["month_memory_gb"]),
        ("its failures", figures["month_failures"]),
        ("training stood, seconds of that month", figures["month_stalled_s"]),
    ]
    print(table(("what", "measured"), rows))
    write(chosen, figures, seeds={"victims": SEED})


if __name__ == "__main__":
    main(options(__doc__))

"""What befalls the virtual cluster: deaths, stops, false suspicions, broken connections, lost nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.core.events import WorkerSuspected
from keepstep.sim.nodes import cut_node, lose_node, restart_agent
from keepstep.sim.story import Cue, Mishap
from keepstep.sim.virtual_worker import VirtualWorker

if TYPE_CHECKING:
    from keepstep.sim.cluster import Cluster


NODE_MISHAPS = {"node": lose_node, "cut": cut_node, "agent": restart_agent}


def befall(cluster: Cluster, mishap: Mishap) -> None:
    cluster.last_mishap_s = cluster.agenda.now_s
    if mishap.kind == "controller":
        cluster.crash_pending = True
        return
    if mishap.kind in NODE_MISHAPS:
        NODE_MISHAPS[mishap.kind](cluster)
        return
    worker = choose(cluster, mishap)
    if worker is not None:
        strike(cluster, worker, mishap.kind)


def on_cue(cluster: Cluster, cue: Cue, line: str) -> None:
    cluster.last_mishap_s = cluster.agenda.now_s
    match cue.kind:
        case "controller":
            cluster.crash_controller()
        case "node" | "cut" | "agent":
            NODE_MISHAPS[cue.kind](cluster)
        case _:
            number = int(line.split()[0][1:]) if cue.worker is None else cue.worker
            strike(cluster, cluster.workers[number], cue.kind)


def strike(cluster: Cluster, worker: VirtualWorker, kind: str) -> None:
    cluster.tell(f"*** {kind} w{worker.number} ({worker.machine.phase}@{worker.machine.step_count})")
    match kind:
        case "kill":
            cluster.exit(worker, -9)
        case "stop":
            worker.stopped = True
            suspect(cluster, worker, 0.5 + cluster.delay(0.5), "stopped (state T)")
            cluster.agenda.after(cluster.delay(2.0), lambda: wake(cluster, worker))
        case "suspect":
            suspect(cluster, worker, 0.0, "no progress, as it seems")
        case "flaky":
            if worker.room is not None and worker.number in worker.room.waiting:
                worker.room.fail_one(worker)


def suspect(cluster: Cluster, worker: VirtualWorker, after_s: float, reason: str) -> None:
    def suspect() -> None:
        if worker.alive and (worker.stopped or after_s == 0.0) and worker.node in cluster.channels:
            event = WorkerSuspected(
                worker=worker.number, reason=reason, published=cluster.page_published(worker)
            )
            cluster.deliver(event, cluster.channels[worker.node])
            cluster.agenda.after(5.0, suspect)

    cluster.agenda.after(after_s, suspect)


def wake(cluster: Cluster, worker: VirtualWorker) -> None:
    worker.stopped = False
    backlog, worker.backlog = worker.backlog, []
    for errand in backlog:
        if worker.alive:
            errand()


def choose(cluster: Cluster, mishap: Mishap) -> VirtualWorker | None:
    newest = cluster.controller.state.newest if cluster.controller is not None else None
    # After its last gate a worker is unprotected.
    alive = [w for w in cluster.workers.values() if w.alive and not w.finished]
    members = [w for w in alive if newest is not None and w.number in newest.members]
    if mishap.kind == "flaky":
        members = [w for w in members if w.room is not None and w.number in w.room.waiting]
        return members[int(mishap.pick * len(members))] if members else None
    spares = [w for w in alive if w not in members]
    pool = {"member": members or alive, "spare": spares or members, "any": alive}[mishap.whom]
    return pool[int(mishap.pick * len(pool))] if pool else None

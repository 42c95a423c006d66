"""The job's controller as a machine: what happened goes in, what to do comes out.

`step(event, now_s)` notes the fact, then lets the rules of `recovery` do what is due. The shell
carries the actions out in order and sends `Ticked` at `next_deadline_s`. There is no clock here,
no process and no socket; time is the caller's, in seconds, and never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepstep.core.actions import Action, Persist
from keepstep.core.agent import STOPPED
from keepstep.core.ending import begin_finish
from keepstep.core.events import (
    AgentDisconnected,
    AgentHeard,
    AgentJoined,
    AgentLost,
    AgentSilent,
    Complained,
    Event,
    FingerprintTaken,
    KeeperMissed,
    KeeperRegained,
    LinkMeasured,
    NodeProgressed,
    NodeResumed,
    NodeVerdict,
    PersistFailed,
    ProbeAnswered,
    Progressed,
    Resumed,
    ScriptFailed,
    SelfCheckFailed,
    SelfCheckPassed,
    SpareChecked,
    StateDescribed,
    StateReceived,
    StopRequested,
    Ticked,
    UsageRefused,
    VerdictReached,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerSuspected,
)
from keepstep.core.health_events import SignalSeen
from keepstep.core.job_config import JobConfig
from keepstep.core.job_state import Ending, JobState
from keepstep.core.keeping import keeper_missed, keeper_regained
from keepstep.core.losses import USAGE_EXIT_CODE, member_lost, process_lost
from keepstep.core.membership import Standing, Worker
from keepstep.core.move_events import DrainRequested, LendReady, MoveReady, MoveRequested, UndrainRequested
from keepstep.core.moves import (
    drain_refusal,
    drain_requested,
    lend_ready,
    move_ready,
    move_refusal,
    move_requested,
    undrain_refusal,
    undrain_requested,
)
from keepstep.core.node_watch import (
    agent_disconnected,
    agent_heard,
    agent_silent,
    probe_answered,
    watch_nodes,
)
from keepstep.core.nodes import agent_joined, miss_absent, node_lost
from keepstep.core.observing import observe_hardware, observe_suspect
from keepstep.core.policy_acts import pursue_policy, signal_seen
from keepstep.core.process_status import say_status
from keepstep.core.protection import fingerprint_taken, self_check_failed, self_check_passed
from keepstep.core.recovery import next_deadline_s, pursue
from keepstep.core.replica_rules import replicas, state_described
from keepstep.core.reports import (
    complained,
    counts,
    learn_published,
    progressed,
    resumed,
    verdict_reached,
)
from keepstep.core.resumption import rebuild
from keepstep.core.snapshot import snapshot
from keepstep.core.spare_checks import link_measured, spare_checked, state_size_learned
from keepstep.core.together import each_verdict

__all__ = ["JobConfig", "JobMachine"]

STOP_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGQUIT": 131}


class JobMachine:
    """The controller of one job. After `EndJob` it answers every event with nothing."""

    def __init__(self, config: JobConfig) -> None:
        self.state = JobState(config=config)
        self._told_to_rehearse: list[Worker] = []
        self.state.members.ranks_per_node = config.ranks_per_node

    @classmethod
    def resume(cls, config: JobConfig, entries: Iterable[Persist]) -> JobMachine:
        """Go on from what an earlier controller wrote; `entries` in the order they were persisted.

        Every agent must join again with its living workers, and parked workers must say so again.
        """
        machine = cls(config)
        rebuild(machine.state, entries)
        return machine

    @property
    def config(self) -> JobConfig:
        return self.state.config

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; the actions are to be carried out in order."""
        state = self.state
        if state.over is None:
            self._take(event, now_s)
            miss_absent(state, now_s)
            watch_nodes(state, now_s)
            pursue_policy(state, now_s)
            pursue(state, now_s)
            self._let_spares_rehearse()
        actions, state.actions = state.actions, []
        return actions

    def _take(self, event: Event, now_s: float) -> None:
        state = self.state
        self._begin()
        match event:
            case AgentJoined():
                for number in event.finished:
                    self._worker_finished(WorkerFinished(worker=number, step=0), now_s)
                agent_joined(state, event, now_s)
            case AgentLost():
                node_lost(state, event.node, event.reason, now_s)
            case AgentDisconnected():
                agent_disconnected(state, event, now_s)
            case AgentSilent():
                agent_silent(state, event, now_s)
            case AgentHeard():
                agent_heard(state, event)
            case ProbeAnswered():
                probe_answered(state, event)
            case WorkerParked():
                self._worker_parked(event)
            case SpareChecked():
                spare_checked(state, event, now_s)
            case LinkMeasured():
                link_measured(state, event, now_s)
            case WorkerExited():
                self._worker_exited(event, now_s)
            case WorkerSuspected():
                self._worker_suspected(event, now_s)
            case Complained():
                complained(state, event, now_s)
            case Progressed():
                progressed(state, event.published, {event.worker: event.step})
            case NodeProgressed():
                progressed(state, event.published, event.steps)
            case KeeperMissed():
                keeper_missed(state, event)
            case KeeperRegained():
                keeper_regained(state, event)
            case VerdictReached():
                verdict_reached(state, event, now_s)
            case StateReceived():
                if state.incident is not None and counts(state, event.worker, event.generation):
                    state.incident.learn_transfer(event)
            case NodeVerdict():
                for verdict in each_verdict(event):
                    verdict_reached(state, verdict, now_s)
            case Resumed():
                resumed(state, event.generation, {event.worker: event.step}, now_s)
            case NodeResumed():
                resumed(state, event.generation, event.steps, now_s)
            case FingerprintTaken():
                fingerprint_taken(state, event)
            case StateDescribed():
                if state_described(state, event):
                    state_size_learned(state, now_s)
            case SelfCheckFailed():
                self_check_failed(state, event)
            case SelfCheckPassed():
                self_check_passed(state, event)
            case ScriptFailed():
                self._script_failed(event, now_s)
            case UsageRefused():
                self._usage_refused(event, now_s)
            case WorkerFinished():
                self._worker_finished(event, now_s)
            case MoveRequested():
                move_requested(state, event, now_s)
            case DrainRequested():
                drain_requested(state, event, now_s)
            case UndrainRequested():
                undrain_requested(state, event, now_s)
            case LendReady():
                lend_ready(state, event)
            case MoveReady():
                move_ready(state, event, now_s)
            case SignalSeen():
                signal_seen(state, event, now_s)
            case PersistFailed():
                self._persist_failed(event)
            case StopRequested():
                self._stop_requested(event, now_s)
            case Ticked():
                pass

    def next_deadline_s(self, now_s: float) -> float | None:
        """When to send `Ticked` if nothing happens before; None: only an event can help."""
        return next_deadline_s(self.state, now_s)

    def snapshot(self) -> dict[str, Any]:
        """What `status` shows, as JSON takes it."""
        return snapshot(self.state)

    def refusal(self, event: MoveRequested | DrainRequested | UndrainRequested) -> str | None:
        """Why a request cannot be met, for whoever asked; None when it can."""
        match event:
            case MoveRequested():
                return move_refusal(self.state, event.rank, event.to)
            case DrainRequested():
                return drain_refusal(self.state, event.node)
            case UndrainRequested():
                return undrain_refusal(self.state, event.node)

    def replicas(self) -> dict[str, Any]:
        """What `replicas` shows: whose state has how many live twins, and where."""
        return replicas(self.state)

    def _begin(self) -> None:
        state = self.state
        if not state.begun:
            state.begun = True
            config = state.config
            body = {"job": config.job, "world_size": config.world_size, "spares": config.spares}
            state.persist("job", {**body, "max_restarts": config.max_restarts, "observe": config.observe})

    # ---- nodes and workers ----------------------------------------------------------------------

    def _worker_parked(self, event: WorkerParked) -> None:
        worker = self.state.members.workers.get(event.worker)
        if worker is None or worker.standing not in (Standing.STARTING, Standing.PARKED):
            return
        self.state.start_failures = 0
        if self.state.restarting and event.readiness == "hot":
            self.state.kill(worker.number, "it was built for a world that is started again")
            return
        worker.standing, worker.readiness = Standing.PARKED, event.readiness

    def _let_spares_rehearse(self) -> None:
        """Only a spare that no rank waits for: the others are about to be told which rank to build."""
        state = self.state
        if state.over is None and not state.restarting and not state.finishing and state.waiting is None:
            spares = state.spares()
            if spares is not self._told_to_rehearse:  # the same list until somebody's standing changes
                self._told_to_rehearse = spares
                for worker in spares:
                    state.stand_by(worker)

    def _worker_exited(self, event: WorkerExited, now_s: float) -> None:
        state = self.state
        worker = state.members.workers.get(event.worker)
        if worker is None:
            return
        if not worker.alive:
            if worker.status is None:
                worker.status, worker.phase = (
                    event.status,
                    event.phase,
                )  # evidence that its agent had kept for us
            return
        worker.step, worker.phase = max(worker.step, event.step), event.phase
        learn_published(state, event.worker, event.published)
        text = say_status(event.status, event.oom_killed)
        process_lost(state, worker, event.status, text, now_s, "death", event.first_evidence_s)

    def _worker_suspected(self, event: WorkerSuspected, now_s: float) -> None:
        state = self.state
        worker = state.members.workers.get(event.worker)
        if worker is None or not worker.useful or state.ending or state.stopping:
            return
        if state.finishing:
            # It may just wait for those who have left already; asked twice in vain, it is ended.
            if worker.released:
                state.kill(event.worker, event.reason)
            else:
                state.release((event.worker,))
            return
        learn_published(state, event.worker, event.published)
        if state.is_member(event.worker) and _must_be_silent(state, event):
            return
        if state.config.observe:
            observe_suspect(state, worker, event, now_s)
            return
        if state.is_member(event.worker):
            member_lost(
                state, worker, "suspicion", f"is suspected: {event.reason}", now_s, event.first_evidence_s
            )
            if state.incident is not None:
                state.incident.evidence[str(event.worker)] = dict(event.evidence)
        else:
            name = state.name(event.worker)
            state.say(f"{name} is suspected: {event.reason}; it is replaced, no rank is touched", "warning")
        if state.over is None:
            state.kill(event.worker, event.reason)

    # ---- the end --------------------------------------------------------------------------------

    def _script_failed(self, event: ScriptFailed, now_s: float) -> None:
        state = self.state
        worker = state.members.workers.get(event.worker)
        if worker is None or state.ending or state.stopping or worker.standing is Standing.EXITED:
            return
        name = state.name(event.worker)
        state.say(f"{name}: {event.summary}\n{event.traceback}".rstrip(), "error")
        if state.is_member(event.worker):
            if event.hardware and state.config.observe and not state.finishing:
                observe_hardware(state, worker, event.summary, now_s)
            elif event.hardware and not state.finishing:
                if worker.useful:
                    text = f"failed with a machine's error ({event.summary})"
                    member_lost(state, worker, "hardware", text, now_s, None, event.summary)
                    state.kill(event.worker, event.summary)
                return
        elif state.generations and not state.restarting:
            state.say(f"{name} failed while it rehearsed; it is replaced, no rank is touched", "warning")
            state.kill(event.worker, event.summary)
            return
        reason = f"the script failed in {name}: {event.summary}"
        state.ending = Ending(
            exit_code=1, reason=reason, until_s=now_s + state.config.exit_wait_s, awaits=event.worker
        )

    def _usage_refused(self, event: UsageRefused, now_s: float) -> None:
        state = self.state
        worker = state.members.workers.get(event.worker)
        if worker is None or state.ending or state.stopping:
            return
        if state.is_member(event.worker) or not state.generations or state.restarting:
            state.end(USAGE_EXIT_CODE, event.message, now_s)
        elif worker.useful:
            state.say(f"{state.name(event.worker)}: {event.message}", "warning")
            state.kill(event.worker, event.message)

    def _worker_finished(self, event: WorkerFinished, now_s: float) -> None:
        state = self.state
        if not state.is_member(event.worker) or state.newest is None:
            return
        worker = state.members.workers[event.worker]
        worker.finished, worker.step = True, max(worker.step, event.step)
        if not state.finishing:
            begin_finish(state, event, now_s)

    def _persist_failed(self, event: PersistFailed) -> None:
        if not self.state.ledger_lost:
            self.state.ledger_lost = True
            self.state.say(
                f"the ledger cannot be written ({event.reason}): training goes on, what happens now is not kept",
                "error",
            )

    def _stop_requested(self, event: StopRequested, now_s: float) -> None:
        state = self.state
        if state.stopping is not None and not event.hard:
            return
        grace_s = 0.0 if event.hard else state.config.stop_grace_s
        reason = f"stopped by {event.signal}" if state.stopping is None else state.stopping.reason
        code = STOP_EXIT_CODES.get(event.signal, 143)
        state.stopping = Ending(
            exit_code=state.stopping.exit_code if state.stopping else code,
            reason=reason,
            until_s=now_s + grace_s + state.config.exit_wait_s,
        )
        for worker in state.members.alive():
            state.kill(worker.number, reason, grace_s)


def _must_be_silent(state: JobState, event: WorkerSuspected) -> bool:
    """While a rank waits for a spare to start, survivors stand in collectives that cannot end.

    Some are a collective behind others then, and silent for as long as the spare takes. One that hangs for
    reasons of its own is told of again, by its agent, when the next generation is there.
    """
    waits = state.waiting is not None and bool(state.gone())
    return waits and event.evidence.get("state") != STOPPED

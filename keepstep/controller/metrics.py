"""What Prometheus reads of a job, at GET /metrics: made from the controller's picture when it is asked for.

No series names a rank or a worker: a job of 2,000 ranks has as many series here as one of 2 (the agents tell of
workers). Names, units and what to do with them: docs/metrics.md.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from keepstep import __version__
from keepstep.controller.incidents import PHASES
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.incident import CAUSES, RESOLUTIONS

if TYPE_CHECKING:
    from keepstep.controller.ledger import Ledger

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JOB_STATES = ("setup", "running", "recovering", "waiting", "finished", "failed")
READINESS = ("hot", "warm", "starting")
NODE_STATES = ("connected", "silent", "disconnected", "lost")
STEP_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Meter:
    """Counts what no picture of one moment shows. Fed by the controller's loop, event by event."""

    def __init__(self) -> None:
        self.steps_committed = 0
        self.step_counts = [0] * (len(STEP_BUCKETS_S) + 1)
        self.step_seconds = 0.0
        self.entries_lost = 0
        self._published = 0
        self._published_s: float | None = None

    def saw(self, event: evt.Event, actions: Iterable[act.Action], now_s: float) -> None:
        """Progress tells how many steps were committed since the last, and how long each took on average."""
        if isinstance(event, evt.Progressed | evt.NodeProgressed):
            self._progressed(event.published, now_s)
        elif any(isinstance(action, act.Announce) and action.generation.fresh for action in actions):
            self._published, self._published_s = 0, None  # the world starts again

    def _progressed(self, published: int, now_s: float) -> None:
        steps = published - self._published
        if steps <= 0:
            return
        if self._published_s is not None and self._published:
            each_s = (now_s - self._published_s) / steps
            self.step_counts[bisect.bisect_left(STEP_BUCKETS_S, each_s)] += steps
            self.step_seconds += each_s * steps
        self.steps_committed += steps
        self._published, self._published_s = published, now_s


class JobMetrics:
    """The text of /metrics. `picture` gives the machine's snapshot, `others` metrics of other parts."""

    def __init__(
        self,
        *,
        job: str,
        mode: str,
        meter: Meter,
        ledger: Ledger,
        picture: Callable[[], Mapping[str, Any]],
        incidents: Callable[[], Iterable[Mapping[str, Any]]],
        agents: Callable[[], tuple[int, int]],
        webhook: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._job, self._mode = job, mode
        self._meter, self._ledger = meter, ledger
        self._picture, self._incidents, self._agents = picture, incidents, agents
        self.webhook = webhook
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(self.families))

    def text(self) -> bytes:
        """The exposition, as Prometheus reads it."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Every metric of the controller."""
        picture = self._picture()
        yield from self._of_job(picture)
        yield from self._of_steps(picture)
        yield from _of_workers(picture)
        yield from _of_incidents(list(self._incidents()), picture)
        yield from self._of_bookkeeping(picture)

    def _of_job(self, picture: Mapping[str, Any]) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "keepstep_job_info", "Always 1; the labels tell the job.", labels=["name", "mode", "version"]
        )
        info.add_metric([self._job, self._mode, __version__], 1)
        yield info
        state = GaugeMetricFamily(
            "keepstep_job_state", "1 for the state that the job is in, else 0.", labels=["state"]
        )
        for name in JOB_STATES:
            state.add_metric([name], picture["state"] == name)
        yield state
        yield GaugeMetricFamily("keepstep_world_size", "Ranks of the job.", picture["world_size"])
        number = picture["generation"]
        yield GaugeMetricFamily(
            "keepstep_generation",
            "Number of the newest map of ranks to workers; -1 before the first.",
            -1 if number is None else number,
        )
        shield, observe = picture["protection"], str(int(picture["observe"]))
        protection = GaugeMetricFamily(
            "keepstep_protection",
            "1 while a failure of any rank would be repaired, else 0.",
            labels=["observe"],
        )
        protection.add_metric([observe], int(shield["on"]))
        yield protection
        bare = 0 if shield["on"] else len(shield["ranks"]) or picture["world_size"]
        yield GaugeMetricFamily("keepstep_unprotected_ranks", "Ranks whose death would end the job.", bare)
        yield GaugeMetricFamily(
            "keepstep_unkept_ranks",
            "Ranks whose records no other node keeps, though one should.",
            len(picture["unkept_ranks"]),
        )
        waiting = picture["waiting"]
        waited_s = 0.0 if waiting is None else max(0.0, time.monotonic() - waiting["since_s"])
        yield GaugeMetricFamily(
            "keepstep_waiting_seconds",
            "How long the job has waited for workers; 0 when it does not.",
            waited_s,
        )

    def _of_steps(self, picture: Mapping[str, Any]) -> Iterator[Metric]:
        meter = self._meter
        yield CounterMetricFamily(
            "keepstep_steps_committed", "Steps that all ranks have committed.", meter.steps_committed
        )
        yield GaugeMetricFamily(
            "keepstep_step", "The newest step that all ranks are known to hold.", picture["published"]
        )
        buckets, total = [], 0
        for bound, count in zip((*map(str, STEP_BUCKETS_S), "+Inf"), meter.step_counts, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            "keepstep_step_seconds",
            "Time from one committed step to the next, averaged over a report of progress.",
            buckets=buckets,
            sum_value=meter.step_seconds,
        )

    def _of_bookkeeping(self, picture: Mapping[str, Any]) -> Iterator[Metric]:
        connected, late = self._agents()
        yield GaugeMetricFamily("keepstep_agents_connected", "Agents that are connected now.", connected)
        yield CounterMetricFamily(
            "keepstep_heartbeats_late", "Words of agents that came later than their heartbeats explain.", late
        )
        nodes = GaugeMetricFamily(
            "keepstep_nodes", "Nodes by what the controller knows of their agents.", labels=["state"]
        )
        for name, count in {
            **dict.fromkeys(NODE_STATES, 0),
            **Counter(str(node["state"]) for node in picture["nodes"]),
        }.items():
            nodes.add_metric([name], count)
        yield nodes
        ledger = self._ledger
        yield CounterMetricFamily(
            "keepstep_ledger_entries", "Entries that were written to the ledger.", ledger.entries_written
        )
        yield SummaryMetricFamily(
            "keepstep_ledger_write_seconds",
            "Time that writing the ledger took, one write for all entries that are due.",
            count_value=ledger.writes,
            sum_value=ledger.write_seconds,
        )
        yield GaugeMetricFamily(
            "keepstep_ledger_lost",
            "1 once the ledger could not be written, else 0.",
            int(picture["ledger_lost"]),
        )
        yield CounterMetricFamily(
            "keepstep_ledger_entries_lost",
            "Entries that could not be written to the ledger.",
            self._meter.entries_lost,
        )
        told = self.webhook()
        calls = CounterMetricFamily(
            "keepstep_webhook_calls",
            "Messages about incidents to the webhook, by how they ended.",
            labels=["outcome"],
        )
        for outcome in ("delivered", "retried", "dropped"):
            calls.add_metric([outcome], told.get(outcome, 0))
        yield calls
        yield GaugeMetricFamily(
            "keepstep_webhook_waiting",
            "Messages about incidents that wait to be delivered.",
            told.get("waiting", 0),
        )


def _of_workers(picture: Mapping[str, Any]) -> Iterator[Metric]:
    playing = sum(row["standing"] == "playing" for row in picture["ranks"])
    yield GaugeMetricFamily("keepstep_ranks_playing", "Ranks that a living worker plays.", playing)
    found = Counter(row.get("readiness") or "starting" for row in picture["spares"])
    spares = GaugeMetricFamily(
        "keepstep_spares", "Workers without a rank, by how far they are.", labels=["readiness"]
    )
    for name in READINESS:
        spares.add_metric([name], found.get(name, 0))
    yield spares
    yield GaugeMetricFamily(
        "keepstep_spares_wanted", "Spares that the job was started with.", picture["spares_wanted"]
    )
    yield GaugeMetricFamily("keepstep_slots_free", "Slots without a worker.", len(picture["free_slots"]))
    yield CounterMetricFamily(
        "keepstep_worker_restarts",
        "Workers started for want of a spare, and restarts of the world.",
        picture["restarts"],
    )


def _of_incidents(incidents: list[Mapping[str, Any]], picture: Mapping[str, Any]) -> Iterator[Metric]:
    closed = [one for one in incidents if one.get("closed_s") is not None]
    counts = Counter((str(one.get("cause")), str(one.get("resolution"))) for one in closed)
    by_kind = CounterMetricFamily(
        "keepstep_incidents",
        "Incidents that are over, by cause and resolution.",
        labels=["cause", "resolution"],
    )
    for cause in CAUSES:
        for resolution in RESOLUTIONS:
            by_kind.add_metric([cause, resolution], counts.get((cause, resolution), 0))
    yield by_kind
    still = picture["incident"]
    yield GaugeMetricFamily(
        "keepstep_incident_open", "1 while an incident is open, else 0.", int(still is not None)
    )
    stalled_s = sum(float(one.get("total_s") or 0.0) for one in closed)
    if still is not None:
        stalled_s += max(0.0, time.monotonic() - min(still["first_evidence_s"], still["opened_s"]))
    yield CounterMetricFamily(
        "keepstep_stall_seconds", "Time in incidents, from the first evidence to the resumption.", stalled_s
    )
    phases = SummaryMetricFamily(
        "keepstep_incident_phase_seconds",
        "Time in each phase of the incidents that are over.",
        labels=["phase"],
    )
    for phase in PHASES:
        spent_s = sum(float((one.get("phases_s") or {}).get(phase, 0.0)) for one in closed)
        phases.add_metric([phase], count_value=len(closed), sum_value=spent_s)
    yield phases
    for name, key, text in (
        ("keepstep_steps_lost", "steps_lost", "Committed steps that incidents cost."),
        ("keepstep_steps_recomputed", "steps_recomputed", "Steps that were computed again after incidents."),
        ("keepstep_transfer_bytes", "transfer_bytes", "State that was copied to replacements."),
    ):
        yield CounterMetricFamily(name, text, sum(int(one.get(key) or 0) for one in closed))
    inexact = sum(one.get("bit_exact") is False for one in closed)
    yield CounterMetricFamily(
        "keepstep_incidents_inexact", "Incidents after which training did not go on bit for bit.", inexact
    )


class _Collected(Collector):
    """prometheus-client's way to ask for families at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        """Nothing to check at registration: there may be no picture yet."""
        yield from ()

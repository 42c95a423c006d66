"""What Prometheus reads of one node: its workers' pages and processes, looked at when it is asked for.

Series name living workers only, so their number is bounded by the node's slots. Names and units: docs/metrics.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from keepstep import __version__
from keepstep.agent import procfs
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.connection import ControllerConnection
from keepstep.agent.metrics_listener import MetricsListener
from keepstep.agent.workers import Worker, Workers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WORKER = ["worker", "rank"]


class NodeMetrics:
    """The text of an agent's /metrics."""

    def __init__(
        self,
        node: str,
        slots: int,
        workers: Workers,
        announcements: Announcements,
        controller: ControllerConnection,
    ) -> None:
        self._node, self._slots = node, slots
        self._workers = workers
        self._announcements = announcements
        self._controller = controller
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(self.families))

    def text(self) -> bytes:
        """The exposition, as Prometheus reads it."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Every metric of the agent."""
        info = GaugeMetricFamily(
            "keepstep_agent_info", "Always 1; the labels tell the node.", labels=["node", "version"]
        )
        info.add_metric([self._node, __version__], 1)
        yield info
        lost_s = self._controller.lost_since_s
        away_s = 0.0 if lost_s is None else time.monotonic() - lost_s
        yield GaugeMetricFamily(
            "keepstep_agent_controller_away_seconds",
            "How long the controller has been out of reach; 0 while it is connected.",
            away_s,
        )
        yield GaugeMetricFamily("keepstep_agent_slots", "Places for workers on this node.", self._slots)
        living = self._workers.living()
        yield GaugeMetricFamily("keepstep_agent_workers", "Living workers of this node.", len(living))
        yield from self._of_pages(living)
        yield from self._of_processes(living)

    def _labels(self, worker: Worker) -> list[str]:
        rank = self._announcements.rank_of(worker.number)
        return [str(worker.number), "" if rank is None else str(rank)]

    def _of_pages(self, living: list[Worker]) -> Iterator[Metric]:
        steps = GaugeMetricFamily(
            "keepstep_worker_step", "Steps that the worker's state holds.", labels=WORKER
        )
        generation = GaugeMetricFamily(
            "keepstep_worker_generation", "The generation that the worker lives in.", labels=WORKER
        )
        collectives = CounterMetricFamily(
            "keepstep_worker_collectives", "Collectives that the worker has entered.", labels=WORKER
        )
        phase = GaugeMetricFamily(
            "keepstep_worker_phase_seconds",
            "How long the worker's main thread has been in its phase.",
            labels=[*WORKER, "phase"],
        )
        step_s = SummaryMetricFamily(
            "keepstep_worker_step_seconds", "Time from one commit to the next.", labels=WORKER
        )
        gate_s = SummaryMetricFamily(
            "keepstep_worker_gate_seconds",
            "Time in gates that passed: writing the record, and waiting for the slowest rank.",
            labels=WORKER,
        )
        record = GaugeMetricFamily(
            "keepstep_worker_record_bytes", "Size of the worker's newest record.", labels=WORKER
        )
        for worker in living:
            labels, page = self._labels(worker), worker.page
            sums = page.sums()
            steps.add_metric(labels, page.step)
            generation.add_metric(labels, page.generation)
            collectives.add_metric(labels, page.collectives)
            lasted_s = max(0.0, (time.monotonic_ns() - page.phase_since_ns) / 1e9)
            phase.add_metric([*labels, page.phase.name.lower()], lasted_s)
            step_s.add_metric(labels, count_value=sums.steps, sum_value=sums.steps_s)
            gate_s.add_metric(labels, count_value=sums.gates, sum_value=sums.gates_s)
            record.add_metric(labels, sums.record_bytes)
        yield from (steps, generation, collectives, phase, step_s, gate_s, record)

    def _of_processes(self, living: list[Worker]) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            "keepstep_worker_cpu_seconds", "Processor time of the worker's process.", labels=WORKER
        )
        memory = GaugeMetricFamily(
            "keepstep_worker_resident_bytes", "Memory that the worker's process holds.", labels=WORKER
        )
        for worker in living:
            pid = worker.python_pid or worker.process.pid
            found, statm = procfs.stat(pid), procfs.read(pid, "statm", 256)
            if found is None or not statm:
                continue  # it ended meanwhile
            labels = self._labels(worker)
            cpu.add_metric(labels, found.cpu_ticks / _TICKS_PER_S)
            memory.add_metric(labels, int(statm.split()[1]) * _PAGE_BYTES)
        yield from (cpu, memory)


def metrics_of(
    config: AgentConfig,
    workers: Workers,
    announcements: Announcements,
    controller: ControllerConnection,
) -> MetricsListener:
    """The listener that the agent's configuration asks for; it stays closed where none is asked for."""
    metrics = NodeMetrics(config.node, config.slots, workers, announcements, controller)
    return MetricsListener(config.metrics, config.token, metrics.text, CONTENT_TYPE)


class _Collected(Collector):
    """prometheus-client's way to ask for families at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        """Nothing to check at registration: there may be no worker yet."""
        yield from ()

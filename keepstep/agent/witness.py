"""What this node saw of an incident: how its ranks stood before they were cut, gathered for the person on call.

`freeze` copies counters and rings (memory, no files) in the moment before a newer generation is passed on,
and asks those that waited long for their stacks, without waiting for the answer: recovery never waits for
evidence. Files are written later, when the controller asks. It judges nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.agent import bundle, readings, stacks
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.evidence import DEADLINE_S, Evidence, describe_status, phase_name, tail_of_lines
from keepstep.agent.log_reader import query_from, read_batch
from keepstep.agent.log_times import LogTimes
from keepstep.agent.logs import STREAMS, log_path
from keepstep.agent.questions import Questions
from keepstep.agent.redact import Redactor
from keepstep.agent.rings import Rings, for_comparison, in_full, monotonic_offset_s
from keepstep.agent.workers import Worker, Workers
from keepstep.core.actions import Announce
from keepstep.core.events import WorkerExited
from keepstep.wire.ring import waited_ns

# Whoever has been in one collective for longer than this is asked for its stacks.
LONG_WAIT_S = 0.3
NOTE_DELAY_S = 0.05
KEPT_MOMENTS = 4
LOG_TAIL_BYTES = 16 << 10
FRESH_S = 2.0  # how they stood when a suspect was about to be killed still counts at the announcement
_WAITING_PHASES = frozenset({"GATE", "WAITING"})

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Stand:
    """How one worker stood. `dump_from`: where in its stacks file the answer begins; None: not asked."""

    worker: int
    rank: int
    alive: bool
    step: int
    phase: str
    phase_s: float
    collectives: int
    waited_s: float
    state: str
    ring: bytes
    stacks_file: Path
    dump_from: int | None = None
    stacks: str = ""
    stacks_from: str = ""


@dataclass(slots=True, kw_only=True)
class Moment:
    """All members on this node, at the end of one generation. `offset_s`: Unix time minus monotonic."""

    generation: int
    taken_s: float
    offset_s: float
    stands: list[Stand] = field(default_factory=list)


class Witness:
    """One node's view of incidents, and its logs: answers the controller's questions about both.

    `redactor` learns the job's secrets before the first worker starts.
    """

    def __init__(
        self,
        config: AgentConfig,
        workers: Workers,
        announcements: Announcements,
        questions: Questions,
    ) -> None:
        node, run_dir = config.node, config.run_dir.absolute()
        self.redactor = Redactor(config.token)
        self.redactor.learn(os.environ)
        rings = Rings(lambda number: None if (page := workers.page_of(number)) is None else page.path)
        self.evidence = Evidence(run_dir, self.redactor, rings)
        self.log_times = LogTimes(node, run_dir, lambda: [(w.number, w.slot) for w in workers.living()])
        self._node = node
        self._run_dir = run_dir
        self._workers = workers
        self._announcements = announcements
        self._rings = rings
        self._moments: dict[int, Moment] = {}
        questions.add("evidence", self._answer)
        questions.add("evidence-files", self._files)
        questions.add("logs", self._logs)
        questions.add("stands", self._stands)
        questions.add("waited-for", self._hear_waited_for)

    def announced(self, announce: Announce) -> None:
        """Before workers hear of a newer generation: how they stood, and which lines belong to the older one."""
        newest = self._announcements.generation
        if newest is not None and announce.generation.number > newest:
            moment = self._moments.get(newest)
            if moment is None or time.time() - moment.taken_s > FRESH_S:
                self.freeze()
        self.log_times.announced(announce.generation)

    def about_to_kill(self, worker: Worker) -> None:
        """A suspected member is to end: those who wait for it are looked at before its death sets them free."""
        newest = self._announcements.newest
        if newest is None or worker.suspected_since_s is None:
            return
        if newest.generation.rank_of(worker.number) is not None:
            self.freeze()

    def ended(self, worker: int, status: int | None) -> None:
        """A worker's process is gone."""
        self.log_times.ended(worker, describe_status(status))

    async def note_death(self, worker: Worker, event: WorkerExited) -> None:
        """Keep what an unexpected death has left."""
        await asyncio.sleep(NOTE_DELAY_S)  # recovery first; the files do not run away
        try:
            self.evidence.of_dead(worker, event)
        except OSError as error:
            log.error("no evidence about worker %s could be kept: %s", worker.number, error)

    def freeze(self) -> Moment | None:
        """Copy how the newest generation stands now. Takes well under a millisecond a worker."""
        newest = self._announcements.newest
        if newest is None:
            return None
        generation = newest.generation
        moment = Moment(generation=generation.number, taken_s=time.time(), offset_s=monotonic_offset_s())
        for worker in self._workers:
            rank = generation.rank_of(worker.number)
            if rank is not None:
                moment.stands.append(self._stand(worker, rank))
        self._rings.forget_all_but({worker.number for worker in self._workers})
        self._moments[generation.number] = moment
        while len(self._moments) > KEPT_MOMENTS:
            del self._moments[min(self._moments)]
        return moment

    async def _answer(self, about: Mapping[str, Any]) -> bytes:
        """Question "evidence": {incident, generation, reason}. Writes the files and tells in JSON what is known."""
        incident, generation = int(about["incident"]), int(about["generation"])
        deadline = time.monotonic() + DEADLINE_S
        moment = self._moments.get(generation)
        if moment is None and generation == self._announcements.generation:
            moment = self.freeze()  # nothing was announced since: everybody still stands there
        _, (device_text, devices_from) = await asyncio.gather(
            self._collect_stacks(moment, deadline), readings.devices(DEADLINE_S)
        )
        stands = [] if moment is None else moment.stands
        numbers = {stand.worker for stand in stands} | {worker.number for worker in self._workers}
        folders = {number: self.evidence.folders(number) for number in sorted(numbers)}
        summary = {
            "node": self._node,
            "incident": incident,
            "generation": generation,
            "reason": self.redactor.clean_text(str(about.get("reason", ""))),
            "taken_s": None if moment is None else moment.taken_s,
            "workers": [self._told(stand, generation) for stand in stands],
            "folders": {number: found for number, found in folders.items() if found},
            "devices_from": devices_from,
        }
        return await asyncio.to_thread(self._write, incident, moment, summary, device_text)

    async def _files(self, about: Mapping[str, Any]) -> bytes:
        """Question "evidence-files": {incident}. What lies on this node about it, as a bounded .tar.gz."""
        return await asyncio.to_thread(bundle.pack_node, self._run_dir, int(about["incident"]), self._node)

    async def _logs(self, about: Mapping[str, Any]) -> bytes:
        """Question "logs": the fields of a `Query` and cursors. One batch of lines, as JSON."""
        self.log_times.turn()
        query, cursors = query_from(about), {str(k): int(v) for k, v in dict(about["cursors"]).items()}
        batch = await asyncio.to_thread(read_batch, self._run_dir, query, cursors)
        told = {
            "lines": [line.to_list() for line in batch.lines],
            "cursors": batch.cursors,
            "more": batch.more,
        }
        return json.dumps(told).encode()

    # ---- while nobody moves ---

    async def _hear_waited_for(self, about: Mapping[str, Any]) -> bytes:
        """Question "waited-for": {workers}. The newest word counts."""
        for number in about["workers"]:
            if (worker := self._workers.get(int(number))) is not None:
                worker.waited_mark = worker.mark
        return b""

    async def _stands(self, about: Mapping[str, Any]) -> bytes:
        """Question "stands": how this node's ranks stand at this moment, in JSON. Nobody is disturbed."""
        newest = self._announcements.newest
        stands = []
        for worker in self._workers if newest is not None else ():
            assert newest is not None
            rank = newest.generation.rank_of(worker.number)
            if rank is not None:
                stands.append(self._told(self._stand(worker, rank, ask=False), newest.generation.number))
        return json.dumps({"node": self._node, "workers": stands}).encode()

    # ---- the moment -------------------------------------------------------------------------------

    def _stand(self, worker: Worker, rank: int, *, ask: bool = True) -> Stand:
        page, phase = worker.page, phase_name(worker.page)
        phase_s = (time.monotonic_ns() - page.phase_since_ns) / 1e9
        copied = self._rings.copy(worker.number)
        waited_s = waited_ns(copied, time.monotonic_ns()) / 1e9 if copied else 0.0
        if phase in _WAITING_PHASES:
            waited_s = max(waited_s, phase_s)
        known = self.evidence.known.get(worker.number, {})
        stand = Stand(
            worker=worker.number,
            rank=rank,
            alive=worker.alive or "state" in known,  # a suspect was alive when it was looked at
            step=page.step,
            phase=phase,
            phase_s=phase_s,
            collectives=page.collectives,
            waited_s=waited_s,
            state=str(known.get("state", "")),
            ring=copied,
            stacks_file=worker.stacks,
            stacks_from=str(known.get("stacks_from", "")),
        )
        if ask and worker.alive and worker.suspected_since_s is None and waited_s > LONG_WAIT_S:
            before = stacks.size(worker.stacks)
            if stacks.ask(worker.python_pid or worker.process.pid, worker.stacks):
                stand.dump_from = before
        return stand

    async def _collect_stacks(self, moment: Moment | None, deadline: float) -> None:
        """Read what those that were asked have dumped."""
        waiting = [] if moment is None else [s for s in moment.stands if s.dump_from is not None]
        for stand in waiting:
            assert stand.dump_from is not None
            while not (dumped := stacks.dumped_since(stand.stacks_file, stand.dump_from)):
                if time.monotonic() >= deadline:
                    break
                await asyncio.sleep(0.02)
            stand.stacks = self.redactor.clean(dumped).decode("utf-8", "backslashreplace")
            stand.stacks_from = "faulthandler" if dumped else "nowhere: it did not answer"

    def _told(self, stand: Stand, generation: int) -> dict[str, Any]:
        known = self.evidence.known.get(stand.worker, {})
        at = stacks.main_thread(stand.stacks) or str(known.get("main_thread", ""))
        return {
            "worker": stand.worker,
            "rank": stand.rank,
            "alive": stand.alive,
            "ended": known.get("ended", ""),
            "step": stand.step,
            "phase": stand.phase,
            "phase_s": round(stand.phase_s, 3),
            "collectives": stand.collectives,
            "waited_s": round(stand.waited_s, 3),
            "state": stand.state,
            "at": at,
            "stacks_from": stand.stacks_from,
            "groups": for_comparison(stand.ring, generation) if stand.ring else [],
        }

    # ---- the files --------------------------------------------------------------------------------

    def _write(
        self, incident: int, moment: Moment | None, summary: dict[str, Any], device_text: str
    ) -> bytes:
        folder = bundle.node_folder(self._run_dir, incident, self._node)
        shutil.rmtree(folder, ignore_errors=True)  # asked again: the newer answer counts
        folder.mkdir(parents=True)
        clean = self.redactor.clean_text
        if device_text:
            (folder / "devices.txt").write_text(clean(device_text))
        lines, why = readings.kernel_lines()
        notable = [clean(line) for line in readings.notable(lines, time.time() - readings.RECENT_S)]
        (folder / "kernel.txt").write_text(clean("\n".join(lines) or why) + "\n")
        (folder / "host.json").write_text(
            json.dumps(readings.host(self._run_dir, Path("/dev/shm")), indent=1) + "\n"
        )
        for stand in [] if moment is None else moment.stands:
            assert moment is not None
            self._write_stand(folder / f"worker-{stand.worker}", stand, moment)
        summary = {**summary, "folder": str(folder.relative_to(self._run_dir)), "notable": notable}
        (folder / "node.json").write_text(json.dumps(summary, indent=1) + "\n")
        return json.dumps(summary).encode()

    def _write_stand(self, folder: Path, stand: Stand, moment: Moment) -> None:
        folder.mkdir()
        counters = {
            name: getattr(stand, name)
            for name in ("worker", "rank", "alive", "step", "phase", "phase_s", "collectives", "waited_s")
        }
        counters |= {"generation": moment.generation, "taken_s": moment.taken_s}
        (folder / "counters.json").write_text(json.dumps(counters, indent=1) + "\n")
        if stand.ring:
            groups = in_full(stand.ring, moment.offset_s)
            (folder / "collectives.json").write_text(json.dumps(groups, indent=1) + "\n")
        if stand.stacks:
            (folder / "stacks.txt").write_text(stand.stacks)
        for stream in STREAMS:
            data = tail_of_lines(log_path(self._run_dir, stand.worker, stream), LOG_TAIL_BYTES)
            if data:
                (folder / f"{stream}.tail").write_bytes(self.redactor.clean(data))

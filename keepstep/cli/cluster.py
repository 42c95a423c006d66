"""Several nodes on one machine, by the real commands: a controller, agents with a folder and an address each.

For tests and benchmarks. A node is killed, stopped and continued as a whole: its agent and everything that it
started, found by what stands in their environment. It knows nothing of the controller's insides.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from keepstep.cli.jobs import JobFailed
from keepstep.cli.reports import ReportReader, Reports, merge
from keepstep.cli.source import ask
from keepstep.controller.ledger import LedgerReader
from keepstep.controller.rundir import Address, RunDirectory

POLL_S = 0.02
END_GRACE_S = 20.0
LAST_LINES = 25
Ask = Callable[[Address, str], Any]  # how to ask the controller, as `keepstep.cli.source.ask` does


class Process:
    """One command of the cluster in a session of its own; its output goes to a file."""

    def __init__(
        self, command: Sequence[str], folder: Path, name: str, environment: Mapping[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.console = folder / f"{name}.console.txt"
        with self.console.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.console.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_GRACE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Node:
    """One node: `address` out of 127.0.0.0/8 (or of its network namespace), a folder, an agent."""

    def __init__(
        self, cluster: Cluster, name: str, address: str, slots: int, labels: Mapping[str, str]
    ) -> None:
        self.name, self.address, self.slots, self.labels = name, address, slots, dict(labels)
        self.folder = cluster.folder / name
        self.run_dir = self.folder / "run"
        self.reader = ReportReader(self.run_dir)
        self.prefix: tuple[str, ...] = ()  # what stands before a command: `ip netns exec ...`
        self._cluster = cluster
        self.agent: Process | None = None

    def start(self, *options: str) -> None:
        """Start the agent (again)."""
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        # fmt: off
        command = [
            *self.prefix, sys.executable, "-m", "keepstep", "agent",
            "--join", self._cluster.url, "--token-file", str(self._cluster.token_file),
            "--node", self.name, "--slots", str(self.slots), "--advertise", self.address,
            "--log-dir", str(self.run_dir), *(("--labels", labels) if labels else ()), *options,
        ]
        # fmt: on
        self.agent = Process(command, self.folder, "agent", self._cluster.environment)

    # ---- what can be seen -------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Agent, workers and all that they started."""
        found = self._cluster.processes_of(self.name)
        if self.agent is not None and self.agent.exit_code is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent = psutil.Process(self.agent.process.pid)
                mine = {process.pid for process in found}
                found += [one for one in (agent, *agent.children(recursive=True)) if one.pid not in mine]
        return found

    def workers(self) -> dict[int, psutil.Process]:
        """Worker -> its process, of those that live."""
        found: dict[int, psutil.Process] = {}
        for process in self._cluster.processes_of(self.name):
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == process.pid:
                    found.setdefault(int(process.environ()["KEEPSTEP_WORKER"]), process)
        return found

    # ---- harm -------------------------------------------------------------------------------------

    def kill(self) -> float:
        """The node is gone: SIGKILL to everything on it at once. Returns the moment (unix time)."""
        return self._signal_all(signal.SIGKILL)

    def stop(self) -> float:
        """The node stands still: SIGSTOP to everything on it. Returns the moment (unix time)."""
        return self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> float:
        victims = [process.pid for process in self.processes()]
        at_s = time.time()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return at_s

    def end(self) -> None:
        """For the end of a test: nothing of the node is left."""
        if self.agent is not None:
            self.go_on()
            self.agent.end()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


class Cluster:
    """A job over several nodes; leave the `with` block and nothing of it is left.

    `controller_prefix`: what stands before the controller's command (a network namespace); `ask`: how to reach it.
    """

    def __init__(
        self,
        folder: Path,
        script: Sequence[str],
        *,
        nodes: int = 2,
        ranks_per_node: int = 2,
        spares: int = 0,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        bind: str = "127.0.0.1:0",
        controller_prefix: Sequence[str] = (),
        ask: Ask = ask,
    ) -> None:
        self.folder = folder
        self.ranks = nodes * ranks_per_node
        self.job = f"c{os.getpid()}-{time.monotonic_ns():x}"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.run = RunDirectory(folder / "controller" / "run")
        self.nodes: dict[str, Node] = {}
        self._prefix = tuple(controller_prefix)
        self._ask = ask
        # fmt: off
        self._command = [
            sys.executable, "-m", "keepstep", "controller", "--bind", bind, "--run", str(self.run.path),
            "--job", self.job, "--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node),
            "--spares", str(spares), *options, *script,
        ]
        # fmt: on
        self.controller = self._start(self._command)
        self.wait_until(lambda: self.run.address() is not None, 60, "the controller's address")
        found = self.run.address()
        assert found is not None
        self.url = found.url
        self.token = found.token
        self.token_file = folder / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(found.token)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.end()
        if self.controller.exit_code is None:
            os.kill(self.controller.process.pid, signal.SIGCONT)
        self.controller.end()
        for process in self.processes_of(None):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _start(self, command: Sequence[str]) -> Process:
        return Process([*self._prefix, *command], self.folder / "controller", "controller", self.environment)

    def add(
        self,
        name: str,
        *,
        slots: int,
        address: str | None = None,
        spare: bool = False,
        labels: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        start: bool = True,
    ) -> Node:
        """A node more. Its address: the next of 127.0.0.0/8 unless one is named."""
        own = address or f"127.0.0.{len(self.nodes) + 2}"
        wanted = {**(labels or {}), **({"keepstep": "spare"} if spare else {})}
        node = self.nodes[name] = Node(self, name, own, slots, wanted)
        node.prefix = tuple(prefix)
        if start:
            node.start()
        return node

    # ---- what can be seen -------------------------------------------------------------------------

    def processes_of(self, node: str | None) -> list[psutil.Process]:
        """Workers of a node (None: of all) and what they started, by their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                theirs = process.environ()
                is_ours = theirs.get("KEEPSTEP_JOB") == self.job
                if (
                    is_ours
                    and node in (None, theirs.get("KEEPSTEP_NODE"))
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def reports(self) -> Reports:
        """What all ranks have reported so far, whichever node they were on."""
        for node in self.nodes.values():
            node.reader.poll()
        return merge([node.reader.reports for node in self.nodes.values()])

    def step_of(self, rank: int) -> int:
        """The newest step that a rank has reported; -1: none."""
        lines = self.reports().lines.get(rank)
        return lines[-1].step if lines else -1

    def status(self) -> dict[str, Any]:
        """What the controller says of the job."""
        found = self.run.address()
        assert found is not None, self.last_output()
        answer: dict[str, Any] = self._ask(found, "/api/status")
        return answer

    def node_of_rank(self, rank: int) -> Node:
        """The node on which a rank is played now."""
        row = next(row for row in self.status()["workers"] if row["rank"] == rank)
        return self.nodes[row["node"]]

    def spares(self) -> list[str]:
        """The states of the spares, such as "hot"."""
        return [str(row["state"]) for row in self.status()["workers"] if row["rank"] is None]

    def ledger(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Bodies of the ledger's entries of one kind (or all), oldest first."""
        with LedgerReader(self.run.ledger) as ledger:
            return [entry.value() for entry in ledger.entries() if kind is None or entry.kind == kind]

    def worker_logs(self) -> str:
        parts = [
            f"--- {node.name} {path.name}\n{path.read_text(errors='replace')}"
            for node in self.nodes.values()
            for path in sorted((node.run_dir / "logs").glob("*.stderr"))
        ]
        return "\n".join(parts)

    def last_output(self) -> str:
        """The last lines of controller and agents."""
        sources = [("controller", self.controller)] if hasattr(self, "controller") else []
        sources += [(name, node.agent) for name, node in self.nodes.items() if node.agent is not None]
        parts = [f"--- {name}\n" + "\n".join(one.said.splitlines()[-LAST_LINES:]) for name, one in sources]
        return "\n".join(parts)

    # ---- waiting ----------------------------------------------------------------------------------

    def wait_until(
        self, reached: Callable[[], object], timeout_s: float, what: str, poll_s: float = POLL_S
    ) -> None:
        """Raises JobFailed at the deadline."""
        deadline_s = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline_s:
                raise JobFailed(f"waited {timeout_s:.0f} s for {what}:\n{self.last_output()}")
            time.sleep(poll_s)

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> None:
        """Until every rank has reported `step`."""

        def reached() -> bool:
            lines = self.reports().lines
            return len(lines) == self.ranks and all(ranks[-1].step >= step for ranks in lines.values())

        self.wait_until(reached, timeout_s, f"step {step}")

    def wait_for_spares(self, states: Sequence[str], timeout_s: float = 90.0) -> None:
        self.wait_until(lambda: self.spares() == list(states), timeout_s, f"spares {states}", poll_s=0.2)

    def wait_for_exit(self, timeout_s: float = 120.0) -> int:
        """The controller's exit code."""
        self.wait_until(
            lambda: self.controller.exit_code is not None, timeout_s, "the job to end", poll_s=0.1
        )
        assert self.controller.exit_code is not None
        return self.controller.exit_code

    # ---- the controller -----------------------------------------------------------------------------

    def signal_controller(self, number: signal.Signals) -> None:
        os.kill(self.controller.process.pid, number)

    def address(self) -> Address | None:
        return self.run.address()

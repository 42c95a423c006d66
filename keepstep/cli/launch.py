"""A job's controller, with this node's agent in the same process or alone, from the first line to the exit code.

The two speak as if they were machines apart. Here is only what surrounds them: run
directory, signals, the terminal, and an order of leaving that forgets nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from keepstep.agent.agent import Agent
from keepstep.agent.config import AgentConfig, ConsoleLine
from keepstep.cli.addresses import is_address, is_loopback, is_wildcard, own_address
from keepstep.cli.console import REFRESH_S, Terminal
from keepstep.cli.live import draw_table, progress_line, summary
from keepstep.cli.options import NodeOptions, RunOptions
from keepstep.controller import resume
from keepstep.controller.api import build_app
from keepstep.controller.ledger import Ledger, LedgerWriteFailed
from keepstep.controller.rundir import RunDirectory, new_token
from keepstep.controller.server import Server, bind
from keepstep.controller.shell import Controller
from keepstep.controller.webhook import Webhook
from keepstep.core.job import JobMachine
from keepstep.core.job_config import JobConfig
from keepstep.errors import KeepstepError, UsageError
from keepstep.wire.messages import JobSpec
from keepstep.wire.tokens import read_token

AGENT_END_TIMEOUT_S = 20.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(options: RunOptions, remarks: Sequence[str]) -> int:
    """Run the job to its end, or go on with one whose controller died. Returns the exit code.

    Raises UsageError before anything was started.
    """
    run_dir = RunDirectory(options.run_dir)
    taken = _take_up(options, run_dir)
    try:
        sock = bind(*_where(options, taken))
    except UsageError:
        if taken is not None:
            taken.ledger.close()
        raise
    host, port = sock.getsockname()[:2]
    try:
        advertise = advertised(options, host)
        if taken is None:
            run_dir.make()
        ledger = taken.ledger if taken is not None else Ledger(run_dir.ledger)
    except KeepstepError:
        sock.close()
        raise
    over = False
    try:
        job = _Job(options, run_dir, ledger, (host, port), advertise, taken)
        named = options.endpoint or options.bind
        name = None if is_wildcard(named.host) else named.host
        app = build_app(job.controller, open_metrics=options.telemetry.open_metrics)
        server = Server(app, sock, name=name, tls=options.trust.tls)
        try:
            return asyncio.run(job.run(server, remarks))
        finally:
            job.terminal.close()
            over = not options.outlived or resume.is_over(ledger)
    finally:
        with contextlib.suppress(LedgerWriteFailed):
            ledger.close()
        if over:
            run_dir.withdraw_address()
        sock.close()


def _take_up(options: RunOptions, run_dir: RunDirectory) -> resume.TakenUp | None:
    """The run that lies in the run directory already; None for a new one. Raises UsageError."""
    if not run_dir.ledger.exists():
        return None
    if not options.outlived:
        Ledger(run_dir.ledger).close()  # a newer or foreign ledger is refused in its own words
        raise UsageError(f"{run_dir.path} already holds a run: choose another --log-dir")
    name = options.job if options.job_named else None
    return resume.take_up(run_dir, _spec(options), job=name, token=options.trust.token)


def _where(options: RunOptions, taken: resume.TakenUp | None) -> tuple[str, int]:
    """Where to listen: agents look for a controller that was away where it was before."""
    if taken is None or options.bind.port != 0:
        return options.bind.host, options.bind.port
    return taken.host, taken.port


def advertised(options: RunOptions, bound: str) -> str:
    """The address under which this node's workers are found. Raises UsageError when others could not reach it."""
    endpoint = options.endpoint
    if endpoint is None or options.node is None:
        return bound
    loops_back = is_loopback(bound) and not is_address(endpoint.host) and endpoint.host != "localhost"
    if loops_back and options.nnodes > 1:
        raise UsageError(
            f"{endpoint.host} is {bound} on this machine (see /etc/hosts), where no other node can reach it: "
            "give the machine's address to --rdzv-endpoint, or --bind ADDRESS:PORT here"
        )
    if options.node.advertise is not None:
        return own_address(options.node.advertise, "--advertise")
    if not is_wildcard(bound):
        return bound
    if is_wildcard(endpoint.host):
        raise UsageError(f"--bind {options.bind} does not say this node's address: give --advertise ADDRESS")
    return own_address(endpoint.host, "--rdzv-endpoint")


class _Job:
    """The pieces of one running job, and how they are wired."""

    def __init__(
        self,
        options: RunOptions,
        run_dir: RunDirectory,
        ledger: Ledger,
        bound: tuple[str, int],
        advertise: str,
        taken: resume.TakenUp | None,
    ) -> None:
        self._options = options
        self._bound = bound
        self._taken = taken
        self._advertise = advertise
        self._run_dir = run_dir
        self._ledger = ledger
        self._started_s = time.monotonic()
        self._stops_asked = 0
        self._view: dict[str, Any] | None = None
        self.terminal = Terminal(
            draw=lambda: draw_table(self._view), progress=lambda: progress_line(self._view)
        )
        spec = _spec(options) if taken is None else taken.spec
        config = replace(_machine_config(options), job=spec.job)
        self.controller = Controller(
            machine=JobMachine(config) if taken is None else taken.machine(config),
            spec=spec,
            token=options.trust.token or (new_token() if taken is None else taken.token),
            ledger=ledger,
            say=self.terminal.say,
            outlived=options.outlived,
        )
        self._webhook = self._make_webhook()

    def _make_webhook(self) -> Webhook | None:
        told = self._options.telemetry
        if told.webhook is None:
            return None
        webhook = Webhook(told.webhook, told.secret, self.controller.spec.job, self.terminal.say)
        self.controller.incidents.on_change = webhook.tell
        self.controller.metrics.webhook = webhook.numbers
        return webhook

    async def run(self, server: Server, remarks: Sequence[str]) -> int:
        options, say = self._options, self.terminal.say
        for remark in remarks:
            say(remark, "warning")
        job = self.controller.spec.job
        say(
            f"job {job}: {options.world_size} ranks, {options.spares} spares, run directory {self._run_dir.path}"
        )
        if self._taken is not None:
            count = len(self._taken.entries)
            say(f"it goes on from entry {count} of its ledger; its agents are awaited at {server.url}")
        if options.node is None or options.endpoint is not None:
            say(f"nodes join with: keepstep agent --join {server.url} --token-file {self._token_hint()}")
        with self._signals():
            server.start()
            try:
                self._run_dir.publish_address(
                    server.url,
                    job,
                    self.controller.token,
                    read_token(self.controller.token),
                    options.trust.tls,
                )
                if options.outlived:
                    resume.keep(self._run_dir, self.controller.spec, *self._bound)
            except OSError as error:
                say(f"neither keepstep status nor a later controller will find this job: {error}", "warning")
            node = options.node
            agent = None if node is None else asyncio.create_task(self._agent(server.url, node), name="agent")
            looking = asyncio.create_task(self._look(), name="look")
            if self._webhook is not None:
                self._webhook.start()
            try:
                code = await self.controller.run()
            finally:
                looking.cancel()
                if agent is not None:
                    await self._end_agent(agent)
                if self._webhook is not None:
                    await self._webhook.close()
                await server.stop()
        say(summary(self.controller, code, self._ledger.head, time.monotonic() - self._started_s))
        return code

    def _token_hint(self) -> str:
        """The file that a user may hand to the nodes."""
        return "FILE" if self._options.trust.token else str(self._run_dir.token_file)

    async def _agent(self, url: str, node: NodeOptions) -> None:
        """The embedded agent; however it ends, the controller hears of it."""
        reason = "the agent has ended"
        name = node.name or "node0"
        try:
            await Agent(
                AgentConfig(
                    controller_url=url.replace("http", "ws", 1) + "/agent",
                    token=self.controller.token,
                    tls=node.trust.tls,
                    node=name,
                    slots=node.slots,
                    labels=node.labels,
                    metrics=node.metrics,
                    run_dir=self._run_dir.path,
                    advertise=self._advertise,
                    embedded=True,
                    stop_grace_s=node.stop_grace_s,
                    console=self._show,
                )
            ).run()
        except Exception as error:
            logging.getLogger("keepstep").debug("the agent failed", exc_info=True)
            reason = f"the agent failed: {error or type(error).__name__}"
            self.terminal.say(reason, "error")
        finally:
            self.controller.lose_agent(name, reason)

    async def _look(self) -> None:
        """Keep a picture for the terminal's thread: the machine itself is the loop's alone."""
        while True:
            self._view = self.controller.status()
            await asyncio.sleep(REFRESH_S)

    async def _end_agent(self, agent: asyncio.Task[None]) -> None:
        """The agent leaves by itself after Stop; cancelled, it still ends its workers before it returns."""
        done, _ = await asyncio.wait({agent}, timeout=AGENT_END_TIMEOUT_S)
        if not done:
            agent.cancel()
            await asyncio.wait({agent}, timeout=AGENT_END_TIMEOUT_S)

    def _show(self, line: ConsoleLine) -> None:
        assert self._options.node is not None
        shown, slot = self._options.node.shown_slots, self.controller.slot_of(line.worker)
        if shown is None or slot is None or slot in shown:
            self.terminal.line(line.text, error=line.stream == "stderr")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._asked_to_stop, number)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _asked_to_stop(self, number: signal.Signals) -> None:
        self._stops_asked += 1
        name = signal.Signals(number).name
        if self._stops_asked == 1:
            self.terminal.say(f"{name}: ending the job in order (once more: at once)", "warning")
        else:
            self.terminal.say(f"{name} again: ending the job at once", "warning")
        self.controller.request_stop(name, hard=self._stops_asked > 1)


def _machine_config(options: RunOptions) -> JobConfig:
    optional: dict[str, Any] = {} if options.max_restarts is None else {"max_restarts": options.max_restarts}
    return JobConfig(
        world_size=options.world_size,
        spares=options.spares,
        job=options.job,
        spare_timeout_s=options.spare_timeout_s,
        spare_check_s=options.spare_check_s,
        stop_grace_s=options.stop_grace_s,
        observe=options.mode == "observe",
        nodes=options.nnodes,
        ranks_per_node=options.ranks_per_node,
        replace_unit=options.replace_unit,
        policy=options.policy,
        **optional,
    )


def _spec(options: RunOptions) -> JobSpec:
    return JobSpec(
        job=options.job,
        script=options.script,
        args=options.args,
        world_size=options.world_size,
        spares=options.spares,
        launch=options.launch,
        mode=options.mode,
        record_bytes=options.record_limit_bytes,
        tee=options.tee,
        redirects=options.redirects,
        working_dir=os.getcwd(),
    )

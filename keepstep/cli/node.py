"""This machine as a node of somebody else's job: find the controller, serve it, end with the job's exit code.

Used by `keepstep agent` and by `keepstep run` on every node but the first. It does not host a controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.agent.agent import Agent
from keepstep.agent.config import AgentConfig, ConsoleLine
from keepstep.cli.addresses import Endpoint, own_address
from keepstep.cli.console import Terminal
from keepstep.cli.meeting import Meeting, NotThere, meet
from keepstep.cli.options import NodeOptions
from keepstep.controller.rundir import DEFAULT_PARENT
from keepstep.errors import ProtectionError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
EXIT_ABANDONED = 75  # EX_TEMPFAIL: nothing is wrong here, the job's controller is gone or never came
RETRY_S = 0.5
SAY_AGAIN_S = 30.0


def join(
    node: NodeOptions, endpoint: Endpoint, remarks: Sequence[str], *, working_dir: str | None = None
) -> int:
    """Serve the controller at `endpoint` until the job ends. Returns its exit code; raises UsageError."""
    terminal = Terminal()
    try:
        return asyncio.run(_Node(node, endpoint, terminal, working_dir).run(remarks))
    finally:
        terminal.close()


class _Node:
    """One agent and what surrounds it: signals, the terminal, the wait for the controller."""

    def __init__(
        self, node: NodeOptions, endpoint: Endpoint, terminal: Terminal, working_dir: str | None
    ) -> None:
        self._node = node
        self._endpoint = endpoint
        self._terminal = terminal
        self._working_dir = working_dir
        self._agent: Agent | None = None
        self._signal: signal.Signals | None = None
        self._stopped = asyncio.Event()

    async def run(self, remarks: Sequence[str]) -> int:
        for remark in remarks:
            self._terminal.say(remark, "warning")
        with self._signals():
            meeting = await self._find_controller()
            if meeting is None:
                assert self._signal is not None
                return 128 + self._signal
            return await self._serve(meeting)

    async def _serve(self, meeting: Meeting) -> int:
        node, say = self._node, self._terminal.say
        advertise = own_address(node.advertise, "--advertise") if node.advertise else meeting.local_address
        run_dir = node.run_dir or Path.cwd() / DEFAULT_PARENT / meeting.job
        name = node.name or f"node-{advertise.replace(':', '-').replace('%', '-')}"
        say(
            f"{name} ({advertise}, {node.slots} slots) joins job {meeting.job} at {self._endpoint}, "
            f"run directory {run_dir}"
        )
        url = self._endpoint.url(tls=node.trust.tls is not None)
        assert node.trust.token is not None
        self._agent = Agent(
            AgentConfig(
                controller_url=url.replace("http", "ws", 1) + "/agent",
                token=node.trust.token,
                tls=node.trust.tls,
                node=name,
                slots=node.slots,
                labels=node.labels,
                metrics=node.metrics,
                run_dir=run_dir,
                advertise=advertise,
                working_dir=self._working_dir,
                stop_grace_s=node.stop_grace_s,
                isolation_timeout_s=node.isolation_timeout_s,
                console=self._show,
                say=say,
            )
        )
        if self._signal is not None:
            return 128 + self._signal
        try:
            await self._agent.run()
        except ProtectionError as error:
            if self._signal is None:
                say(f"{name} leaves: {error}", "error")
                return EXIT_ABANDONED if self._agent.joined else 1
        ended = self._agent.ended
        if ended is None:
            assert self._signal is not None
            say(f"{name} has left the job after {self._signal.name}")
            return 128 + self._signal
        say(
            f"job {meeting.job} has ended with exit code {ended.exit_code}: {ended.reason}".removesuffix(": ")
        )
        return ended.exit_code

    async def _find_controller(self) -> Meeting | None:
        """Wait until it answers; None when told to stop meanwhile. Raises UsageError when it never will."""
        trust, timeout_s = self._node.trust, self._node.join_timeout_s
        assert trust.token is not None
        started_s = time.monotonic()
        say_s = started_s + 1.0
        while self._signal is None:
            try:
                return await asyncio.to_thread(meet, self._endpoint, trust.token, trust.tls)
            except NotThere as error:
                now_s = time.monotonic()
                if now_s - started_s >= timeout_s:
                    raise ProtectionError(
                        f"no controller at {self._endpoint} after {timeout_s:.0f} s: {error}"
                    ) from None
                if now_s >= say_s:
                    self._terminal.say(f"waiting for the controller at {self._endpoint}: {error}")
                    say_s = now_s + SAY_AGAIN_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), RETRY_S)
        return None

    def _show(self, line: ConsoleLine) -> None:
        self._terminal.line(line.text, error=line.stream == "stderr")

    # ---- signals ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._asked_to_stop, signal.Signals(number))
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _asked_to_stop(self, number: signal.Signals) -> None:
        again, self._signal = self._signal is not None, number
        self._stopped.set()
        if again:
            self._terminal.say(f"{number.name} again: this node's workers end at once", "warning")
        else:
            self._terminal.say(f"{number.name}: this node leaves the job (once more: at once)", "warning")
        if self._agent is not None:
            self._agent.leave(number.name, hard=again)

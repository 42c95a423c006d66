"""One process that the agent started: own session, watched by pidfd, ended together with its group.

It does not know workers, ranks or messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from keepstep.agent import procfs

# SIGKILL ends everything that can be ended at once; longer means a process stuck in the kernel.
KILL_DEADLINE_S = 10.0
STOPPED_CHECK_S = 0.1


class Process:
    """A running leader of a process group. Make one by `start`, in the loop's own thread.

    `status`: None while it runs; then the exit code, or minus the signal's number.
    """

    def __init__(self, child: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
        self.pid = child.pid
        self.status: int | None = None
        self._child = child
        self._on_exit = on_exit
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        directory: str | None,
        stdout: int,
        stderr: int,
        on_exit: Callable[[int], None],
    ) -> Process:
        """Start it. `on_exit(status)` runs in the loop as soon as it ended. Raises OSError."""
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # no terminal, no Ctrl-C of the launcher, a group of its own
        )
        return cls(child, on_exit)

    @property
    def alive(self) -> bool:
        return self.status is None

    def owns(self, pid: int) -> bool:
        """Whether `pid` is this process or one of its group."""
        found = procfs.stat(pid)
        return self.alive and found is not None and found.group == self.pid

    def send(self, number: int) -> None:
        """Signal the leader alone; nothing happens when it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to the whole group; a stopped process ends as well. Idempotent."""
        # Until the leader is reaped its number cannot be given to a stranger's group.
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self, grace_s: float = 0.0) -> bool:
        """SIGTERM, `grace_s` seconds, SIGKILL of the group. False when even that took too long."""
        deadline_s = time.monotonic() + grace_s
        if grace_s > 0:
            self.send(signal.SIGTERM)
        # A stopped process cannot answer SIGTERM: there is nothing to wait for.
        while (left_s := deadline_s - time.monotonic()) > 0 and not self._stopped():
            if await self.wait(min(left_s, STOPPED_CHECK_S)):
                return True
        self.kill()
        return await self.wait(KILL_DEADLINE_S)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until it ended; False at the timeout."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _stopped(self) -> bool:
        found = procfs.stat(self.pid)
        return found is not None and found.state in "Tt"

    def _reap(self) -> None:
        # The group first: a loader's worker holds sockets of the dead and would hide its end from the peers.
        self.kill()
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        if result is None:  # not possible without WNOHANG; the loop will call again
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._child.returncode = self.status  # it is reaped: subprocess must not wait for that number again
        self._ended.set()
        self._on_exit(self.status)

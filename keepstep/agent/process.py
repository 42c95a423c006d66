"""One process in a session of its own, watched by pidfd, ended together with its group.

Either this agent started it, or an earlier one did and this one adopted it: then it is nobody's child
here, and with which status it ended the kernel does not tell. It does not know workers, ranks or messages.
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
    """A leader of a process group. Make one by `start`, `adopt` or `past`, in the loop's own thread.

    `status`: the exit code, or minus the signal's number; None while it runs, or when nobody knows.
    `started`: when, in ticks since boot: with the pid it names the process for good.
    """

    def __init__(
        self,
        pid: int,
        started: int,
        on_exit: Callable[[], None],
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self.started = started
        self.status: int | None = None
        self._child = child
        self._on_exit = on_exit
        self._ended = asyncio.Event()
        self._pidfd = -1

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        directory: str | None,
        stdout: int,
        stderr: int,
        on_exit: Callable[[], None],
    ) -> Process:
        """Start it. `on_exit()` runs in the loop as soon as it ended. Raises OSError."""
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # no terminal, no Ctrl-C of the launcher, a group of its own
        )
        found = procfs.stat(child.pid)
        process = cls(child.pid, 0 if found is None else found.started, on_exit, child)
        process._watch(os.pidfd_open(child.pid))
        return process

    @classmethod
    def adopt(cls, pid: int, started: int, on_exit: Callable[[], None]) -> Process | None:
        """Watch a process that an earlier agent started; None when it has ended.

        `on_exit()` runs in the loop as soon as it ends.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        # Looked at with the pidfd in hand: the number cannot change its owner in between.
        if not _is_leader(pid, started):
            os.close(pidfd)
            return None
        process = cls(pid, started, on_exit)
        process._watch(pidfd)
        return process

    @classmethod
    def past(cls, pid: int, started: int, status: int | None) -> Process:
        """One that ended while nobody watched; what is left of its group is the caller's affair."""
        process = cls(pid, started, lambda: None)
        process.status = status
        process._ended.set()
        return process

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

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
        if not self.alive:
            return
        if self._child is None:
            self.send(signal.SIGKILL)
            found = procfs.stat(self.pid)
            if found is not None and found.started != self.started:
                return  # reaped by its new parent, and the number given to a stranger
        # Until a child is reaped (by this agent) its number cannot be given to a stranger's group.
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

    def release(self) -> None:
        """Watch it no longer; it lives on."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _watch(self, pidfd: int) -> None:
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._over)

    def _stopped(self) -> bool:
        found = procfs.stat(self.pid)
        return found is not None and found.state in "Tt"

    def _over(self) -> None:
        # The group first: a loader's worker holds sockets of the dead and would hide its end from the peers.
        self.kill()
        if self._child is not None:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            if result is None:  # not possible without WNOHANG; the loop will call again
                return
            self.status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            self._child.returncode = (
                self.status
            )  # it is reaped: subprocess must not wait for that number again
        self.release()
        self._ended.set()
        self._on_exit()


def _is_leader(pid: int, started: int) -> bool:
    """Whether this very process still runs, as the leader of its session."""
    found = procfs.stat(pid)
    return found is not None and found.started == started and found.session == pid and found.state not in "ZX"

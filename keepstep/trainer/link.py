"""The worker's line to its agent: one authenticated Unix socket, a thread that listens.

It carries messages and knows nothing of their meaning. When the agent is gone it lets training go
on for the orphan timeout and then ends the process, so that nothing is ever orphaned.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import ProtectionError
from keepstep.wire import codec, framing
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, Fetch, Fetched, Hello, Welcome

HANDSHAKE_TIMEOUT_S = 30.0
EXIT_ORPHANED = 74


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is, from the environment that its agent set."""

    socket_path: str
    token: str
    job: str
    worker: int
    node: str
    slot: int
    page_path: str
    run_dir: str

    @classmethod
    def from_environment(cls) -> Identity:
        """Raises ProtectionError naming the variable that is missing."""
        try:
            return cls(
                socket_path=os.environ["KEEPSTEP_SOCKET"],
                token=os.environ["KEEPSTEP_TOKEN"],
                job=os.environ["KEEPSTEP_JOB"],
                worker=int(os.environ["KEEPSTEP_WORKER"]),
                node=os.environ.get("KEEPSTEP_NODE", ""),
                slot=int(os.environ.get("KEEPSTEP_SLOT", "0")),
                page_path=os.environ["KEEPSTEP_PAGE"],
                run_dir=os.environ["KEEPSTEP_RUN_DIR"],
            )
        except KeyError as missing:
            raise ProtectionError(
                f"{missing.args[0]} is not set: start the script with `keepstep run`."
            ) from None

    def hello(self, role: Any) -> Hello:
        """The first message on a connection."""
        return Hello(
            version=PROTOCOL_VERSION, token=self.token, worker=self.worker, pid=os.getpid(), role=role
        )


class Link:
    """Send from any thread; `on_message` runs on the listening thread."""

    def __init__(self, identity: Identity, on_message: Callable[[Any], None]) -> None:
        self.identity = identity
        self._on_message = on_message
        self._requests = itertools.count(1)
        self._answers: dict[int, Fetched] = {}
        self._answered = threading.Condition()
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(HANDSHAKE_TIMEOUT_S)
        try:
            self._socket.connect(identity.socket_path)
            framing.send_frame(self._socket, codec.encode(identity.hello("control")))
            frame = framing.recv_frame(self._socket)
        except OSError as error:
            raise ProtectionError(
                f"the agent at {identity.socket_path} cannot be reached: {error}"
            ) from error
        first = None if frame is None else codec.decode(frame)
        if isinstance(first, Fenced):
            raise ProtectionError(f"the agent refused worker {identity.worker}: {first.reason}")
        if not isinstance(first, Welcome):
            raise ProtectionError("the agent closed the connection: is KEEPSTEP_TOKEN this job's token?")
        self.welcome = first
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="keepstep-link", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, message: Any) -> bool:
        """Send one message; False when the agent is gone (its absence is dealt with elsewhere)."""
        data = codec.encode(message)
        with self._sending:
            try:
                framing.send_frame(self._socket, data)
            except OSError:
                return False
        return True

    def fetch(self, what: Any, rank: int, *, lineage: str = "", timeout_s: float = 30.0) -> Fetched:
        """Ask the agent for a rank's record or journal. Raises ProtectionError when no answer comes."""
        number = next(self._requests)
        self.send(Fetch(request=number, what=what, rank=rank, lineage=lineage))
        deadline_s = time.monotonic() + timeout_s
        with self._answered:
            while number not in self._answers:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._answered.wait(left_s):
                    raise ProtectionError(
                        f"the agent did not send the {what} of rank {rank} in {timeout_s} s"
                    )
            return self._answers.pop(number)

    def _listen(self) -> None:
        try:
            while (frame := framing.recv_frame(self._socket)) is not None:
                message = codec.decode(frame)
                if isinstance(message, Fetched):
                    with self._answered:
                        self._answers[message.request] = message
                        self._answered.notify_all()
                else:
                    self._on_message(message)
        except OSError:
            pass
        self._orphaned()

    def _orphaned(self) -> None:
        limit_s = self.welcome.orphan_timeout_s
        threading.Event().wait(limit_s)
        sys.stderr.write(
            f"keepstep: worker {self.identity.worker} of job {self.identity.job} has had no agent for "
            f"{limit_s:.0f} s: it ends.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_ORPHANED)

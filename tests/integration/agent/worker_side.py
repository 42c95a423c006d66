"""The worker's half of the wire, for the small scripts that the agent's tests start. No torch."""

from __future__ import annotations

import os
import socket
from typing import Any

from keepstep.core.events import WorkerParked
from keepstep.wire import codec, framing
from keepstep.wire.messages import PROTOCOL_VERSION, Hello, StoreReply, StoreRequest, Welcome
from keepstep.wire.page import Page

WORKER = int(os.environ["KEEPSTEP_WORKER"])


class Connection:
    """A connection to the agent with its Hello said."""

    def __init__(self, role: Any = "control", **changed: Any) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(os.environ["KEEPSTEP_SOCKET"])
        hello = {
            "version": PROTOCOL_VERSION,
            "token": os.environ["KEEPSTEP_TOKEN"],
            "worker": WORKER,
            "pid": os.getpid(),
            "role": role,
        }
        self.send(Hello(**(hello | changed)))

    def send(self, message: Any) -> None:
        framing.send_frame(self.sock, codec.encode(message))

    def receive(self) -> Any:
        """The next message; None when the agent closed."""
        frame = framing.recv_frame(self.sock)
        return None if frame is None else codec.decode(frame)

    def expect(self, kind: type) -> Any:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def ask(self, op: Any, *keys: str, **rest: Any) -> StoreReply:
        self.send(StoreRequest(request=1, op=op, keys=keys, **rest))
        return self.expect(StoreReply)


def park(readiness: str = "warm") -> Connection:
    """Say Hello, be welcome, and wait as a spare."""
    connection = Connection()
    connection.expect(Welcome)
    connection.send(WorkerParked(worker=WORKER, readiness=readiness))
    return connection


def page() -> Page:
    return Page.open(os.environ["KEEPSTEP_PAGE"])

"""The connection to this rank's keeper, made (again) in a thread of its own: no step waits for a handshake.

It knows where to connect and tells when it is done; what is sent is another's affair.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from keepstep.errors import KeepstepError
from keepstep.trainer.peer import Own, Route

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 5.0
SEND_BUFFER_BYTES = 4 << 20


def drained(wake: int) -> bool:
    """Read an eventfd empty; False when it was."""
    try:
        os.eventfd_read(wake)
    except BlockingIOError:
        return False
    return True


class Connector:
    """Makes the connection in a thread of its own, which is started when there is first a keeper."""

    def __init__(self, dial: Callable[[Route, Own], socket.socket]) -> None:
        self.route: Route | None = None
        self.failure = ""
        self._dial = dial
        self._changed = threading.Condition()
        self._made: tuple[Route, socket.socket] | None = None
        self._wanted = False
        self._turned = False
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._dialling: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def turn(self, route: Route | None) -> None:
        with self._changed:
            if route == self.route:
                return
            self.route, self.failure, self._turned = route, "", True
            self._want()

    def again(self, route: Route) -> None:
        """The connection to `route` is lost."""
        with self._changed:
            if route == self.route:
                self._want()

    def take(self) -> tuple[Route, socket.socket] | None:
        """The new connection, once."""
        if self._made is None:
            return None
        with self._changed:
            made, self._made = self._made, None
            drained(self._ready)
            if made is not None and made[0] != self.route:
                made[1].close()
                return None
            return made

    def wait(self, until_s: float, wake: int) -> bool:
        """Wait until a connection was made; False at the deadline, or once `wake` was written to."""
        left_s = until_s - time.monotonic()
        if left_s <= 0 or self._made is not None:
            return self._made is not None
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        poll.register(wake, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(left_s * 1000 + 1)]
        if wake in found:
            drained(wake)
        return self._ready in found

    def _want(self) -> None:
        if self._made is not None:
            self._made[1].close()
            self._made = None
            drained(self._ready)
        if self._dialling is not None:
            try:
                self._dialling.shutdown(socket.SHUT_RDWR)  # to where nobody wants to go any more
            except OSError:
                pass
        self._wanted = self.route is not None
        if self._wanted and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keepstep-keeper", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
                route = self.route
                assert route is not None
            try:
                sock = self._dial(route, self._show)
            except (OSError, ValueError, KeepstepError) as error:
                with self._changed:
                    self._dialling = None
                    if route == self.route:
                        self.failure = f"{route.node}: {error or type(error).__name__}"
                        self._turned = False
                        self._changed.wait_for(lambda: self._turned, timeout=backoff_s)
                        backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            with self._changed:
                self._dialling = None
                if route != self.route:
                    sock.close()
                    continue
                self._wanted, self.failure = False, ""
                self._made = (route, sock)
                os.eventfd_write(self._ready, 1)

    def _show(self, sock: socket.socket) -> None:
        with self._changed:
            self._dialling = sock

"""Inner gloo groups: made for one generation, cut when it ends.

gloo's abort() does nothing to a blocked collective (pytorch#130345). What frees it is shutdown(2)
on the connected sockets of the group, never on its listener, which would end the process. The
sockets are told by the port of the generation's own gloo device, so that no socket of the user's
is ever touched.

Only the reading side is shut, and the connection is held open for a while: gloo forgets a send whose write
has failed (Pair::write returns without an error for EPIPE and ECONNRESET, and signalException passes over
what stands in the transmit queue), and whoever waits for it waits for ever. So nobody's write may fail
before everybody has cut: what is read ends, what is written goes nowhere.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

BACKEND = dist.ProcessGroup.BackendType
OPERATION_TIMEOUT = timedelta(days=7)
# By then every member has heard of the newer generation, or is gone.
HOLD_S = 5.0


def _own_sockets() -> list[socket.socket]:
    """Duplicates of every TCP socket of this process; the caller closes them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
            found.append(duplicate)
        else:
            duplicate.close()
    return found


def _listening_ports() -> set[int]:
    ports = set()
    for candidate in _own_sockets():
        with candidate:
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(int(candidate.getsockname()[1]))
    return ports


class GlooFabric:
    """The gloo device of one generation, shared by all its groups: one listener, one event loop."""

    def __init__(self, hostname: str) -> None:
        before = _listening_ports()
        self._device = dist.ProcessGroupGloo.create_device(hostname=hostname, lazy_init=False)
        self._hostname = hostname
        self._ports = _listening_ports() - before
        self._peers: set[tuple[str, int]] = set()
        self._held: dict[int, socket.socket] = {}  # by inode
        self.is_cut = False

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """This process's listeners as (host, port), to be told to the peers."""
        return [(self._hostname, port) for port in sorted(self._ports)]

    def add_peers(self, endpoints: list[tuple[str, int]]) -> None:
        """Learn the peers' listeners: connections towards them are ours as well."""
        self._peers |= {(host, port) for host, port in endpoints}

    def connect(self, store: dist.Store, rank: int, size: int, connect_timeout_s: float) -> dist.ProcessGroup:
        """A connected inner group. Raises RuntimeError (gloo's) when a peer does not come in time."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=connect_timeout_s)
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        backend._set_default_timeout(OPERATION_TIMEOUT)
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), BACKEND.GLOO, backend)
        group._set_default_backend(BACKEND.GLOO)
        return group

    def cut(self) -> int:
        """End every connection of this generation; returns how many. May be called twice."""
        self.is_cut = True
        before = len(self._held)
        for candidate in _own_sockets():
            held = False
            try:
                inode = os.fstat(candidate.fileno()).st_ino
                if inode not in self._held and self._is_connection(candidate):
                    candidate.shutdown(socket.SHUT_RD)
                    self._held[inode], held = candidate, True
            except OSError:
                pass  # already closed, or not connected: nothing waits on it
            finally:
                if not held:
                    candidate.close()
        if len(self._held) > before:
            release = threading.Timer(HOLD_S, self._release)
            release.daemon = True
            release.start()
        return len(self._held) - before

    def _is_connection(self, candidate: socket.socket) -> bool:
        if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        local, peer = candidate.getsockname(), candidate.getpeername()
        return local[1] in self._ports or peer[:2] in self._peers

    def _release(self) -> None:
        for held in list(self._held.values()):
            held.close()

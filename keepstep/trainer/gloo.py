"""Inner gloo groups: made for one generation, cut when it ends.

gloo's abort() does nothing to a blocked collective (pytorch#130345). What frees it is shutdown(2)
on the connected sockets of the group, never on its listener, which would end the process. The
sockets are told by the port of the generation's own gloo device, so that no socket of the user's
is ever touched.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

BACKEND = dist.ProcessGroup.BackendType
OPERATION_TIMEOUT = timedelta(days=7)


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
        """Shut down every connection of this generation; returns how many. May be called twice."""
        self.is_cut = True
        count = 0
        for candidate in _own_sockets():
            with candidate:
                try:
                    if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue
                    local, peer = candidate.getsockname(), candidate.getpeername()
                    if local[1] in self._ports or peer[:2] in self._peers:
                        candidate.shutdown(socket.SHUT_RDWR)
                        count += 1
                except OSError:
                    continue  # already closed, or not connected: nothing waits on it
        return count

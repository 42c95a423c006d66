"""Jobs over several nodes for the tests: a cluster on loopback addresses or in network namespaces, and its faults."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.cluster import Ask, Cluster, Node
from keepstep.cli.reports import Comparison, compare
from keepstep.cli.source import ask
from keepstep.controller.rundir import Address
from tests.integration.jobs import SCRIPT, Job

SUBNET = "10.231.77"
CLONE_NEWNET = 0x40000000
# For networks beyond loopback a token must be given. Nothing here is a secret.
NETWORK_TOKEN = {"KEEPSTEP_JOB_TOKEN": "a-token-of-the-network-tests-only"}


@contextlib.contextmanager
def cluster(
    folder: Path,
    arguments: Sequence[str],
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    spare_nodes: int = 1,
    spares: int = 0,
    permitted: int | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    network: Network | None = None,
    agent_options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """A running job: node0, node1, ... for ranks, spare0, ... for spares. In `network`, else on 127.0.0.N.

    `permitted`: pause at this step until `permit` says otherwise.
    """
    if permitted is not None:
        permit(folder, permitted)
        arguments = (*arguments, "--permit", str(folder / "permit"))
    script = arguments if arguments and arguments[0].endswith(".py") else (str(SCRIPT), *arguments)
    bind, prefix = (
        ("127.0.0.1:0", ()) if network is None else (f"{network.add('ctl')}:29400", network.inside("ctl"))
    )
    with Cluster(
        folder,
        script,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        spares=spares,
        options=options,
        environment={
            "KEEPSTEP_FINGERPRINT": "1",
            **(NETWORK_TOKEN if network is not None else {}),
            **(environment or {}),
        },
        bind=bind,
        controller_prefix=prefix,
        ask=ask if network is None else network.ask("ctl"),
    ) as job:
        for name, spare in [(f"node{n}", False) for n in range(nodes)] + [
            (f"spare{n}", True) for n in range(spare_nodes)
        ]:
            address = None if network is None else network.add(name)
            inside = () if network is None else network.inside(name)
            slots = ranks_per_node if not spare else max(1, -(-spares // max(1, spare_nodes)))
            node = job.add(name, slots=slots, spare=spare, address=address, prefix=inside, start=False)
            node.start(*agent_options)
        yield job


def permit(folder: Path, steps: int) -> None:
    """The job may go on to this step. Replaced at once, so that no reader sees half of it."""
    draft = folder / "permit.draft"
    draft.write_text(str(steps))
    draft.rename(folder / "permit")


def assert_ended_well(job: Cluster, undisturbed: Job, *, incidents: int | None = 1) -> Comparison:
    """Exit code 0 everywhere, bit for bit the undisturbed run, and no committed step was lost."""
    code = job.wait_for_exit()
    story = f"{job.last_output()}\n{job.worker_logs()}"
    assert code == 0, story
    comparison = compare(undisturbed.reports, job.reports())
    assert comparison.identical, f"{comparison.difference}\n{story}"
    closed = job.ledger("incident_closed")
    if incidents is not None:
        assert len(closed) == incidents, story
    for incident in closed:
        assert incident["steps_lost"] == 0, story
    return comparison


# ---- network namespaces -----------------------------------------------------------------------------


@dataclass
class Network:
    """One bridge in a namespace of its own, and a namespace for each machine on it.

    What is lost is lost in the bridge, as in a switch: nobody is refused anything, and no sender learns of it.
    """

    tag: str
    hosts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str) -> str:
        """A machine more. Returns its address."""
        number = len(self.hosts) + 1
        address = f"{SUBNET}.{number}"
        space, hub, port = self._space(name), self._space("hub"), f"p-{name}"
        _ip("netns", "add", space)
        _ip(*f"-n {hub} link add {port} type veth peer name eth0 netns {space}".split())
        _ip(*f"-n {hub} link set {port} master br0 up".split())
        _ip(*f"-n {space} link set eth0 address {_mac(number)}".split())
        _ip(*f"-n {space} addr add {address}/24 dev eth0".split())
        _ip(*f"-n {space} link set eth0 up".split())
        _ip(*f"-n {space} link set lo up".split())
        # Everybody knows everybody's address: who cannot answer a question for it can still be sent to.
        for other, theirs in self.hosts.items():
            self._introduce(space, theirs)
            self._introduce(self._space(other), address)
        self.hosts[name] = address
        return address

    def inside(self, name: str) -> tuple[str, ...]:
        """What stands before a command that is to run there."""
        return ("ip", "netns", "exec", self._space(name))

    def ask(self, name: str) -> Ask:
        """How to ask a controller from that machine: nobody else can reach it."""

        def from_there(address: Address, path: str) -> Any:
            with ThreadPoolExecutor(1, initializer=_enter, initargs=(self._space(name),)) as there:
                return there.submit(ask, address, path).result()

        return from_there

    def drop_from(self, name: str) -> None:
        """What that machine sends to others is lost; it still hears them."""
        self._port(name, "learning off locked on")

    def drop_to(self, name: str) -> None:
        """What others send to that machine is lost; they still hear it."""
        self._port(name, "learning off flood off bcast_flood off mcast_flood off")

    def cut(self, name: str) -> None:
        """Both ways."""
        self._port(name, "learning off locked on flood off bcast_flood off mcast_flood off")

    def heal(self, name: str) -> None:
        """As if nothing had been."""
        self._port(name, "learning on locked off flood on bcast_flood on mcast_flood on")

    def _port(self, name: str, settings: str) -> None:
        _bridge(*f"-n {self._space('hub')} link set dev p-{name} {settings}".split())
        # Where a machine is was learnt from what it sent.
        _ip(*f"-n {self._space('hub')} link set dev p-{name} type bridge_slave fdb_flush".split())

    def _introduce(self, space: str, address: str) -> None:
        mac = _mac(int(address.rpartition(".")[2]))
        _ip(*f"-n {space} neigh replace {address} lladdr {mac} dev eth0 nud permanent".split())

    def _space(self, name: str) -> str:
        return f"{self.tag}-{name}"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network of namespaces. Skips the test, with the reason, where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("bridge") is None:
        pytest.skip("network namespaces need root and the commands `ip` and `bridge` (iproute2)")
    found = Network(f"ks{os.getpid()}")
    hub = found._space("hub")
    made = subprocess.run(["ip", "netns", "add", hub], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        bridge = subprocess.run(
            ["ip", "-n", hub, "link", "add", "br0", "type", "bridge"], capture_output=True, text=True
        )
        if bridge.returncode != 0:
            pytest.skip(f"a bridge cannot be made here: {bridge.stderr.strip()}")
        _ip("-n", hub, "link", "set", "br0", "up")
        yield found
    finally:
        for name in (*found.hosts, "hub"):
            subprocess.run(["ip", "netns", "del", found._space(name)], capture_output=True)


def _enter(space: str) -> None:
    """Move the calling thread, and no other, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")


def _mac(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _ip(*words: str) -> None:
    _tool("ip", *words)


def _bridge(*words: str) -> None:
    _tool("bridge", *words)


def _tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


__all__ = ["Cluster", "Network", "Node", "assert_ended_well", "cluster", "network", "permit"]

"""Jobs over several nodes for the tests: a cluster on loopback addresses or in network namespaces, and its faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keepstep.cli.cluster import Cluster, Node
from keepstep.cli.reports import Comparison, compare
from tests.integration.jobs import SCRIPT, Job

SUBNET = "10.231.77"


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
        environment={"KEEPSTEP_FINGERPRINT": "1", **(environment or {})},
        bind=bind,
        controller_prefix=prefix,
    ) as job:
        for name, spare in [(f"node{n}", False) for n in range(nodes)] + [
            (f"spare{n}", True) for n in range(spare_nodes)
        ]:
            address = None if network is None else network.add(name)
            inside = () if network is None else network.inside(name)
            slots = ranks_per_node if not spare else max(1, -(-spares // max(1, spare_nodes)))
            job.add(name, slots=slots, spare=spare, address=address, prefix=inside)
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
    """One bridge in a namespace of its own, and a namespace for each machine on it."""

    tag: str
    hosts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str) -> str:
        """A machine more. Returns its address."""
        address = f"{SUBNET}.{len(self.hosts) + 1}"
        self.hosts[name] = address
        space, port = self._space(name), f"p{len(self.hosts)}"
        _ip("netns", "add", space)
        _ip(
            "-n",
            self._space("hub"),
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            space,
        )
        _ip("-n", self._space("hub"), "link", "set", port, "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        return address

    def inside(self, name: str) -> tuple[str, ...]:
        """What stands before a command that is to run there."""
        return ("ip", "netns", "exec", self._space(name))

    def drop_from(self, name: str) -> None:
        """What that machine sends to others is lost; it still hears them."""
        for other, address in self.hosts.items():
            if other != name:
                _ip("-n", self._space(name), "route", "add", "blackhole", f"{address}/32")

    def drop_to(self, name: str) -> None:
        """What others send to that machine is lost; they still hear it."""
        for other in self.hosts:
            if other != name:
                _ip("-n", self._space(other), "route", "add", "blackhole", f"{self.hosts[name]}/32")

    def cut(self, name: str) -> None:
        """Both ways, silently: nothing is refused, it is just gone."""
        self.drop_to(name)
        self.drop_from(name)

    def _space(self, name: str) -> str:
        return f"{self.tag}-{name}"


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network of namespaces. Skips the test, with the reason, where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command")
    found = Network(f"ks{os.getpid()}")
    hub = found._space("hub")
    made = subprocess.run(["ip", "netns", "add", hub], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        yield found
    finally:
        for name in (*found.hosts, "hub"):
            subprocess.run(["ip", "netns", "del", found._space(name)], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


__all__ = ["Cluster", "Network", "Node", "assert_ended_well", "cluster", "network", "permit"]

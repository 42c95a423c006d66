"""What one agent is told when it is made: where the controller is, who it is, where its files go."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from keepstep.agent.metrics_listener import MetricsAddress
from keepstep.core.agent import VitalsConfig
from keepstep.errors import UsageError, WireError
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.messages import JobSpec
from keepstep.wire.tls import TlsFiles

EMBEDDED_ORPHAN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ConsoleLine:
    """One whole line of a worker for the console; `text` already carries its prefix, no newline."""

    text: str
    stream: str
    worker: int
    rank: int | None
    generation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Checked when built. Raises UsageError with one line.

    `embedded`: the agent lives in `keepstep run`'s own process; its workers then end with that process.
    `advertise`: the address that this agent and its workers bind to and tell others; `peer_port`: where the
    agent listens for other nodes, 0 takes a free one. `labels`: what placement goes by ("rack", "zone").
    `record_bytes`, `orphan_timeout_s`, `record_ack_s`: None takes the job's own (5 s when embedded).
    `vitals`: when a living worker is given up; None takes the core's own limits.
    `controller_timeout_s`: an embedded agent without its controller for so long ends everything;
    `isolation_timeout_s`: one in a process of its own, whose controller may be restarted or cut off.
    `working_dir`: where workers start; None takes the job's own. `tls`: None for plain connections.
    `metrics`: where Prometheus may ask; None: nowhere. `say(text, level)`: one line for people.
    """

    controller_url: str
    token: str
    node: str
    slots: int
    run_dir: Path
    advertise: str = "127.0.0.1"
    peer_port: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    embedded: bool = False
    console: Callable[[ConsoleLine], None] | None = None
    record_bytes: int | None = None
    orphan_timeout_s: float | None = None
    record_ack_s: float | None = None
    controller_timeout_s: float = 5.0
    isolation_timeout_s: float = 600.0
    stop_grace_s: float = 5.0
    vitals: VitalsConfig | None = None
    working_dir: str | None = None
    tls: TlsFiles | None = None
    say: Callable[[str, str], None] | None = None
    metrics: MetricsAddress | None = None

    @property
    def peer_server_tls(self) -> ssl.SSLContext | None:
        """For the connections from other nodes; None: without TLS."""
        return None if self.tls is None else self.tls.server()

    @property
    def peer_client_tls(self) -> ssl.SSLContext | None:
        """For the connections to other nodes: they are known by address and token, not by name."""
        return None if self.tls is None else self.tls.client()

    def settle(self, spec: JobSpec) -> JobSpec:
        """The job's description with what is different on this node. Raises WireError."""
        orphan_s = self.orphan_timeout_s
        if orphan_s is None:
            orphan_s = EMBEDDED_ORPHAN_TIMEOUT_S if self.embedded else spec.orphan_timeout_s
        record_bytes = self.record_bytes or spec.record_bytes
        if not 0 < record_bytes <= MAX_FRAME_BYTES // 2:
            raise WireError(f"records of {record_bytes} bytes do not fit into a message")
        return replace(
            spec,
            record_bytes=record_bytes,
            orphan_timeout_s=orphan_s,
            record_ack_s=spec.record_ack_s if self.record_ack_s is None else self.record_ack_s,
            working_dir=self.working_dir or spec.working_dir,
        )

    def __post_init__(self) -> None:
        parts = urlsplit(self.controller_url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise UsageError(
                f"controller address {self.controller_url!r} must look like ws://HOST:PORT/agent"
            )
        if not self.token:
            raise UsageError("an agent needs the job's token")
        if not self.node or "/" in self.node or self.node != self.node.strip():
            raise UsageError(f"node name {self.node!r} must be text without slashes or outer spaces")
        if self.slots < 1:
            raise UsageError(f"an agent needs at least one slot, not {self.slots}")
        if not self.advertise:
            raise UsageError("the advertised address is empty")
        if not 0 <= self.peer_port < 65536:
            raise UsageError(f"the port for other nodes must be between 0 and 65535, not {self.peer_port}")
        for name, value in self.labels.items():
            if not name or not isinstance(value, str):
                raise UsageError(f"a label is NAME=VALUE, not {name!r}={value!r}")
        # A record travels as base64 in one frame.
        if self.record_bytes is not None and not 0 < self.record_bytes <= MAX_FRAME_BYTES // 2:
            raise UsageError(f"record size must be between 1 and {MAX_FRAME_BYTES // 2} bytes")
        for name in (
            "orphan_timeout_s",
            "record_ack_s",
            "controller_timeout_s",
            "isolation_timeout_s",
            "stop_grace_s",
        ):
            seconds = getattr(self, name)
            if seconds is not None and seconds < 0:
                raise UsageError(f"{name} must not be negative, not {seconds}")

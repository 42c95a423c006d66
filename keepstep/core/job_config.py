"""What the user settles about a job before it starts; checked when built, frozen afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.core.policy_rules import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The job's numbers. Raises ValueError, naming the field, when one makes no sense.

    `max_restarts`: how often a worker is started for want of a spare, world restarts included.
    `spare_timeout_s`: how long a vacant rank waits for a worker before the job ends with code 75.
    `complaint_grace_s`: how long a death may still explain a failed collective. `gather_s`: how long
    deaths are gathered into one generation. `refill_delay_s`: after a resumption, before new spares
    are started. `setup_steps`: published steps from which on a rank is replaced and not the world.
    `agent_wait_s`: how long an agent may take to come back after a controller's restart.
    `finish_grace_s`: after the first rank has finished, until the others are released.
    `observe`: decide and say, but touch nothing. `nodes`: how many (those for spares not
    counted) must have joined before the world starts; `ranks_per_node`: how many ranks one of them plays at
    first, its further slots being for spares (0: as many as it has slots). `domains`: labels that name failure domains, outermost first. `replace_unit`: "rank", or "node"
    when all ranks of a node move together.

    Node loss: `node_grace_s` between an unexplained complaint and giving up a node whose agent's
    connection broke; `node_stalled_s`: how long a recovery waits for ranks whose agent is gone, where
    spares could take their place; `suspect_hold_s`: how long a complaint waits for a suspect node's case;
    `probe_timeout_s`: how long another node may try to reach it (`probe_slack_s`: and answer).

    `switch_timeout_s`: how long a planned switch may wait for its step; then all enter it at once.

    `policy`: what is done about health signals.

    Spares: `spare_check_s`: how often a parked one proves itself (0: only before it parks);
    `spare_check_timeout_s`: how long it may take. `least_link_bytes_per_s`: below it a spare's node is too slow.
    """

    world_size: int
    spares: int = 0
    job: str = ""
    max_restarts: int = 3
    spare_timeout_s: float = 600.0
    complaint_grace_s: float = 0.15
    gather_s: float = 0.01
    refill_delay_s: float = 2.0
    waiting_say_s: float = 30.0
    stop_grace_s: float = 10.0
    exit_wait_s: float = 10.0
    park_grace_s: float = 0.5
    agent_wait_s: float = 30.0
    finish_grace_s: float = 1.0
    setup_steps: int = 2
    same_failure_limit: int = 3
    start_failure_limit: int = 3
    same_map_limit: int = 10
    spare_check_s: float = 3600.0
    spare_check_timeout_s: float = 60.0
    least_link_bytes_per_s: int = 10_000_000
    observe: bool = False
    nodes: int = 1
    ranks_per_node: int = 0
    domains: tuple[str, ...] = ("zone", "rack")
    replace_unit: str = "rank"
    node_grace_s: float = 0.3
    node_stalled_s: float = 3.0
    suspect_hold_s: float = 0.8
    probe_timeout_s: float = 0.3
    probe_slack_s: float = 0.2
    switch_timeout_s: float = 60.0
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        at_least = {
            "world_size": 1,
            "nodes": 1,
            "ranks_per_node": 0,
            "spares": 0,
            "max_restarts": 0,
            "setup_steps": 0,
            "same_failure_limit": 1,
            "start_failure_limit": 1,
            "same_map_limit": 1,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in (
            "spare_timeout_s",
            "complaint_grace_s",
            "gather_s",
            "refill_delay_s",
            "waiting_say_s",
            "stop_grace_s",
            "exit_wait_s",
            "park_grace_s",
            "agent_wait_s",
            "finish_grace_s",
            "node_grace_s",
            "node_stalled_s",
            "suspect_hold_s",
            "probe_timeout_s",
            "probe_slack_s",
            "switch_timeout_s",
            "spare_check_s",
            "spare_check_timeout_s",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number of seconds, not {getattr(self, name)}")
        if self.replace_unit not in ("rank", "node"):
            raise ValueError(f"replace_unit must be rank or node, not {self.replace_unit!r}")
        if self.waiting_say_s == 0:
            raise ValueError("waiting_say_s must be above 0")

"""What a policy over health signals says: rules, budgets, and the defaults. Values only; `policy` judges by them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from keepstep.core.health_events import SEVERITIES, SignalSeen

ANY = "*"
KEEP_OUT = ("none", "slot", "node")


class Act(enum.StrEnum):
    """What a rule wants done."""

    MIGRATE = "migrate"  # the slot's rank goes to another worker, live
    DRAIN = "drain"  # all ranks of the node do, and nothing new starts there
    REBUILD = "rebuild"  # the rank counts as lost, and is rebuilt elsewhere from a replica
    QUARANTINE = "quarantine"  # nothing new starts there; who plays there goes on
    ALERT = "alert"  # it is said and written down
    IGNORE = "ignore"  # it is written down


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; the first that matches and has held long enough decides. Raises ValueError when it makes no sense.

    Which signals: `source` and `kind` ("*": any), any of `codes`, `severity` or worse, a value above `above`
    or (`over_limit`) at or above the limit that the signal itself brings, `detail` in its text. How long or how
    often: at least `times` of them in each of `windows` windows of `window_s` in a row; one that does not
    match begins the count anew. `quarantine`: what is not used again ("slot", "node", "none").
    `cooldown_s`: how long the rule then leaves that place and that rank alone. `cure_s`: a rank for which the
    signal comes back from its new place within this time was not cured by its move, and is not moved for it again.
    """

    name: str
    action: Act
    source: str = ANY
    kind: str = ANY
    codes: tuple[int, ...] = ()
    severity: str = "info"
    above: float | None = None
    over_limit: bool = False
    detail: str = ""
    times: int = 1
    windows: int = 1
    window_s: float = 10.0
    quarantine: str = "none"
    cooldown_s: float = 600.0
    cure_s: float = 0.0
    why: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity must be one of {', '.join(SEVERITIES)}, not {self.severity!r}")
        if self.quarantine not in KEEP_OUT:
            raise ValueError(f"quarantine must be one of {', '.join(KEEP_OUT)}, not {self.quarantine!r}")
        for name in ("times", "windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("window_s", "cooldown_s", "cure_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number of seconds, not {getattr(self, name)}")
        if self.windows > 1 and self.window_s == 0:
            raise ValueError("window_s must be above 0 when there are several windows")

    def about(self, signal: SignalSeen) -> bool:
        """Whether it speaks of this kind of signal at all, whatever its value."""
        return (
            self.source in (ANY, signal.source)
            and self.kind in (ANY, signal.kind)
            and (not self.codes or signal.code in self.codes)
        )

    def matches(self, signal: SignalSeen) -> bool:
        """Whether this signal counts towards it."""
        value, limit = signal.value, signal.limit
        return (
            self.about(signal)
            and SEVERITIES.index(signal.severity) >= SEVERITIES.index(self.severity)
            and (self.above is None or (value is not None and value > self.above))
            and (not self.over_limit or (value is not None and limit is not None and value >= limit))
            and self.detail.lower() in signal.detail.lower()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All rules in their order, and what they may spend together. Raises ValueError when it makes no sense.

    `spares_per_hour`: ranks that may be moved or rebuilt within any hour, of the whole job;
    `moves_per_rank_per_hour`: of one rank. `dry_run`: everything is judged and written down, nothing is done.
    """

    rules: tuple[Rule, ...] = field(default_factory=lambda: DEFAULT_RULES)
    dry_run: bool = False
    spares_per_hour: int = 8
    moves_per_rank_per_hour: int = 2

    def __post_init__(self) -> None:
        for name in ("spares_per_hour", "moves_per_rank_per_hour"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two rules are called {twice[0]!r}")


def _xid(name: str, codes: tuple[int, ...], action: Act, quarantine: str, why: str, detail: str = "") -> Rule:
    return Rule(
        name=name, kind="xid", codes=codes, action=action, quarantine=quarantine, why=why, detail=detail
    )


def _lasting(name: str, source: str, kind: str, why: str, **more: float | bool | str) -> Rule:
    """A soft signal: the rank is moved once it has lasted two windows."""
    return Rule(
        name=name,
        source=source,
        kind=kind,
        action=Act.MIGRATE,
        windows=2,
        quarantine="slot",
        why=why,
        **more,  # type: ignore[arg-type]
    )


DEFAULT_RULES: tuple[Rule, ...] = (
    # Hard signals act at once.
    _xid("xid-lost", (79,), Act.REBUILD, "node", "the GPU has fallen off the bus: nothing on it can be read"),
    _xid("xid-recovered", (154,), Act.IGNORE, "none", "the driver asks for no recovery any more", "to 0x0"),
    _xid("xid-drain", (154,), Act.MIGRATE, "slot", "the driver asks for the GPU to be drained", "drain"),
    _xid("xid-recovery", (154,), Act.REBUILD, "slot", "the driver itself asks for a reset or a reboot"),
    _xid(
        "xid-suspect",
        (48, 64, 94, 95, 109, 119, 120, 140, 143, 158),
        Act.REBUILD,
        "slot",
        "what the GPU holds is suspect or lost: a replica's bytes are taken instead",
    ),
    _xid("xid-warning", (63, 92), Act.MIGRATE, "slot", "an early warning: its memory can still be read"),
    _xid(
        "xid-nvlink",
        (74, *range(144, 151)),
        Act.MIGRATE,
        "slot",
        "NVLink fails: the rank leaves while it can be read",
    ),
    Rule(
        name="xid-application-again",
        kind="xid",
        codes=(13, 31, 43, 45),
        times=5,
        window_s=3600.0,
        action=Act.ALERT,
        cooldown_s=3600.0,
        why="five times in an hour: look for an earlier Xid, and at the script",
    ),
    _xid("xid-application", (13, 31, 43, 45), Act.IGNORE, "none", "the script's own fault, mostly"),
    Rule(
        name="row-remap-failed",
        source="nvml",
        kind="row_remap_failed",
        above=0.0,
        action=Act.MIGRATE,
        quarantine="slot",
        why="no spare rows are left: the next bad row is an error",
    ),
    Rule(
        name="device-vanished",
        source="nvml",
        kind="vanished",
        action=Act.REBUILD,
        quarantine="node",
        why="the driver does not list the device any more",
    ),
    Rule(
        name="slurm-node",
        source="slurm",
        severity="warn",
        action=Act.DRAIN,
        quarantine="node",
        why="the scheduler takes the node away",
    ),
    Rule(
        name="kubernetes-node",
        source="kubernetes",
        severity="warn",
        action=Act.DRAIN,
        quarantine="node",
        why="the cluster takes the node away",
    ),
    Rule(
        name="report-critical",
        source="report",
        severity="critical",
        action=Act.MIGRATE,
        quarantine="slot",
        why="a check of the site's own says so",
    ),
    # Soft signals must last.
    _lasting("row-remap-pending", "nvml", "row_remap_pending", "the GPU wants a reset", above=0.0),
    _lasting("temperature", ANY, "temperature", "hotter than the device's own limit allows", over_limit=True),
    _lasting("sram-errors", "nvml", "ecc_sram_threshold", "too many errors in SRAM", above=0.0),
    _lasting("clocks-heat", "nvml", "clocks_thermal", "its clocks are held down by heat", above=0.0),
    _lasting(
        "link-flaps", "infiniband", ANY, "the link fails again and again", severity="warn", window_s=30.0
    ),
    _lasting(
        "slow-rank",
        "straggler",
        "slow_rank",
        "slower than the others, without the time in which it waits for them",
        above=1.10,
        cure_s=3600.0,
    ),
    # Whatever no other rule speaks of.
    Rule(name="others", severity="warn", action=Act.ALERT, why="no rule says what to do about it"),
)

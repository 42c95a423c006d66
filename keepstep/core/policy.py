"""Judges health signals by the policy: which rule decides, whether it has lasted, whether it may be paid for.

Pure: signal, whereabouts and time in, a decision with its reason out. It knows nothing of generations or spares;
what a decision means for the job stands in `policy_acts`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from keepstep.core.health_events import SignalSeen
from keepstep.core.policy_rules import ANY, Act, Policy, Rule

HOUR_S = 3600.0
MOST_KEPT = 10_000  # streaks, cooldowns and verdicts each; the oldest are forgotten
SPENDING = (Act.MIGRATE, Act.DRAIN, Act.REBUILD)
K = TypeVar("K")
V = TypeVar("V")
Place = tuple[str, int | None]  # node and slot; None: the whole node


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What is played at the place of a signal. `moving`: those of them that are on their way already."""

    ranks: tuple[int, ...] = ()
    node_ranks: tuple[int, ...] = ()
    moving: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from a signal. `refused`: why it is not done after all; `ranks`: those that it moves.

    `uncured`: the rank that was as sick after its move.
    """

    rule: Rule
    action: Act
    signal: SignalSeen
    reason: str
    ranks: tuple[int, ...] = ()
    refused: str = ""
    uncured: int | None = None

    @property
    def did(self) -> Act:
        """What is done: a refused action is an alert."""
        return Act.ALERT if self.refused else self.action

    def body(self) -> dict[str, Any]:
        """What the ledger keeps, as JSON takes it."""
        return {
            "rule": self.rule.name,
            "action": self.action.value,
            "did": self.did.value,
            "reason": self.reason,
            "refused": self.refused,
            "uncured": self.uncured,
            "node": self.signal.node,
            "slot": self.signal.slot,
            "ranks": list(self.ranks),
            "signal": signal_body(self.signal),
        }


@dataclass(slots=True)
class _Streak:
    """Windows in a row in which a rule held at one place."""

    began_s: float
    windows: int = 0
    count: int = 0


@dataclass(slots=True)
class PolicyBook:
    """What the policy remembers of one job."""

    policy: Policy
    streaks: dict[tuple[str, str, int | None, str], _Streak] = field(default_factory=dict)
    quiet_until_s: dict[tuple[str, object], float] = field(default_factory=dict)  # rule, place or rank
    spent: deque[tuple[float, int]] = field(default_factory=deque)  # when, which rank
    moved: dict[tuple[str, int], tuple[float, Place]] = field(default_factory=dict)  # rule, rank: when, from
    uncured: set[tuple[str, int]] = field(default_factory=set)
    verdicts: dict[Place, dict[str, Any]] = field(default_factory=dict)  # the newest decision of each place
    later: dict[tuple[object, ...], SignalSeen] = field(
        default_factory=dict
    )  # seen before ranks can be moved
    recalled: list[Mapping[str, Any]] = field(default_factory=list)  # an earlier controller's decisions
    innocent: list[Place] = field(default_factory=list)  # places whose rank is as slow elsewhere

    def judge(self, signal: SignalSeen, where: Whereabouts, now_s: float) -> Decision | None:
        """The decision that this signal brings about; None: none (yet, or not again)."""
        self.recall(now_s)
        rules = [rule for rule in self.policy.rules if rule.about(signal)]
        special = [rule for rule in rules if (rule.source, rule.kind) != (ANY, ANY)]
        held = [rule for rule in special if self._holds(rule, signal, now_s)]
        if not any(rule.matches(signal) for rule in special):  # else it has its rule, which may yet wait
            held = [rule for rule in rules if rule not in special and self._holds(rule, signal, now_s)]
        return self._decide(held[0], signal, where, now_s) if held else None

    def _holds(self, rule: Rule, signal: SignalSeen, now_s: float) -> bool:
        """Count the signal; whether the rule has now held for as long as it must."""
        key = (rule.name, signal.node, signal.slot, signal.device)
        if not rule.matches(signal):
            # Another event of the kind says nothing against this one; a reading that is fine again does.
            if signal.value is not None:
                self.streaks.pop(key, None)
            return False
        if rule.windows == 1 and rule.times == 1:
            return True
        streak = self.streaks.get(key)
        if streak is None or now_s >= streak.began_s + 2 * rule.window_s:
            streak = _Streak(began_s=now_s)
        elif now_s >= streak.began_s + rule.window_s:
            full = streak.windows if streak.count >= rule.times else 0
            streak = _Streak(began_s=now_s, windows=full)
        streak.count += 1
        if streak.count == rule.times:
            streak.windows += 1
        remember(self.streaks, key, streak)
        return streak.count >= rule.times and streak.windows >= rule.windows

    def _decide(self, rule: Rule, signal: SignalSeen, where: Whereabouts, now_s: float) -> Decision | None:
        place: Place = (signal.node, signal.slot)
        if now_s < self.quiet_until_s.get((rule.name, place), now_s):
            return None  # decided a short while ago
        action = rule.action
        if action is Act.MIGRATE and signal.slot is None:
            action = Act.DRAIN  # the whole node is meant: nothing new may start there either
        ranks: tuple[int, ...] = ()
        staying = tuple(rank for rank in where.node_ranks if rank not in where.moving)
        match action:
            case Act.MIGRATE | Act.REBUILD if not where.ranks:  # no rank is played there: it shall stay so
                action = Act.QUARANTINE if rule.quarantine != "none" else Act.ALERT
            case Act.MIGRATE:
                ranks = tuple(rank for rank in where.ranks if rank not in where.moving)
                if not ranks:
                    return None  # it is on its way already
            case Act.REBUILD:
                others = staying if rule.quarantine == "node" else ()
                ranks = (*where.ranks, *(rank for rank in others if rank not in where.ranks))
            case Act.DRAIN:
                ranks = staying
            case _:
                pass
        failed = self._not_cured(rule, ranks, place, now_s)
        if failed is not None:
            refused = (
                f"rank {failed} was moved for it and is no better: it follows the rank's data or its stage, "
                "not a machine"
            )
        else:
            refused = self._refusal(rule, action, ranks, now_s)
        why = f" ({rule.why})" if rule.why else ""
        decision = Decision(
            rule=rule,
            action=action,
            signal=signal,
            reason=f"{rule.name}: {describe(signal)}{why}",
            ranks=ranks,
            refused=refused,
            uncured=failed,
        )
        self.quiet(rule, place, now_s)
        if not refused:
            self.spend(rule, ranks, place, now_s)
        return decision

    def _refusal(self, rule: Rule, action: Act, ranks: tuple[int, ...], now_s: float) -> str:
        """Why it may not be done; "" when it may."""
        if action not in SPENDING:
            return ""
        resting = [r for r in ranks if now_s < self.quiet_until_s.get((rule.name, r), now_s)]
        if resting and action is not Act.REBUILD:
            return f"rank {resting[0]} was moved for it less than {rule.cooldown_s:.0f} s ago"
        self.spent = deque((at_s, rank) for at_s, rank in self.spent if at_s > now_s - HOUR_S)
        most = self.policy.moves_per_rank_per_hour
        often = [r for r in ranks if sum(rank == r for _, rank in self.spent) >= most]
        if often:
            return f"rank {often[0]} has been moved {most} times within an hour, as often as it may be"
        budget = self.policy.spares_per_hour
        if len(self.spent) + len(ranks) > budget:
            return (
                f"{len(self.spent)} of {budget} spares of this hour are spent, {len(ranks)} more are needed"
            )
        return ""

    def _not_cured(self, rule: Rule, ranks: tuple[int, ...], place: Place, now_s: float) -> int | None:
        """A rank that is as sick at its new place: what ails it moves with it."""
        for rank in ranks:
            if (rule.name, rank) in self.uncured:
                return rank
            at_s, before = self.moved.get((rule.name, rank), (now_s, place))
            if rule.cure_s and before != place and now_s < at_s + rule.cure_s:
                self.uncured.add((rule.name, rank))
                self.innocent.append(before)
                return rank
        return None

    def quiet(self, rule: Rule, place: Place, now_s: float) -> None:
        """The rule was applied there: it says nothing more for a while."""
        remember(self.quiet_until_s, (rule.name, place), now_s + rule.cooldown_s)

    def spend(self, rule: Rule, ranks: tuple[int, ...], place: Place, now_s: float) -> None:
        """These ranks are moved for a rule."""
        for rank in ranks:
            self.spent.append((now_s, rank))
            self.moved[(rule.name, rank)] = (now_s, place)
            remember(self.quiet_until_s, (rule.name, rank), now_s + rule.cooldown_s)

    def recall(self, now_s: float) -> None:
        """Take up what an earlier controller decided. A clock that has begun anew makes it as new as can be."""
        rules = {rule.name: rule for rule in self.policy.rules}
        for body in self.recalled:
            rule = rules.get(str(body["rule"]))
            if rule is None:
                continue
            place: Place = (str(body["node"]), body["slot"])
            at_s = min(float(body["at_s"]), now_s)
            self.quiet(rule, place, at_s)
            if body["uncured"] is not None:
                self.uncured.add((rule.name, int(body["uncured"])))
            if not body["refused"]:
                self.spend(rule, tuple(int(rank) for rank in body["ranks"]), place, at_s)
        self.recalled.clear()


def remember(book: dict[K, V], key: K, value: V) -> None:
    """Keep the newest; a book has a bound."""
    book.pop(key, None)
    book[key] = value
    if len(book) > MOST_KEPT:
        del book[next(iter(book))]


def describe(signal: SignalSeen) -> str:
    """A signal in words: "xid 79 on gpu3 of node1, seen by kernel"."""
    what = signal.kind if signal.code is None else f"{signal.kind} {signal.code}"
    if signal.value is not None:
        what += f" {signal.value:g}" + ("" if signal.limit is None else f" (limit {signal.limit:g})")
    at = signal.device or (f"slot {signal.slot}" if signal.slot is not None else "")
    where = f"{at} of {signal.node}" if at else signal.node
    detail = f": {signal.detail}" if signal.detail else ""
    return f"{what} on {where}, seen by {signal.source}{detail}"


def signal_body(signal: SignalSeen) -> dict[str, Any]:
    """A signal as JSON takes it, without what is not there."""
    names = (
        "node",
        "source",
        "kind",
        "severity",
        "slot",
        "device",
        "value",
        "limit",
        "code",
        "detail",
        "age_s",
    )
    found = {name: getattr(signal, name) for name in names}
    return {name: value for name, value in found.items() if value not in (None, "", 0.0) or name == "slot"}

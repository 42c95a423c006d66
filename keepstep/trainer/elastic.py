"""Elastic process groups: the outer group stays for ever, its inner one lives for a generation.

The script, DDP, FSDP2, DeviceMesh and DTensor hold an `ElasticGroup`. While all is well it hands
every collective to the inner group. When something failed (`Groups.poison`), collectives answer at
once without communicating, so that forward and backward run to the end of the step and no library
is left half-way. It knows nothing of votes or state: the session decides.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from keepstep.errors import StepInterrupted, UsageError
from keepstep.trainer import solo
from keepstep.trainer.journal import Journal, outputs_of
from keepstep.trainer.work import DoneWork, GuardedWork
from keepstep.wire.page import Page
from keepstep.wire.ring import CODES, FIRST_PAIRED, GroupRing, Ring, group_label

BACKEND_NAME = "keepstep"
MAX_SWALLOWED = 100_000


class Place(enum.Enum):
    """Where the user's thread is: what a collective may do depends on it."""

    SETUP = "setup"
    STEP = "step"
    AFTER_GATE = "after the gate"
    ASIDE = "aside"
    OUTSIDE = "outside a step"
    CLOSING = "closing"


ALLOWED = frozenset({Place.SETUP, Place.STEP, Place.ASIDE, Place.CLOSING})

REFUSALS = {
    Place.AFTER_GATE: (
        "{name} after optimizer.step() in the same block: a rank that died between the two could not be "
        "replaced exactly. Move it before optimizer.step(), or into `with step.aside():` of the next iteration."
    ),
    Place.OUTSIDE: (
        "{name} outside a step: nobody could serve it again to a replacement. Move it into `with step:` before "
        "optimizer.step(), or into `with step.aside():` at the head of the iteration (evaluation, logging, "
        "checkpoints; every forward of an FSDP model communicates)."
    ),
}


class Groups:
    """All elastic groups of this process, and whether they may communicate at this moment."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.members: list[ElasticGroup] = []
        self.place = Place.SETUP
        self.solo = False
        self.poisoned = False
        self.observing = False  # mode observe: a failure is the script's to see, as without Keepstep
        self.failed = ""  # what failed since the last commit, when observing
        self.open = False  # the fast path: live, healthy, and in a place where collectives may be
        self.collectives = 0
        self.swallowed = 0
        self.outstanding: deque[GuardedWork] = deque()
        self.journal: Journal | None = None
        self.page: Page | None = None
        self.ring: Ring | None = None
        self.connect_new: Callable[[ElasticGroup], None] | None = None
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.on_stranded: Callable[[], None] = lambda: None

    def settle(
        self, *, place: Place | None = None, solo: bool | None = None, poisoned: bool | None = None
    ) -> None:
        """Change the circumstances; recomputes the fast path."""
        if place is not None:
            self.place = place
        if solo is not None:
            self.solo = solo
        if poisoned is not None:
            self.poisoned = poisoned
            if not poisoned:
                self.swallowed = 0
        self.open = not self.solo and not self.poisoned and self.place in ALLOWED

    def poison(self, reason: str, *, complain: bool = True) -> None:
        """From now on collectives answer without communicating. Tells the session the first time."""
        if self.observing and complain:
            if not self.failed:
                self.failed = reason
                self.on_failure(reason)
            return
        first = not self.poisoned
        self.settle(poisoned=True)
        if first and complain:
            self.on_failure(reason)

    def add(self, group: ElasticGroup) -> None:
        """A script made a group: connect it now (building a model communicates)."""
        if self.place is not Place.SETUP:
            raise UsageError("dist.new_group() after the first step: make every group before run.steps().")
        self.members.append(group)
        if self.ring is not None:
            group.ring = self.ring.add_group()
        if self.connect_new is not None and not self.solo:
            self.connect_new(group)

    def ordinal(self, ranks: list[int]) -> int:
        """How many groups of exactly these ranks exist already: part of a group's key."""
        return sum(1 for group in self.members if group.ranks == ranks)

    def track(self, work: GuardedWork) -> None:
        """Remember a running collective; forget those that ended well."""
        queue = self.outstanding
        while queue and queue[0].is_completed():
            failure = queue.popleft().failure()
            if failure is not None:
                self.poison(failure)
        queue.append(work)

    def finish_outstanding(self) -> bool:
        """Wait for every running collective; True when all of them succeeded and nothing is poisoned."""
        while self.outstanding:
            self.outstanding.popleft().wait()
        return not self.poisoned

    def find_failure(self) -> str | None:
        """Why a collective of this step failed, if one did (DDP raises before we are asked)."""
        for work in self.outstanding:
            failure = work.failure()
            if failure is not None:
                return failure
        return None

    def drain(self) -> None:
        """After a cut: until no old collective can write into a reused buffer."""
        while self.outstanding:
            self.outstanding.popleft().drain()

    def detach(self) -> None:
        """Drop every inner group. Cut and drained first, its destructor takes no time."""
        for group in self.members:
            group.inner = None

    def __iter__(self) -> Iterator[ElasticGroup]:
        return iter(self.members)


class ElasticGroup(dist.ProcessGroup):
    """The group that the script holds. `ranks`: its global ranks; `key`: the same at every member."""

    def __init__(self, registry: Groups, name: str, ranks: list[int], group_rank: int, size: int) -> None:
        super().__init__(group_rank, size)  # type: ignore[call-arg]
        self._own_rank = group_rank
        self._own_name = name
        self.registry = registry
        self.ranks = list(ranks) if ranks else list(range(size))
        self.ordinal = registry.ordinal(self.ranks)
        self.inner: dist.ProcessGroup | None = None
        self.ring: GroupRing | None = None

    @property
    def key(self) -> str:
        return f"{'-'.join(map(str, self.ranks))}#{self.ordinal}"

    def set_rank(self, group_rank: int, ranks: list[int]) -> None:
        """Play another rank from now on (a hot spare's promotion)."""
        self._own_rank = group_rank
        self.ranks = list(ranks)

    def connected(self, inner: dist.ProcessGroup, generation: int) -> None:
        """Communicate by `inner` from now on; collectives are numbered from 1 again."""
        if self.ring is not None:
            label = group_label(self.ranks, self.ordinal)
            self.ring.begin(generation, self.key, label, self.size(), self.getRank())
        self.inner = inner

    # ---- what torch asks of a group -------------------------------------------------------------

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return getattr(self, "_own_rank", -1)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND_NAME

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._own_name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._own_name

    def _set_group_name(self, name: str) -> None:
        """Torch sets the name it gave us; ours came with the creation."""

    @property
    def _device_types(self) -> list[torch.device]:
        devices = [torch.device("cpu")]
        if torch.cuda.is_available():
            devices.append(torch.device("cuda"))
        return devices

    def shutdown(self) -> None:
        self.inner = None

    def abort(self) -> None:
        self.inner = None

    def barrier(self, *arguments: Any, **options: Any) -> Any:
        return self.collective("barrier", arguments, options)

    # ---- one way for every collective -----------------------------------------------------------

    def collective(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Hand `name` to the inner group, or answer it alone; never raises for a lost peer in a step."""
        registry = self.registry
        if not registry.open or self.inner is None:
            return self._detour(name, arguments)
        registry.collectives += 1
        if registry.page is not None:
            registry.page.collectives = registry.collectives  # a hang is told from who stands outside
        place = 0
        if self.ring is not None:
            code = CODES.get(name, 0)
            peer = _peer(arguments) if code >= FIRST_PAIRED else 0
            place = self.ring.enter(code, _byte_count(arguments), peer)
        try:
            work = getattr(self.inner, name)(*arguments, **options)
        except RuntimeError as error:
            self.noted_failure(place)
            self.collective_failed(name, arguments, error)
            return DoneWork(_result(arguments))
        guarded = GuardedWork(work, self, name, arguments, registry.journal is not None, place)
        registry.track(guarded)
        return guarded

    def _detour(self, name: str, arguments: tuple[Any, ...]) -> Any:
        registry = self.registry
        if registry.solo:
            outputs = outputs_of(name, arguments)
            if registry.journal is None or not registry.journal.replay(self.key, name, outputs):
                solo.answer(name, self.size(), self.getRank(), arguments)
            return DoneWork(_result(arguments))
        if registry.poisoned:
            self._answer_poisoned(name, arguments)
            return DoneWork(_result(arguments))
        if registry.place in REFUSALS:
            raise UsageError(REFUSALS[registry.place].format(name=name))
        raise UsageError(f"{name}: the group of ranks {self.ranks} is not connected.")

    def collective_failed(self, name: str, arguments: tuple[Any, ...], error: Exception) -> None:
        """A collective failed: poison, tell the session, and answer as if every peer were a clone.

        Observing, the error goes on to the script.
        """
        self.registry.poison(f"{name} on ranks {self.ranks}: {_first_line(error)}")
        if self.registry.observing:
            raise error
        self._answer_poisoned(name, arguments)

    def _answer_poisoned(self, name: str, arguments: tuple[Any, ...]) -> None:
        registry = self.registry
        registry.swallowed += 1
        if _is_background_thread():
            raise ConnectionError(
                f"{name}: the job is recovering from a failure; this thread's work is void."
            )
        if registry.place is Place.SETUP:
            registry.on_stranded()  # a setup is never repaired: every rank starts again
        if registry.place is not Place.STEP and registry.place is not Place.AFTER_GATE:
            raise StepInterrupted(f"{name} in {registry.place.value} while the job recovers")
        if registry.swallowed > MAX_SWALLOWED:
            raise StepInterrupted(
                f"{MAX_SWALLOWED} collectives in one poisoned step: it waits for a reduced flag"
            )
        solo.answer(name, self.size(), self.getRank(), arguments)

    def noted_failure(self, place: int) -> None:
        """The collective with this place in the ring has failed."""
        if self.ring is not None:
            self.ring.failed(place)

    def keep_in_journal(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Note a finished setup collective for whoever takes this rank later."""
        if self.registry.journal is not None:
            self.registry.journal.keep(self.key, name, outputs_of(name, arguments))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _result(arguments: tuple[Any, ...]) -> Any:
    """What the future of a collective holds: its outputs as a list, which DDP's reducer expects."""
    if not arguments:
        return []
    return [arguments[0]] if isinstance(arguments[0], torch.Tensor) else arguments[0]


def _byte_count(arguments: tuple[Any, ...]) -> int:
    """Bytes of the first tensor: what the ring keeps of a collective's shape."""
    first = arguments[0] if arguments else None
    while type(first) is list and first:
        first = first[0]
    try:
        return first.nbytes  # type: ignore[union-attr]
    except AttributeError:
        return 0


def _peer(arguments: tuple[Any, ...]) -> int:
    """The other rank, within the group, of a send or receive; -1: any."""
    other = arguments[1] if len(arguments) > 1 else -1
    return other if isinstance(other, int) and 0 <= other < 1 << 20 else -1


def _is_background_thread() -> bool:
    """True in a thread that the script started itself (autograd's own threads are unknown to Python)."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def _make(name: str) -> Callable[..., Any]:
    def collective(self: ElasticGroup, *arguments: Any, **options: Any) -> Any:
        return self.collective(name, arguments, options)

    collective.__name__ = name
    return collective


for _name in solo.ANSWERS:
    if _name != "barrier":
        setattr(ElasticGroup, _name, _make(_name))


def register(registry: Groups, *, devices: list[str]) -> None:
    """Make torch build elastic groups for the backend name "keepstep"."""

    def create(options: Any, _backend_options: Any = None) -> ElasticGroup:
        group = ElasticGroup(
            registry,
            options.group_id,
            list(options.global_ranks_in_group),
            options.group_rank,
            options.group_size,
        )
        registry.add(group)
        return group

    dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=devices)

"""What a seed means: the world, its faults and their moments. Nothing is drawn anywhere else but
delays, from the same generator."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

WORLDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ddp2", ("a", "a")),
    ("ddp3", ("a", "a", "a")),
    ("hsdp4", ("a", "b", "a", "b")),
    ("fsdp2", ("a", "b")),
    ("uneven3", ("a", "b", "a")),
)
FAULT_KINDS = ("kill", "kill", "kill", "stop", "suspect", "flaky", "flaky", "controller")
NODE_KINDS = ("node", "cut", "agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """One fault, when the `at_event`-th event of the run has happened.

    `kind`: kill, stop (SIGSTOP, continued later), suspect (a living worker is falsely suspected and
    lives on for a while), flaky (a collective fails though nobody died), controller (crash and
    restart), node (a whole node with its agent), cut (a node's network, healed later), agent (dies and is
    restarted; its workers live on). `whom`: "member", "spare" or "any"; `pick` chooses.
    """

    kind: str
    at_event: int
    whom: str
    pick: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """A mishap of a told story, when a line of the trace contains `line`.

    `worker` suffers it; None: the one that the line begins with.
    """

    line: str
    kind: str
    worker: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that a seed decides beforehand. `shards[r]` is the replica set of rank r."""

    seed: int
    name: str
    shards: tuple[str, ...]
    spares: int
    free_slots: int
    nodes: int
    steps: int
    mishaps: tuple[Mishap, ...] = ()
    cues: tuple[Cue, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.shards)


def story_of(seed: int) -> Story:
    """The story of a seed: always the same one."""
    rng = Random(seed)
    name, shards = WORLDS[rng.randrange(len(WORLDS))]
    spares = rng.randint(0, 2)
    steps = rng.randint(3, 5)
    count = rng.choice((1, 1, 2, 2, 3))
    # Setup takes the first events; most faults should fall into training.
    first = rng.randint(0, 20) if rng.random() < 0.1 else rng.randint(10, 10 + 10 * len(shards) * steps)
    mishaps, moment = [], first
    for _ in range(count):
        kind = rng.choice(FAULT_KINDS)
        whom = rng.choices(("member", "spare", "any"), (8, 1, 1))[0]
        mishaps.append(Mishap(kind=kind, at_event=moment, whom=whom, pick=rng.random()))
        # The next one mostly falls into the recovery from this one.
        moment += rng.randint(1, 10 * len(shards)) if rng.random() < 0.8 else rng.randint(20, 150)
    nodes = rng.choice((1, 1, 2))
    if nodes == 2 and rng.random() < 0.3:
        kind = rng.choice(NODE_KINDS)
        mishaps.append(Mishap(kind=kind, at_event=moment, whom="any", pick=rng.random()))
    lost = any(mishap.kind in ("node", "cut") for mishap in mishaps)
    free = len(shards) + spares + 1 if lost else 1
    return Story(
        seed=seed,
        name=name,
        shards=shards,
        spares=spares,
        free_slots=free,
        nodes=nodes,
        steps=steps,
        mishaps=tuple(mishaps),
    )

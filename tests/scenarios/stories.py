"""The recovery stories, and how their transcripts are made.

`python -m tests.scenarios.stories --regenerate` writes them all anew; review the diff.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from keepstep.sim.cluster import Cluster
from keepstep.sim.story import Cue, Story

FOLDER = Path(__file__).resolve().parent
DDP3 = ("a", "a", "a")
HSDP4 = ("a", "b", "a", "b")
FSDP2 = ("a", "b")


def story(
    seed: int,
    shards: Sequence[str],
    *cues: Cue,
    spares: int = 1,
    steps: int = 5,
    nodes: int = 1,
    crowded: bool = False,
) -> Story:
    free = 0 if nodes == 1 or crowded else len(shards) + 1
    return Story(
        seed=seed,
        name="told",
        shards=tuple(shards),
        spares=spares,
        free_slots=free,
        nodes=nodes,
        steps=steps,
        cues=cues,
    )


def kill(worker: int | None, when: str) -> Cue:
    return Cue(line=when, kind="kill", worker=worker)


STORIES: dict[str, tuple[str, Story]] = {
    "rank_dies_in_its_step": (
        "A rank is killed in its step: nobody passed the gate, all start the step again, the spare copies.",
        story(39, DDP3, kill(2, "w1 has committed 3 steps")),
    ),
    "rank_dies_in_its_update": (
        "The only rank that has passed a gate dies in its update: nobody else knows, the step is done again.",
        story(225, DDP3, kill(1, "w1 passes the gate of step 3")),
    ),
    "gate_is_passed_by_some": (
        "A rank dies when only some have passed the gate: the others roll forward with their own gradients.",
        story(99, DDP3, kill(2, "w1 passes the gate of step 3")),
    ),
    "rank_zero_dies": (
        "Rank 0 is a rank like any other.",
        story(133, DDP3, kill(0, "w2 has committed 3 steps")),
    ),
    "rank_dies_in_the_last_gate": (
        "A rank is killed when all steps are done and the others leave.",
        story(371, DDP3, kill(2, "w2 has committed 5 steps")),
    ),
    "two_ranks_die_at_once": (
        "Two ranks of different shards die together: one generation, two spares.",
        story(156, HSDP4, kill(0, "w1 has committed 3 steps"), kill(3, "*** kill w0"), spares=2),
    ),
    "second_rank_dies_during_recovery": (
        "While the first generation of the incident connects, another rank dies.",
        story(92, DDP3, kill(1, "w0 has committed 3 steps"), kill(2, "controller: generation 1"), spares=2),
    ),
    "spare_dies_while_parked": (
        "A parked spare dies: it is replaced, no generation is made.",
        story(40, DDP3, kill(None, "is parked, hot"), steps=14),
    ),
    "spare_dies_while_copying": (
        "The replacement dies in the middle of its copy: its half copy counts for nothing.",
        story(
            116, DDP3, kill(1, "w0 has committed 3 steps"), kill(None, "receives the first byte"), spares=2
        ),
    ),
    "source_dies_while_serving": (
        "The source of a copy dies: the target has no state, the other twin serves it.",
        story(260, DDP3, kill(1, "w0 has committed 3 steps"), kill(0, "receives the first byte"), spares=2),
    ),
    "collective_fails_and_nobody_dies": (
        "A connection breaks though nobody died: the same map is connected anew.",
        story(124, DDP3, Cue(line="w0 has committed 3 steps", kind="flaky", worker=1)),
    ),
    "stopped_rank_comes_back_fenced": (
        "A rank is stopped, fenced and replaced; when it is continued it plays no part any more.",
        story(80, DDP3, Cue(line="w0 has committed 3 steps", kind="stop", worker=2)),
    ),
    "healthy_rank_is_suspected": (
        "A healthy rank is suspected falsely: it is fenced all the same, its old generation commits no more.",
        story(44, DDP3, Cue(line="w0 has committed 3 steps", kind="suspect", worker=1)),
    ),
    "no_live_copy_is_left": (
        "The only holder of a shard dies: all start the script again, and it is said.",
        story(24, FSDP2, kill(1, "w0 has committed 3 steps")),
    ),
    "rank_dies_in_setup": (
        "A rank dies before two steps are published: every rank starts again.",
        story(294, DDP3, kill(1, "w1 connects as rank 1")),
    ),
    "no_spare_is_left": (
        "Without any spare the freed slot gets a new worker, and the rank waits for it.",
        story(77, DDP3, kill(1, "w0 has committed 3 steps"), spares=0),
    ),
    "controller_crashes_during_recovery": (
        "The controller crashes right after a death is answered; the next one tells the generation again.",
        story(
            16,
            DDP3,
            kill(1, "w0 has committed 3 steps"),
            Cue(line="controller: generation 1", kind="controller"),
        ),
    ),
    "node_is_lost": (
        "A node is lost with all its workers.",
        story(312, DDP3, Cue(line="w0 has committed 3 steps", kind="node"), spares=2, nodes=2),
    ),
    "network_of_a_node_is_cut": (
        "Nobody hears a node any more, and nobody dies: it is given up, and fenced when it comes back.",
        story(41, DDP3, Cue(line="w0 has committed 3 steps", kind="cut"), spares=2, nodes=2),
    ),
    "agent_is_restarted": (
        "An agent dies and is started again; its workers never notice.",
        story(
            77,
            DDP3,
            Cue(line="w0 has committed 4 steps", kind="agent"),
            spares=1,
            nodes=2,
            steps=8,
            crowded=True,
        ),
    ),
    "rank_dies_while_its_agent_is_away": (
        "A rank dies while no agent lives to see it: the agent tells of it when it is back.",
        story(
            78,
            DDP3,
            Cue(line="w0 has committed 4 steps", kind="agent"),
            Cue(line="*** the agent of n1 dies", kind="kill", worker=2),
            spares=1,
            nodes=2,
            steps=8,
            crowded=True,
        ),
    ),
}


def transcript(name: str) -> str:
    """The story as text: what it tells, then every line of its trace."""
    about, told = STORIES[name]
    lines: list[str] = []
    cluster = Cluster(told, trace=lines)
    end = cluster.run()
    assert not cluster.cues, f"{name}: nothing happened at {cluster.cues[0].line!r}"
    head = [
        about,
        f"{told.world_size} ranks (shards {' '.join(told.shards)}), {told.spares} spares, {told.steps} steps.",
        "",
    ]
    return "\n".join([*head, *lines, "", f"exit code {end.exit_code}"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.stories")
    parser.add_argument("--regenerate", action="store_true", help="write all transcripts anew")
    if not parser.parse_args(argv).regenerate:
        parser.print_help()
        return 2
    for name in STORIES:
        (FOLDER / f"{name}.txt").write_text(transcript(name), encoding="utf-8")
    print(f"{len(STORIES)} transcripts written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

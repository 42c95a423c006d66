"""A rank dies at every moment of a step, for DDP and HSDP: the run equals the undisturbed one bit for bit.

Each class is one job that is harmed many times, and each of its tests judges one harm.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harmed import Harm, Story, harmed_job
from tests.integration.jobs import DDP, HSDP

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


class Ddp:
    arguments = DDP
    ranks = 3
    epoch = 16  # steps


class Hsdp:
    arguments = HSDP
    ranks = 4
    epoch = 12


def folder(factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return factory.mktemp(request.node.name)


# ---- one death at a time -----------------------------------------------------------------------------


def moments(epoch: int) -> list[Harm]:
    one = {
        "forward": "rank=1,step=+0,at=forward",
        "backward": "rank=1,step=+0,at=backward",
        "random": "rank=1,step=+0,at=random",
        "gate": "rank=1,step=+0,at=gate",
        "after_gate": "rank=1,step=+0,at=after_gate",
        "update": "rank=1,step=+0,at=update",
        "block_end": "rank=1,step=+0,at=block_end",
        "between": "rank=1,step=+0,at=between",
        "rank 0 in backward": "rank=0,step=+0,at=backward",
        "rank 0 after the gate": "rank=0,step=+0,at=after_gate",
        "stopped": "rank=1,step=+0,at=backward,kind=stop",
    }
    return [
        *(Harm(name=name, faults=(fault,)) for name, fault in one.items()),
        Harm(name="aside", faults=("rank=1,step=+0,at=aside",), at=lambda step: step % 5 == 4),
        Harm(name="between epochs", faults=("rank=1,step=+0,at=between",), at=lambda step: step % epoch == 0),
        Harm(
            name="the last step, and after it",
            faults=("rank=1,step=last,at=backward", "rank=1,step=end,at=gate"),
            spares=2,
        ),
    ]


MOMENTS = [harm.name for harm in moments(1)]


class Moments:
    arguments: tuple[str, ...]
    ranks: int
    epoch: int

    @pytest.fixture(scope="class")
    @classmethod
    def story(
        cls, references: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Story:
        return harmed_job(
            folder(tmp_path_factory, request),
            references,
            cls.arguments,
            moments(cls.epoch),
            ranks=cls.ranks,
            spares=2,
        )

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_rank_killed_at_any_moment_costs_nothing(self, moment: str, story: Story) -> None:
        incidents = story.assert_cost_nothing(moment)
        assert {incident["resolution"] for incident in incidents} == {"rebuilt"}
        if moment == "stopped":
            assert "stopped" in incidents[0]["reason"]

    def test_all_in_all_the_run_is_the_undisturbed_one(self, story: Story) -> None:
        story.assert_ended_identical()
        assert len(story.incidents) == len(MOMENTS) + 1


class TestDdpMoments(Ddp, Moments):
    pass


class TestHsdpMoments(Hsdp, Moments):
    pass


# ---- several at once ---------------------------------------------------------------------------------

FIRST = "rank=1,step=+0,at=backward"
TOGETHER = {
    "two ranks at once": "rank=2,step=+0,at=backward",
    "the target of the copy dies": "rank=1,step=+0,at=transfer_target",
    "another rank dies right after": "rank=2,step=+1,at=backward",
}
SOURCES = {
    "the source of the copy dies": "rank=2,step=+0,at=transfer_source",
    "rank 0 dies as a source": "rank=0,step=+0,at=transfer_source",
}


def two(seconds: dict[str, str]) -> list[Harm]:
    return [Harm(name=name, faults=(FIRST, second), spares=2) for name, second in seconds.items()]


class Together:
    """The target of the copy dies, or another rank right after: as long as a twin lives, nothing is lost."""

    arguments: tuple[str, ...]
    ranks: int
    more: tuple[Harm, ...] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def story(
        cls, references: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Story:
        harms = two(TOGETHER)
        return harmed_job(
            folder(tmp_path_factory, request),
            references,
            cls.arguments,
            [*harms, *cls.more],
            ranks=cls.ranks,
            spares=2,
        )

    @pytest.mark.parametrize("name", TOGETHER)
    def test_a_second_failure_costs_nothing_either(self, name: str, story: Story) -> None:
        story.assert_cost_nothing(name, recomputed_max=None)

    def test_all_in_all_the_run_is_the_undisturbed_one(self, story: Story) -> None:
        story.assert_ended_identical()


class TestDdpTogether(Ddp, Together):
    """Every rank has two twins: also a source may die."""

    more = tuple(two(SOURCES))

    @pytest.mark.parametrize("name", SOURCES)
    def test_a_dead_source_costs_nothing_while_another_lives(self, name: str, story: Story) -> None:
        story.assert_cost_nothing(name, recomputed_max=None)


class TestHsdpTogether(Hsdp, Together):
    """Ranks 1 and 3 hold the same shard: each is the other's only source."""

    more = tuple(two({"every twin": "rank=3,step=+0,at=backward"}))

    def test_when_every_twin_is_gone_the_rollback_is_said_and_the_run_ends_identical(
        self, story: Story
    ) -> None:
        story.assert_ended_identical()
        assert all(strike.struck for strike in story.verdicts["every twin"].struck)
        assert story.incidents[-1]["resolution"] == "rollback"
        assert "no live copy" in story.output


# ---- the start, and no spare -------------------------------------------------------------------------

# Of one rank, where a survivor of the one before would come to the next one's place in the same world.
STARTS = {
    "in setup": "rank=2,step=0,at=setup",
    "in the first step": "rank=2,step=0,at=backward",
    "in the second step": "rank=0,step=1,at=backward",
}


class Starts:
    """Three deaths before step 2 is published; then one in training, with a warm spare or none."""

    arguments: tuple[str, ...]
    ranks: int
    spares: int

    @pytest.fixture(scope="class")
    @classmethod
    def story(
        cls, references: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Story:
        return harmed_job(
            folder(tmp_path_factory, request),
            references,
            cls.arguments,
            [
                *(Harm(name=name, faults=(fault,), spares=0) for name, fault in STARTS.items()),
                Harm(name="in training", faults=("rank=1,step=+0,at=forward",), spares=cls.spares),
            ],
            ranks=cls.ranks,
            spares=cls.spares,
            symmetric=False,
        )

    @pytest.mark.parametrize("name", STARTS)
    def test_a_death_in_setup_or_the_first_steps_restarts_every_rank(self, name: str, story: Story) -> None:
        (incident,) = story.assert_cost_nothing(name, recomputed_max=None)
        assert incident["resolution"] == "restarted_in_setup"

    def test_a_rank_is_played_by_whoever_there_is(self, story: Story) -> None:
        """And the restart was over when training went on: what comes later is an incident of its own."""
        (incident,) = story.assert_cost_nothing("in training")
        assert incident["resolution"] == "rebuilt"
        assert len(incident["victims"]) == 1
        story.assert_ended_identical()


class TestDdpStartsWithAWarmSpare(Ddp, Starts):
    spares = 1


class TestHsdpStartsWithoutASpareAndUsesTheFreedSlot(Hsdp, Starts):
    spares = 0

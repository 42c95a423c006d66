"""Who hears what of a generation, and who is fenced."""

from __future__ import annotations

import json
from typing import Any

from keepstep.agent.announcements import Announcements
from keepstep.core.actions import Announce, Release, StandBy
from keepstep.core.types import Generation
from keepstep.wire.messages import Fenced


def announce(number: int, *ranks: int, **fields: Any) -> Announce:
    return Announce(generation=Generation(number=number, ranks=ranks, **fields), reason=f"reason {number}")


def test_a_member_that_lost_its_place_is_fenced_for_good() -> None:
    known = Announcements()
    known.accept(announce(0, 0, 1))
    known.accept(announce(1, 0, 2))
    assert known.news_for(0) == known.newest == known.news_for(9)
    assert known.news_for(1) == Fenced(reason="worker 1 has no place in generation 1: reason 1")
    assert known.fenced(9) is None


def test_a_donor_is_a_member_and_a_planned_generation_fences_nobody_in_it() -> None:
    known = Announcements()
    known.accept(announce(0, 0, 1))
    known.accept(announce(1, 0, 5, donors={1: 1}, planned=True))
    assert known.fenced(1) is None and known.rank_of(1) == 1
    known.accept(announce(2, 0, 5))
    assert known.fenced(1) is not None


def test_an_older_announcement_changes_nothing_and_the_same_one_counts_again() -> None:
    known = Announcements()
    assert known.accept(announce(4, 0, 1))
    assert not known.accept(announce(3, 0, 2))
    assert known.accept(announce(4, 0, 1))
    assert known.generation == 4 and known.fenced(1) is None


def test_players_of_a_rank_come_newest_first_and_a_fresh_world_forgets_them() -> None:
    known = Announcements()
    known.accept(announce(0, 0, 1))
    known.accept(announce(1, 0, 2))
    known.accept(announce(2, 0, 3))
    assert known.players(1) == [3, 2, 1] and known.ranks_played(0) == [0]
    known.accept(announce(3, 4, 5, fresh=True))
    assert known.players(1) == [5] and known.fresh_since == 3
    known.accept(announce(3, 4, 5, fresh=True))
    assert known.players(1) == [5]


def test_a_late_worker_is_told_all_that_it_missed() -> None:
    known = Announcements()
    assert known.greetings(2) == []
    known.stand_by(StandBy(worker=2, rehearse_rank=1))
    known.accept(announce(0, 0, 1))
    assert known.greetings(2) == [StandBy(worker=2, rehearse_rank=1), known.newest]
    known.accept(announce(1, 0, 2))
    known.release(2)
    assert known.greetings(2) == [known.newest, Release(workers=(2,))]


def test_a_successor_knows_all_that_was_announced() -> None:
    known = Announcements()
    known.accept(announce(3, 0, 1, fresh=True))
    known.stand_by(StandBy(worker=2, rehearse_rank=1))
    known.accept(announce(4, 0, 2))
    known.release(0)
    read = Announcements()
    read.load(json.loads(json.dumps(known.to_state())))
    assert known.certain and not read.certain  # a memory may lag behind
    read.certain = True
    assert vars(read) == vars(known)
    assert (read.fenced(1), read.players(1), read.fresh_since) == (known.fenced(1), [2, 1], 3)

"""What an agent keeps for other nodes: three steps of each player, bounded, and dropped when it is of no use."""

from __future__ import annotations

from keepstep.agent.kept import KeptRecords
from keepstep.wire.keeping import RecordSent


def lineage(step: int, generation: int = 0) -> str:
    return f"{generation:016x}{step:016x}"


def sent(step: int, *, rank: int = 0, generation: int = 0, kind: str = "gate", size: int = 100) -> RecordSent:
    return RecordSent(
        sequence=step,
        rank=rank,
        generation=generation,
        kind=kind,
        step=step,
        lineage=lineage(step, generation),
        payload=bytes([step % 256]) * size,
    )


def steps(kept: KeptRecords, rank: int = 0) -> list[tuple[int, int]]:
    return sorted((worker, record.step) for worker, _, record, _ in kept.of_rank(rank))


def test_the_newest_three_steps_stay_with_both_their_records() -> None:
    kept = KeptRecords()
    for step in range(1, 8):
        assert kept.keep(5, sent(step))
        assert kept.keep(5, sent(step, kind="start"))
    assert steps(kept) == [(5, 5), (5, 5), (5, 6), (5, 6), (5, 7), (5, 7)]
    assert kept.bytes == 600


def test_a_namesake_is_replaced() -> None:
    kept = KeptRecords()
    kept.keep(5, sent(1, size=100))
    kept.keep(5, sent(1, size=30))
    assert kept.bytes == 30 and len(kept.of_rank(0)) == 1


def test_the_player_before_stays_until_its_successor_is_well_ahead() -> None:
    kept = KeptRecords()
    for step in (1, 2, 3):
        kept.keep(5, sent(step))
    kept.keep(9, sent(3, generation=1))
    kept.keep(9, sent(4, generation=1))
    assert {worker for worker, _ in steps(kept)} == {5, 9}
    assert kept.of_rank(0)[0][0] == 9  # the newest player first
    kept.keep(9, sent(5, generation=1))
    assert {worker for worker, _ in steps(kept)} == {9}


def test_what_every_rank_has_left_behind_is_dropped_and_the_rest_stays_through_any_generation() -> None:
    kept = KeptRecords()
    kept.keep(5, sent(10))
    kept.keep(6, sent(4, rank=1))
    for generation in range(1, 20):
        kept.announce(generation, fresh=False, published=10)
    assert kept.ranks == (0,)


def test_a_fresh_world_forgets_the_old_one_but_not_who_heard_of_it_first() -> None:
    kept = KeptRecords()
    kept.keep(5, sent(10))
    kept.keep(8, sent(0, rank=1, generation=3))
    kept.announce(3, fresh=True, published=0)
    assert kept.ranks == (1,)
    assert not kept.keep(5, sent(11))
    assert kept.bytes == 100


def test_without_room_the_stale_goes_first_and_then_new_records_are_refused() -> None:
    kept = KeptRecords(limit_bytes=350)
    kept.keep(5, sent(1, rank=0))
    kept.keep(6, sent(50, rank=1))
    kept.keep(6, sent(51, rank=1))
    assert kept.keep(7, sent(51, rank=2)) and kept.ranks == (1, 2)
    assert not kept.keep(8, sent(51, rank=3)) and kept.ranks == (1, 2)
    assert kept.keep(6, sent(51, rank=1)) and kept.bytes == 300

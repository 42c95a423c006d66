"""The guilty rank: named by counting, whoever else waits; nobody is named when nobody stood outside."""

from __future__ import annotations

import pytest

from keepstep.core.outsider import CallView, GroupView, RankView, find_outsider


def group(label: str, place: int, *operations: str, open_last: bool = True, size: int = 4) -> GroupView:
    """A view whose calls are `operations`, numbered from 1; the last one still open."""
    calls = tuple(
        CallView(sequence=n, operation=name, bytes=8, open=open_last and n == len(operations))
        for n, name in enumerate(operations, 1)
    )
    return GroupView(
        identity=label, label=label, size=size, group_rank=place, entered=len(operations), calls=calls
    )


def rank(number: int, *groups: GroupView, phase: str = "STEP", step: int = 9, **more: object) -> RankView:
    return RankView(rank=number, worker=number, step=step, phase=phase, groups=groups, **more)  # type: ignore[arg-type]


def test_the_rank_that_did_not_enter_is_named_with_place_and_group() -> None:
    views = [rank(n, group("0-1-2-3", n, *["allreduce"] * 3)) for n in (0, 1, 3)]
    views.append(rank(2, group("0-1-2-3", 2, *["allreduce"] * 2), at="data.py:41 in load"))
    found = find_outsider(views)
    assert found.kind == "outsider" and found.ranks == (2,) and found.waiting == (0, 1, 3)
    assert found.text == (
        "rank 2 had not entered all_reduce #3 of group 0-1-2-3, in which 3 ranks waited; "
        "its main thread was in data.py:41 in load"
    )


def test_a_rank_that_waits_itself_is_not_blamed() -> None:
    """0 and 1 wait in their pair's group; 1's partner in the other group is the one outside."""
    views = [
        rank(0, group("0-1", 0, "allreduce", size=2), group("0-2", 0, size=2)),
        rank(1, group("0-1", 1, size=2), group("1-3", 0, "allgather", size=2)),
        rank(2, group("2-3", 0, "allreduce", size=2), group("0-2", 1, size=2)),
        rank(3, group("2-3", 1, size=2), group("1-3", 1, size=2)),
    ]
    found = find_outsider(views)
    assert found.ranks == (3,)
    assert "rank 0" in found.text or "more waited" in found.text


def test_calls_that_are_over_though_nobody_noted_it_blame_nobody() -> None:
    """Everybody has entered the open call: then nobody was missing."""
    views = [rank(n, group("0-1", n, "allreduce", "allreduce", size=2)) for n in (0, 1)]
    assert find_outsider(views).kind == "nobody"


def test_the_gate_counts_as_a_collective_of_all() -> None:
    views = [rank(n, phase="GATE", step=41) for n in (0, 1)] + [rank(2, phase="STEP", step=41, state="T")]
    found = find_outsider(views)
    assert found.ranks == (2,)
    assert found.text == (
        "rank 2 had not entered the gate of step 41, in which 2 ranks waited; its process was stopped"
    )
    assert "every rank was in the gate" in find_outsider(views[:2]).text


def test_a_rank_that_has_passed_the_gate_is_not_missing_in_it() -> None:
    assert find_outsider([rank(0, phase="GATE", step=4), rank(1, phase="UPDATE", step=4)]).kind == "nobody"
    assert find_outsider([rank(0, phase="GATE", step=4), rank(1, phase="STEP", step=5)]).kind == "nobody"


def test_differing_operations_at_one_number_are_the_scripts_mistake() -> None:
    views = [rank(n, group("0-1-2", n, "allreduce", "broadcast", size=3)) for n in (0, 1)]
    views.append(rank(2, group("0-1-2", 2, "allreduce", "allreduce", size=3), at="train.py:7"))
    found = find_outsider(views)
    assert found.kind == "mismatch" and found.ranks == (2,) and found.sequence == 2
    assert "rank 2 called all_reduce of 8 bytes, ranks 0, 1 broadcast of 8 bytes" in found.text


def test_differing_sizes_count_where_sizes_must_agree() -> None:
    def view(number: int, operation: str, size: int) -> RankView:
        calls = (CallView(sequence=1, operation=operation, bytes=size, open=True),)
        only = GroupView(identity="g", label="g", size=2, group_rank=number, entered=1, calls=calls)
        return rank(number, only)

    assert find_outsider([view(0, "allreduce", 8), view(1, "allreduce", 16)]).kind == "mismatch"
    assert find_outsider([view(0, "alltoall_base", 8), view(1, "alltoall_base", 16)]).kind == "nobody"


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    views = [
        rank(0, group("0-1#0", 0, "allreduce", size=2), group("0-1#1", 0, size=2)),
        rank(1, group("0-1#0", 1, size=2), group("0-1#1", 1, "allreduce", size=2)),
    ]
    found = find_outsider(views)
    assert found.kind == "deadlock" and found.ranks == (0, 1)
    assert "rank 0 waits in all_reduce #1 of group 0-1#0 for rank 1" in found.text


def test_a_receive_is_waited_for_until_the_other_side_sends() -> None:
    receives = GroupView(
        identity="g",
        label="0-1",
        size=2,
        group_rank=1,
        entered=0,
        calls=(CallView(sequence=0, operation="recv", open=True, peer=0),),
    )
    silent = GroupView(identity="g", label="0-1", size=2, group_rank=0, entered=0)
    found = find_outsider([rank(0, silent), rank(1, receives)])
    assert found.ranks == (0,) and "receive in group 0-1" in found.text


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_views_say_so(count: int) -> None:
    assert "too few" in find_outsider([rank(n) for n in range(count)]).text


def test_many_missing_ranks_are_counted_not_listed() -> None:
    views = [rank(0, group("g", 0, "allreduce", size=9))] + [
        rank(n, group("g", n, size=9)) for n in range(1, 9)
    ]
    text = find_outsider(views).text
    assert text.startswith("8 ranks (1, 2, 3, 4, ...) had not entered") and "rank 0 waited" in text

"""The ring of collectives: what was entered stays readable by another process, whatever became of the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.errors import WireError
from keepstep.trainer import solo
from keepstep.wire import ring as rings
from keepstep.wire.ring import CODES, KEPT_CALLS, MAX_GROUPS, Ring, group_label, read, waited_ns


@pytest.fixture
def made(tmp_path: Path) -> Ring:
    return Ring.create(str(tmp_path / "worker-3.ring"), 3)


def test_every_collective_that_a_group_answers_has_a_code() -> None:
    assert set(solo.ANSWERS) <= set(CODES)


def test_calls_are_numbered_and_marked_as_they_end(made: Ring) -> None:
    group = made.add_group()
    assert group is not None
    group.begin(2, "0-1#0", "0-1", 2, 1)
    first = group.enter(CODES["allreduce"], 400)
    second = group.enter(CODES["broadcast"], 8)
    group.ended(first)
    (log,) = read(made.copy())
    assert (log.label, log.size, log.group_rank, log.entered(2)) == ("0-1", 2, 1, 2)
    one, two = log.calls
    assert (one.operation, one.bytes, one.sequence, one.generation) == ("allreduce", 400, 1, 2)
    assert one.ended_ns >= one.entered_ns > 0 and two.ended_ns == 0 and not two.failed
    group.failed(second)
    assert read(made.copy())[0].calls[1].failed


def test_the_last_hundred_are_kept_and_the_count_goes_on(made: Ring) -> None:
    group = made.add_group()
    assert group is not None
    group.begin(0, "k", "0-1", 2, 0)
    for _ in range(1000):
        group.ended(group.enter(CODES["allreduce"], 4))
    (log,) = read(made.copy())
    assert len(log.calls) == KEPT_CALLS and log.calls[-1].sequence == log.entered(0) == 1000
    assert [call.sequence for call in log.calls] == list(range(901, 1001))


def test_a_late_mark_never_falls_on_a_newer_call(made: Ring) -> None:
    group = made.add_group()
    assert group is not None
    group.begin(0, "k", "0-1", 2, 0)
    old = group.enter(CODES["allreduce"], 4)
    for _ in range(128):
        group.enter(CODES["allreduce"], 4)
    group.ended(old)
    assert all(call.ended_ns == 0 for call in read(made.copy())[0].calls)


def test_a_new_generation_counts_from_one_and_keeps_what_went_before(made: Ring) -> None:
    group = made.add_group()
    assert group is not None
    group.begin(0, "k", "0-1", 2, 0)
    group.enter(CODES["allreduce"], 4)
    group.enter(CODES["allreduce"], 4)
    group.begin(1, "k", "0-1", 2, 0)
    group.enter(CODES["barrier"], 0)
    (log,) = read(made.copy())
    assert [(call.generation, call.sequence) for call in log.calls] == [(0, 1), (0, 2), (1, 1)]
    assert log.entered(0) == 2 and log.entered(1) == 1 and log.entered(7) == 0


def test_sends_and_receives_name_the_other_side_and_take_no_number(made: Ring) -> None:
    group = made.add_group()
    assert group is not None
    group.begin(0, "k", "0-1", 2, 0)
    group.enter(CODES["recv"], 64, 1)
    group.enter(CODES["recv_anysource"], 64, -1)
    group.enter(CODES["allreduce"], 4)
    calls = read(made.copy())[0].calls
    assert [(c.operation, c.peer, c.sequence) for c in calls] == [
        ("recv", 1, 0),
        ("recv_anysource", -1, 0),
        ("allreduce", None, 1),
    ]


def test_groups_beyond_the_room_go_unrecorded(made: Ring) -> None:
    assert all(made.add_group() for _ in range(MAX_GROUPS))
    assert made.add_group() is None


def waited(ring: Ring) -> int:
    return waited_ns(ring.copy(), time.monotonic_ns())


def test_who_waits_is_told_by_the_newest_call_alone(made: Ring) -> None:
    assert waited(made) == 0
    group = made.add_group()
    assert group is not None
    group.begin(0, "k", "0-1", 2, 0)
    assert waited(made) == 0
    forgotten = group.enter(CODES["allreduce"], 4)
    assert 0 < waited(made) < waited(made)
    group.ended(group.enter(CODES["allreduce"], 4))
    assert waited(made) == 0
    group.ended(forgotten)


def test_a_call_that_failed_was_waited_for_until_then(made: Ring) -> None:
    group = made.add_group()
    assert group is not None
    group.begin(0, "k", "0-1", 2, 0)
    group.failed(group.enter(CODES["allreduce"], 4))
    (call,) = read(made.copy())[0].calls
    assert waited(made) == waited(made) == call.ended_ns - call.entered_ns > 0
    group.ended(group.enter(CODES["allreduce"], 4))
    assert waited(made) == 0


def test_a_killed_writer_leaves_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "worker-1.ring"
    code = (
        "import os, signal, sys; from keepstep.wire.ring import Ring, CODES\n"
        "g = Ring.create(sys.argv[1], 1).add_group(); g.begin(0, 'k', '0-1', 2, 0)\n"
        "for n in range(7): g.enter(CODES['allreduce'], n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    opened = Ring.open(str(path))
    assert [call.bytes for call in read(opened.copy())[0].calls] == list(range(7))
    opened.close()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.ring").write_bytes(b"\0" * 100)
    with pytest.raises(WireError, match="not a ring"):
        Ring.open(str(tmp_path / "x.ring"))


def test_rubbish_is_read_without_an_error() -> None:
    rubbish = os.urandom(2 * rings._SECTION_BYTES + 4096)
    read(rubbish)
    waited_ns(rubbish, time.monotonic_ns())
    assert read(b"") == []


def test_labels_of_large_groups_stay_short() -> None:
    assert group_label([0, 1, 2, 3], 0) == "0-1-2-3" and group_label([0, 1], 1) == "0-1#1"
    assert group_label(list(range(2000)), 0) == "0-1-...-1999 (2000 ranks)"

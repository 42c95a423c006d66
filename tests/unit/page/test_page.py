"""The page's promises: records are whole or absent, counters are cheap, other processes see both."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.errors import WireError
from keepstep.wire.page import KEPT_RECORDS, Page, Phase

LINEAGE = "0123456789abcdef" * 2
OTHER = "f" * 32


@pytest.fixture
def path() -> Iterator[str]:
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
    file = folder / f"keepstep-test-{uuid.uuid4().hex}"
    yield str(file)
    file.unlink(missing_ok=True)


@contextlib.contextmanager
def child(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Another Python process, once it has said its first word; killed at the block's end."""
    command = [sys.executable, "-c", code, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def test_counters_written_by_one_mapping_are_read_by_another(path: str) -> None:
    with Page.create(path, worker=7) as mine, Page.open(path) as theirs:
        assert theirs.worker == 7
        for number, name in enumerate(("step", "published", "generation", "collectives", "phase_since_ns")):
            setattr(mine, name, 2**63 + number)
            assert getattr(theirs, name) == 2**63 + number
        for phase in Phase:
            mine.phase = phase
            assert theirs.phase is phase
        before = time.monotonic_ns()
        mine.enter(Phase.GATE)
        assert theirs.phase is Phase.GATE
        assert before <= theirs.phase_since_ns <= time.monotonic_ns()


def test_records_come_back_newest_first_and_start_is_preferred(path: str) -> None:
    with Page.create(path, worker=0) as mine, Page.open(path) as theirs:
        mine.write_record("gate", 3, LINEAGE, b"gate three")
        mine.write_record("start", 3, LINEAGE, b"start three")
        mine.write_record("gate", 4, OTHER, b"")
        kept = [(record.kind, record.step, record.lineage, record.payload) for record in theirs.records()]
        assert kept == [
            ("gate", 4, OTHER, b""),
            ("start", 3, LINEAGE, b"start three"),
            ("gate", 3, LINEAGE, b"gate three"),
        ]
        found = theirs.find(LINEAGE, 3)
        assert found is not None and found.payload == b"start three"
        gate = theirs.find(OTHER, 4)
        assert gate is not None and gate.kind == "gate"
        assert theirs.find(OTHER, 3) is None and theirs.find(LINEAGE, 4) is None


def test_an_empty_lineage_is_not_a_lineage_of_zeros(path: str) -> None:
    with Page.create(path, worker=0) as page:
        page.write_record("start", 0, "", b"first")
        page.write_record("start", 0, "0" * 32, b"zeros")
        first, zeros = page.find("", 0), page.find("0" * 32, 0)
        assert first is not None and first.payload == b"first"
        assert zeros is not None and zeros.payload == b"zeros"


def test_four_records_are_kept_and_a_redone_step_pushes_none_of_them_out(path: str) -> None:
    with Page.create(path, worker=0) as page:
        for step in range(5):
            page.write_record("start", step, LINEAGE, b"start %d" % step)
            page.write_record("gate", step, LINEAGE, b"gate %d" % step)
        for attempt in range(20):
            page.write_record("start", 4, LINEAGE, b"again %d" % attempt)
            page.write_record("gate", 4, LINEAGE, b"again %d" % attempt)
        kept = {(record.kind, record.step): record.payload for record in page.records()}
        assert kept == {
            ("start", 3): b"start 3",
            ("gate", 3): b"gate 3",
            ("start", 4): b"again 19",
            ("gate", 4): b"again 19",
        }


def test_a_second_writer_goes_on_where_the_first_one_stopped(path: str) -> None:
    with Page.create(path, worker=0) as first:
        for step in range(3):
            first.write_record("start", step, LINEAGE, b"%d" % step)
    with Page.open(path) as second:
        for step in range(3, 6):
            second.write_record("start", step, LINEAGE, b"%d" % step)
        assert [record.step for record in second.records()] == [5, 4, 3, 2]
        assert [record.sequence for record in second.records()] == [6, 5, 4, 3]


def test_a_flipped_byte_hides_that_record_only(path: str) -> None:
    with Page.create(path, worker=0) as page:
        page.write_record("start", 1, LINEAGE, b"one " * 100)
        page.write_record("start", 2, LINEAGE, b"two " * 100)
        data = Path(path).read_bytes()
        for at in (data.index(b"two ") + 37, data.index(b"two ") - 40):
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
            assert [record.step for record in page.records()] == [1]
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(data[at : at + 1])
        assert [record.step for record in page.records()] == [2, 1]


def test_too_large_a_payload_is_refused_with_both_sizes(path: str) -> None:
    with Page.create(path, worker=0, record_bytes=1000) as page:
        page.write_record("start", 0, "", b"x" * 1000)
        with pytest.raises(ValueError, match=r"1001 bytes .* 1000 bytes"):
            page.write_record("start", 1, "", b"x" * 1001)
        assert [record.step for record in page.records()] == [0]


def test_nonsense_is_refused_in_one_line(path: str) -> None:
    with Page.create(path, worker=0) as page:
        with pytest.raises(ValueError, match="'start' or 'gate'"):
            page.write_record("end", 0, "", b"")
        with pytest.raises(ValueError, match="32 hex digits"):
            page.write_record("start", 0, "abc", b"")
    with pytest.raises(FileExistsError):
        Page.create(path, worker=0)
    with open(path, "r+b") as file:
        file.truncate(8192)
    with pytest.raises(WireError, match="8192 bytes"):
        Page.open(path)
    for content, complaint in ((b"", "too few"), (b"x" * 8192, "not a page")):
        Path(path).write_bytes(content)
        with pytest.raises(WireError, match=complaint):
            Page.open(path)


def test_the_file_is_private_and_sparse(path: str) -> None:
    with Page.create(path, worker=0) as page:
        page.write_record("start", 0, "", b"x" * 16384)
        status = os.stat(path)
        assert status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 < 1 << 20 < status.st_size


def test_the_page_loads_neither_torch_nor_numpy() -> None:
    code = "import keepstep.wire.page, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


WRITE_FOR_EVER = """
import hashlib, sys
from keepstep.wire.page import Page
page = Page.open(sys.argv[1])
step = max((record.step for record in page.records()), default=-1) + 1
print("writing", flush=True)
while True:
    body = step.to_bytes(8, "big") * (1 + step * 97 % 4000)
    page.write_record("start" if step % 2 else "gate", step, "", hashlib.sha256(body).digest() + body)
    page.step = step
    step += 1
"""


def check_whole(page: Page) -> list[int]:
    steps = []
    for record in page.records():
        digest, body = record.payload[:32], record.payload[32:]
        assert hashlib.sha256(body).digest() == digest
        assert body[:8] == record.step.to_bytes(8, "big")
        steps.append(record.step)
    return steps


@pytest.mark.timeout(60)
def test_a_reader_beside_a_writer_never_sees_a_torn_record(path: str) -> None:
    with Page.create(path, worker=0) as page:
        seen: set[int] = set()
        with child(WRITE_FOR_EVER, path):
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                seen.update(check_whole(page))
        assert len(seen) > 50


@pytest.mark.timeout(120)
def test_a_writer_killed_in_mid_write_leaves_its_four_newest_records_whole(path: str) -> None:
    rng = random.Random(1)
    last = -1
    with Page.create(path, worker=0) as page:
        for _ in range(12):
            with child(WRITE_FOR_EVER, path):
                time.sleep(rng.uniform(0.01, 0.06))  # any moment will do
            steps = check_whole(page)
            assert len(steps) == KEPT_RECORDS
            assert steps == list(range(steps[0], steps[0] - KEPT_RECORDS, -1))
            assert steps[0] in (page.step, page.step + 1) and steps[0] > last
            last = steps[0]


def test_costs_are_printed(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    def best_us(action: object, times: int) -> float:
        assert callable(action)
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(times):
                action()
            best = min(best, (time.perf_counter() - begin) / times)
        return best * 1e6

    with Page.create(path, worker=0) as page:
        payload = os.urandom(16384)
        write = best_us(lambda: page.write_record("gate", 1, LINEAGE, payload), 500)
        enter = best_us(lambda: page.enter(Phase.GATE), 5000)
        count = best_us(lambda: setattr(page, "collectives", page.collectives + 1), 5000)
    with capsys.disabled():
        print(
            f"\n  page: 16 KiB record {write:.1f} us, enter(phase) {enter:.2f} us, counter += 1 {count:.2f} us"
        )
    assert write < 300 and enter < 10 and count < 10  # ten times the promise: this machine is shared

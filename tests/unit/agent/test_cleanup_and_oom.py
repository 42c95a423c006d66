"""What may be removed as a leftover, and how an OOM kill is told from another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.agent import cleanup
from keepstep.agent.oom import OomWatch


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory and sockets in a folder of the test's own."""
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(cleanup, "SOCKETS", tmp_path)
    return tmp_path


def rewrite_owner(folder: Path, *, pid: int | None = None, namespace: str | None = None) -> None:
    old_pid, started, old_namespace = (folder / "owner").read_text().split()
    words = [str(pid or old_pid), started, namespace or old_namespace]
    (folder / "owner").write_text(" ".join(words))


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_folders_of_a_dead_owner_are_removed_and_of_a_living_one_kept(places: Path) -> None:
    pages, socket = cleanup.make_page_dir("job-1", "node0"), cleanup.make_socket_dir()
    assert pages.stat().st_mode & 0o777 == socket.stat().st_mode & 0o777 == 0o700
    assert cleanup.remove_stale() == []
    rewrite_owner(pages, pid=dead_pid())
    rewrite_owner(socket, pid=dead_pid())
    assert cleanup.remove_stale() == [pages, socket]
    assert list(places.iterdir()) == []


def test_an_owner_of_another_pid_namespace_is_not_ours_to_judge(places: Path) -> None:
    pages = cleanup.make_page_dir("job-1", "node0")
    rewrite_owner(pages, pid=dead_pid(), namespace="pid:[1]")
    assert cleanup.remove_stale() == []


def test_an_owner_file_that_says_nothing_keeps_its_folder(places: Path) -> None:
    pages = cleanup.make_page_dir("job-1", "node0")
    (pages / "owner").write_text("")
    assert cleanup.remove_stale() == []


def test_a_reused_pid_is_not_taken_for_the_owner(places: Path) -> None:
    pages = cleanup.make_page_dir("job-1", "node0")
    pid, started, namespace = (pages / "owner").read_text().split()
    (pages / "owner").write_text(f"{pid} {int(started) - 500} {namespace}")  # lives, but began later
    assert cleanup.remove_stale() == [pages]


@pytest.mark.parametrize("job", ["", "a/b", "../x", ".hidden", "x" * 65])
def test_a_job_name_that_is_no_file_name_is_refused(places: Path, job: str) -> None:
    with pytest.raises(ValueError, match="job name"):
        cleanup.make_page_dir(job, "node0")


def test_two_nodes_of_one_job_share_a_machine_without_removing_each_other(places: Path) -> None:
    first, second = (cleanup.make_page_dir("job-1", name) for name in ("a", "b"))
    with pytest.raises(ValueError, match="has an agent for a on this machine already"):
        cleanup.make_page_dir("job-1", "a")
    cleanup.remove(first)
    assert second.exists()
    cleanup.remove(second)
    assert list(places.iterdir()) == []


def test_an_oom_kill_is_told_by_the_cgroups_counter(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 2\n")
    watch = OomWatch([counter, tmp_path / "missing"])
    assert not watch.grew()
    counter.write_text("low 0\noom 4\noom_kill 3\n")
    assert watch.grew()
    assert not watch.grew()

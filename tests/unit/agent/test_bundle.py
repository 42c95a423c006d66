"""An archive of evidence: bounded, whole names only, nothing executed or written outside when it is read."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from keepstep.agent import bundle


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = bundle.node_folder(tmp_path, 3, "node-a")
    (folder / "worker-1").mkdir(parents=True)
    (folder / "worker-1" / "stacks.txt").write_text("stacks")
    (folder / "node.json").write_text(json.dumps({"folders": {"1": ["evidence/worker-1-1", "../../etc"]}}))
    (tmp_path / "evidence" / "worker-1-1").mkdir()
    (tmp_path / "evidence" / "worker-1-1" / "summary.json").write_text("{}")
    (tmp_path / "token").write_text("the token")
    (folder / "link").symlink_to(tmp_path / "token")
    return tmp_path


def test_a_nodes_part_holds_its_files_and_the_dead_workers_folder_and_no_link(run_dir: Path) -> None:
    files = {name: data for name, data, _ in bundle.unpack_node(bundle.pack_node(run_dir, 3, "node-a"))}
    assert set(files) == {"node.json", "worker-1/stacks.txt", "worker-1-1/summary.json"}
    assert files["worker-1/stacks.txt"] == b"stacks"


def test_what_a_node_does_not_have_is_said(run_dir: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no evidence about incident 9"):
        bundle.pack_node(run_dir, 9, "node-a")


def test_sizes_are_bounded_and_what_is_left_out_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(bundle, "MAX_NODE_BYTES", 250)
    folder = bundle.node_folder(run_dir, 3, "node-a")
    for number in range(5):
        (folder / f"{number}.txt").write_bytes(bytes([65 + number]) * 1000)
    files = {name: data for name, data, _ in bundle.unpack_node(bundle.pack_node(run_dir, 3, "node-a"))}
    assert sum(map(len, files.values())) < 250 + 500 and all(
        len(data) <= 100 for name, data in files.items() if name != "LEFT_OUT.txt"
    )
    assert "4.txt" in files["LEFT_OUT.txt"].decode()


def test_a_hostile_archive_is_read_without_harm() -> None:
    hostile = io.BytesIO()
    with tarfile.open(fileobj=hostile, mode="w:gz") as tar:
        for name in ("../escape", "/etc/passwd", "a/../../b", "good.txt", ".hidden"):
            entry = tarfile.TarInfo(name)
            entry.size = 2
            tar.addfile(entry, io.BytesIO(b"ab"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert [name for name, _, _ in bundle.unpack_node(hostile.getvalue())] == ["good.txt"]


def test_a_bundle_begins_with_its_summary(tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    left = bundle.write_bundle(out, "incident-3", "what happened\n", {"number": 3}, [("a/x.txt", b"x", 5.0)])
    assert left == []
    with tarfile.open(out) as tar:
        assert tar.getnames() == ["incident-3/README.txt", "incident-3/incident.json", "incident-3/a/x.txt"]

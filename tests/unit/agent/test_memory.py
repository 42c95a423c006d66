"""What a dead agent has left is found by its own node, run and token only, and only when it is dead."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from keepstep.agent import cleanup, memory
from keepstep.agent.announcements import Announcements
from keepstep.errors import UsageError
from keepstep.wire.messages import JobSpec

RUN_DIR = Path("/runs/1")
WORKER = {"number": 3, "slot": 1, "pid": 77, "started": 5, "alive": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page folder of an agent that has written its state."""
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", tmp_path)
    folder = cleanup.make_page_dir("job-1", "node[0]")
    described = {"workers": [WORKER], "announcements": Announcements().to_state(), "peer": ""}
    memory.Memory(
        folder,
        node="node[0]",
        run_dir=RUN_DIR,
        token="secret",
        spec=JobSpec(job="job-1", script="s.py", args=("1",), world_size=2),
        socket=Path("/tmp/keepstep-x/agent.sock"),
        describe=lambda: described,
    ).now()
    return folder


def test_the_successor_finds_what_was_kept_and_nobody_else_does(folder: Path) -> None:
    found = memory.recall("node[0]", RUN_DIR, "secret")
    assert found is not None and found.page_dir == folder and found.socket.name == "agent.sock"
    assert found.spec.args == ("1",) and found.workers[0].number == 3
    os.close(found.lock)
    assert memory.recall("node0", RUN_DIR, "secret") is None
    assert memory.recall("node[0]", Path("/runs/2"), "secret") is None
    assert memory.recall("node[0]", RUN_DIR, "another") is None


def test_the_state_is_private_and_holds_no_token(folder: Path) -> None:
    file = folder / memory.STATE_FILE
    assert file.stat().st_mode & 0o777 == 0o600 and "secret" not in file.read_text()


def test_a_living_agent_is_named_and_left_alone(folder: Path) -> None:
    held = memory.lock(folder)
    assert held is not None
    with pytest.raises(UsageError, match=rf"is running already \(process {os.getpid()}\)"):
        memory.recall("node[0]", RUN_DIR, "secret")
    os.close(held)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "node": "node[0]"}'])
def test_a_file_that_is_none_of_ours_is_passed_over(folder: Path, text: str) -> None:
    (folder / memory.STATE_FILE).write_text(text)
    assert memory.recall("node[0]", RUN_DIR, "secret") is None


@pytest.mark.parametrize("field", ["spec", "workers", "announcements", "socket"])
def test_a_damaged_state_is_not_believed(folder: Path, field: str) -> None:
    file = folder / memory.STATE_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), field: [{"no": "thing"}]}))
    assert memory.recall("node[0]", RUN_DIR, "secret") is None
    held = memory.lock(folder)  # and nothing holds the lock
    assert held is not None
    os.close(held)

"""An agent's settings are checked when built; a worker's environment is whole and nobody else's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.config import AgentConfig
from keepstep.agent.environment import Place, command_line, worker_environment
from keepstep.errors import UsageError
from keepstep.wire.messages import JobSpec

GOOD: dict[str, Any] = {
    "controller_url": "ws://127.0.0.1:1234/agent",
    "token": "t",
    "node": "n",
    "slots": 2,
    "run_dir": Path("runs"),
}
PLACE = Place(
    worker=7,
    node="n",
    slot=3,
    slots=4,
    socket=Path("s"),
    page=Path("p"),
    stacks=Path("k"),
    run_dir=Path("r"),
)


def spec(**changed: Any) -> JobSpec:
    return JobSpec(**({"job": "j", "script": "train.py", "args": ("--lr", "1"), "world_size": 3} | changed))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("controller_url", "http://h:1", "must look like ws://"),
        ("controller_url", "ws:///agent", "must look like ws://"),
        ("token", "", "token"),
        ("node", "a/b", "slashes"),
        ("node", "", "node name"),
        ("slots", 0, "at least one slot"),
        ("advertise", "", "advertised address"),
        ("record_bytes", 0, "record size"),
        ("record_bytes", 1 << 30, "record size"),
        ("orphan_timeout_s", -1.0, "orphan_timeout_s must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_one_line(name: str, value: Any, message: str) -> None:
    AgentConfig(**GOOD)
    with pytest.raises(UsageError, match=message) as caught:
        AgentConfig(**(GOOD | {name: value}))
    assert "\n" not in str(caught.value)


def test_a_worker_is_started_as_its_launch_says() -> None:
    assert command_line(spec()) == [sys.executable, "-u", "train.py", "--lr", "1"]
    assert command_line(spec(launch="module")) == [sys.executable, "-u", "-m", "train.py", "--lr", "1"]
    assert command_line(spec(launch="program")) == ["train.py", "--lr", "1"]


def test_no_rank_of_an_outer_launcher_reaches_a_worker() -> None:
    outer = {"RANK": "5", "LOCAL_RANK": "9", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h"}
    env = worker_environment(spec(), PLACE, "secret", outer)
    assert "RANK" not in env and "MASTER_PORT" not in env and "TORCHELASTIC_RUN_ID" not in env
    assert env["HOME"] == "/h" and env["LOCAL_RANK"] == "3" and env["WORLD_SIZE"] == "3"
    assert env["KEEPSTEP_TOKEN"] == "secret" and env["KEEPSTEP_WORKER"] == "7" and env["KEEPSTEP_JOB"] == "j"


def test_the_users_own_variables_win_over_the_environment_but_not_over_the_place() -> None:
    wanted = {"OMP_NUM_THREADS": "4", "KEEPSTEP_WORKER": "99", "KEEPSTEP_FAULTS": "[]"}
    env = worker_environment(spec(env=wanted), PLACE, "t", {"OMP_NUM_THREADS": "2"})
    assert env["OMP_NUM_THREADS"] == "4" and env["KEEPSTEP_WORKER"] == "7" and env["KEEPSTEP_FAULTS"] == "[]"
    assert worker_environment(spec(), PLACE, "t", {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert worker_environment(spec(), PLACE, "t", {})["OMP_NUM_THREADS"] == "1"

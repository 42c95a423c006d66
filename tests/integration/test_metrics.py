"""A real Prometheus scrapes the controller and the agent of a real job, and its own tools accept what it reads."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.controller.rundir import RunDirectory
from keepstep.wire.tokens import read_token
from tests.integration.jobs import command, environment

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
DEADLINE_S = 90.0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="needs Prometheus (as root: apt-get install prometheus)",
    ),
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def get(url: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def until(found: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        try:
            if value := found():
                return value
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"waited {DEADLINE_S:.0f} s for {what}")


class Prometheus:
    """Debian's Prometheus on a folder of its own."""

    def __init__(self, folder: Path, targets: dict[str, tuple[int, Path]]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        jobs = [
            {
                "job_name": name,
                "static_configs": [{"targets": [f"127.0.0.1:{at}"]}],
                "authorization": {"credentials_file": str(token)},
            }
            for name, (at, token) in targets.items()
        ]
        settings = {"global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"}, "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        assert PROMETHEUS is not None
        line = [
            *(PROMETHEUS, "--config.file", str(folder / "prometheus.yml")),
            *("--storage.tsdb.path", str(folder / "tsdb"), "--web.listen-address", f"127.0.0.1:{port}"),
        ]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)

    def query(self, expression: str) -> dict[str, float]:
        """Value by the rank (or else by the instance's job) of each series."""
        answer = json.loads(get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        assert answer["status"] == "success", answer
        return {
            one["metric"].get("rank", one["metric"].get("job", "")): float(one["value"][1])
            for one in answer["data"]["result"]
        }


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in reversed(running):
        process.terminate()
        process.wait(30)


def test_prometheus_reads_controller_and_agent(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, controller_port, agent_port = tmp_path / "run", free_port(), free_port()
    options = ["--controller-port", str(controller_port), "--metrics-port", str(agent_port)]
    script = ["--until", "100000", "--no-loader", "--symmetric"]
    with (tmp_path / "console.txt").open("wb") as console:
        job = subprocess.Popen(
            command(run_dir, script, ranks=2, spares=1, options=options),
            env=environment(KEEPSTEP_FAULTS=json.dumps(["rank=1,step=20,at=backward"])),
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started.append(job)
    token_file = run_dir / "token.read"
    until(token_file.exists, "the job's address")
    prometheus = Prometheus(
        tmp_path, {"controller": (controller_port, token_file), "agent": (agent_port, token_file)}
    )
    started.append(prometheus.process)

    def value(expression: str) -> Callable[[], dict[str, float]]:
        return lambda: prometheus.query(expression)

    until(value('keepstep_incidents_total{cause="death",resolution="rebuilt"} == 1'), "the incident")
    assert prometheus.query("keepstep_protection == 1") == {"controller": 1.0}
    assert prometheus.query("keepstep_generation") == {"controller": 1.0}
    assert prometheus.query("keepstep_steps_lost_total") == {"controller": 0.0}
    assert 0 < prometheus.query("keepstep_stall_seconds_total")["controller"] < DEADLINE_S
    until(value('keepstep_spares{readiness="hot"} == 1'), "a new hot spare")
    ranks = until(value('rate(keepstep_worker_gate_seconds_count{rank!=""}[5s]) > 0'), "gates of both ranks")
    assert set(ranks) <= {"0", "1"}
    step_s = until(
        value(
            'rate(keepstep_worker_step_seconds_sum{rank="0"}[5s]) / '
            'rate(keepstep_worker_step_seconds_count{rank="0"}[5s])'
        ),
        "a step's time",
    )["0"]
    gate_s = prometheus.query(
        'keepstep_worker_gate_seconds_sum{rank="0"} / keepstep_worker_gate_seconds_count{rank="0"}'
    )["0"]
    assert 0 < gate_s < step_s
    assert prometheus.query('keepstep_worker_record_bytes{rank="0"}')["0"] > 1000
    until(value("rate(keepstep_steps_committed_total[5s]) > 0"), "steps a second")
    assert prometheus.query("min(up)") == {"": 1.0}

    run = RunDirectory(run_dir).address()
    assert run is not None
    for port in (controller_port, agent_port):
        url = f"http://127.0.0.1:{port}/metrics"
        for wrong in ("", "no-token-of-this-job"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(url, wrong)
            assert refused.value.code == 401
            refused.value.close()
        assert PROMTOOL is not None
        for token in (run.token, read_token(run.token)):
            checked = subprocess.run(
                [PROMTOOL, "check", "metrics"],
                input=get(url, token).encode(),
                capture_output=True,
                check=False,
            )
            assert checked.returncode == 0, checked.stdout + checked.stderr

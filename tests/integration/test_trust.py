"""Tokens and certificates with the real commands: each stranger gets one clear line, and a whole job runs over TLS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from keepstep.cli.cluster import Cluster
from keepstep.wire.tls import TlsFiles
from tests.certificates import Authority
from tests.integration.jobs import DDP, HOT, reference
from tests.integration.nodes import assert_ended_well, cluster, permit

FAKE = Path(__file__).with_name("fake_worker.py")
TRAINED = (*DDP, *HOT, "--step-s", "0.02")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "own")


@pytest.fixture(scope="module")
def waiting(own: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A controller with TLS that waits for its nodes."""
    folder = tmp_path_factory.mktemp("waiting")
    environment = own.issue("controller", ["127.0.0.1"]).environment()
    with Cluster(folder, [str(FAKE), "--steps", "1"], environment=environment) as found:
        yield found


def agent(folder: Path, url: str, token_file: Path, tls: TlsFiles | None) -> tuple[int, str]:
    """Exit code and the one line of an agent that is turned away."""
    files = () if tls is None else ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keepstep", "agent", "--join", url, "--node", "stranger"),
            *("--join-timeout", "3", "--token-file", str(token_file), *files),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = (done.stdout + done.stderr).splitlines()
    lines = [line for line in said if "waiting for the controller" not in line and "joins job" not in line]
    assert len(lines) == 1 and "Traceback" not in lines[0], done
    return done.returncode, lines[0]


def test_every_stranger_gets_one_clear_line(waiting: Cluster, own: Authority, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "foreign", "somebody else")
    good, token, url = own.issue("agent"), waiting.token_file, waiting.url
    assert url.startswith("https://127.0.0.1:")
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("not-the-token-of-this-job")

    code, line = agent(tmp_path, url, wrong, good)
    assert code == 2 and "does not know this token" in line
    code, line = agent(tmp_path, url, token, foreign.issue("agent"))
    assert code == 2 and "is not signed by the authority in --tls-ca" in line
    mixed = TlsFiles(cert=foreign.issue("mixed").cert, key=str(foreign.folder / "mixed.key"), ca=good.ca)
    code, line = agent(tmp_path, url, token, mixed)
    assert code == 2 and "mixed.pem is not signed by the authority in --tls-ca" in line
    code, line = agent(tmp_path, url, token, own.issue("late", expired=True))
    assert code == 2 and "late.pem has expired" in line
    code, line = agent(tmp_path, url.replace("127.0.0.1", "localhost"), token, good)
    assert code == 2 and "is for another host" in line
    code, line = agent(tmp_path, url, token, None)
    assert code == 2 and "give --tls-cert, --tls-key and --tls-ca too" in line
    code, line = agent(tmp_path, url.removeprefix("https://"), token, None)
    assert code == 1 and "it may want TLS" in line
    token.chmod(0o644)
    code, line = agent(tmp_path, url, token, good)
    assert code == 2 and "can be read by others" in line
    token.chmod(0o600)
    reader = waiting.run.read_token_file
    code, line = agent(tmp_path, url, reader, good)
    assert code == 1 and "may only read" in line


def test_a_whole_job_runs_over_tls_and_no_command_line_shows_the_token(
    references: Path, tmp_path: Path, own: Authority
) -> None:
    undisturbed = reference(references, TRAINED, 2)
    # One certificate for every node: nodes are told apart by address and token.
    environment = own.issue("everybody", ["127.0.0.1"]).environment()
    with cluster(tmp_path, TRAINED, ranks_per_node=1, spares=1, permitted=6, environment=environment) as job:
        job.wait_for_spares(["hot"])
        words = [word for process in psutil.process_iter() for word in _command_line(process)]
        assert str(job.token_file) in words and not any(job.token in word for word in words)
        (victim,) = job.nodes["node1"].workers().values()
        victim.kill()
        permit(tmp_path, 1000)
        assert_ended_well(job, undisturbed)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []

"""What a step pays for another node's word that it keeps the record: two agents, one rank each, on loopback.

The time is taken inside the rank, around sending the record and waiting at the gate for the acknowledgement:
all that the step gains over the same step with one node. On loopback there is no network's round trip in it,
but both agents, both ranks and the controller share the machine's cores, so it is mostly other processes' turns.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

JOB = Path(__file__).resolve().parent / "acknowledgement_job.py"
HOSTS = ("127.0.0.2", "127.0.0.3")
LEFT_OUT_STEPS = 20
LIMIT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Medians in seconds; `tail_s` is the 99th percentile."""

    ack_s: float
    tail_s: float
    step_s: float
    record_bytes: int
    steps: int


def measure(quick: bool) -> Acknowledgement:
    """Run the job. Raises RuntimeError, with the end of the output, when it fails."""
    steps = 200 if quick else 1500
    with tempfile.TemporaryDirectory(prefix="keepstep-ack-") as name:
        folder = Path(name)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        port = free_port()
        result = folder / "result.json"
        jobs = []
        try:
            for rank, host in enumerate(HOSTS):
                command = [
                    *(sys.executable, "-m", "keepstep", "run", "--nnodes", str(len(HOSTS))),
                    *("--nproc-per-node", "1", "--node-rank", str(rank), "--job", "ack"),
                    *("--rdzv-endpoint", f"127.0.0.1:{port}", "--advertise", host),
                    *("--token-file", str(token), "--log-dir", str(folder / f"run-{rank}")),
                    *(str(JOB), "--steps", str(steps), "--result", str(result)),
                ]
                with (folder / f"{rank}.txt").open("wb") as log:
                    jobs.append(
                        subprocess.Popen(
                            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                        )
                    )
            for rank, job in enumerate(jobs):
                if job.wait(LIMIT_S) != 0:
                    output = (folder / f"{rank}.txt").read_text(errors="replace").splitlines()[-15:]
                    raise RuntimeError(
                        f"node {rank} of the job ended with {job.returncode}:\n" + "\n".join(output)
                    )
        finally:
            for job in jobs:
                if job.poll() is None:
                    job.terminate()
                    job.wait(60)
        found = json.loads(result.read_text())
    spent = sorted(found["spent_s"][LEFT_OUT_STEPS:])
    return Acknowledgement(
        ack_s=median(spent),
        tail_s=spent[int(0.99 * len(spent))],
        step_s=median(found["steps_s"][LEFT_OUT_STEPS:]),
        record_bytes=found["record_bytes"],
        steps=len(spent),
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(measure("--quick" in sys.argv))

"""PyTorch looked at from outside: a process of its own tries the pieces that protection leans on.

The command line never loads PyTorch; the answer comes as JSON from `keepstep.trainer.torch_pieces`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from keepstep.cli.doctor_checks import Check

MODULE = "keepstep.trainer.torch_pieces"


class TorchLook:
    """Started at once, asked at the end: importing PyTorch takes seconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def checks(self, until_s: float) -> Iterator[Check]:
        """What it found, by the monotonic time `until_s`."""
        began_s = time.monotonic()
        try:
            out, err = self._process.communicate(timeout=max(0.1, until_s - began_s))
        except subprocess.TimeoutExpired:
            self.close()
            cure = f"the machine is busy, or its disk slow; alone: {sys.executable} -m {MODULE}"
            yield Check("torch", "warning", "PyTorch did not answer in time", cure)
            return
        try:
            answer: dict[str, Any] = json.loads(out.splitlines()[-1])
        except (ValueError, IndexError):
            last = (err.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
            yield Check("torch", "failed", f"cannot be used: {last[:300]}", "pip install 'torch>=2.13,<2.14'")
            return
        yield from _judge(answer)

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _judge(answer: dict[str, Any]) -> Iterator[Check]:
    cuda = f", CUDA {answer['cuda']}" if answer["cuda"] else ", without CUDA"
    found = f"PyTorch {answer['torch']}{cuda}"
    known = str(answer["torch"]).startswith(f"{answer['supported']}.")
    cure = f"pip install 'torch=={answer['supported']}.*': other versions are not tested with this Keepstep"
    yield Check("torch", "ok" if known else "warning", found, cure)
    if not answer["gloo"]:
        yield Check("gloo", "failed", "this PyTorch has no gloo", "install a PyTorch with gloo")
    missing = answer["missing"]
    count = len(answer["pieces"])
    if not missing:
        yield Check("torch's own pieces", "ok", f"all {count} that protection leans on are there and work")
    for piece in missing:
        what = f"{piece['name']} {piece['detail']} (for {piece['purpose']})"
        cure = f"jobs train unprotected with this PyTorch: install torch=={answer['supported']}.*"
        yield Check("torch's own pieces", "failed", what, cure)

"""Whether this process could play a rank: its device multiplies two known matrices, and memory is left.

Done before a worker parks, and again when the controller asks. A device that hangs is no reason to hang: the
work happens on a thread of its own, and a promotion waits for none of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from keepstep.core.events import SpareChecked
from keepstep.core.faults import CheckFault

if TYPE_CHECKING:
    from keepstep.trainer.session import Session

SIDE = 256
# Of the products' entries, weighted by their place modulo 97; whole numbers, exact in float32 (and in TF32).
KNOWN_SUM = 110_938
REPETITIONS = 3
FIRST_DEADLINE_S = 60.0
UNFIT_WAIT_S = 60.0
EXIT_UNFIT = 80


@dataclass(frozen=True, slots=True)
class Finding:
    """`trouble` is empty when all was well. `free_bytes`: memory that could still be taken; 0: unknown."""

    trouble: str
    free_bytes: int
    seconds: float


def look(device: torch.device) -> Finding:
    """Compute what is known, and see what memory is left. Never raises."""
    started_s = time.monotonic()
    try:
        trouble = _multiply(device)
        free_bytes = _free_bytes(device)
    except Exception as error:  # whatever a broken device raises is the finding
        first = (str(error).splitlines() or [""])[0]
        trouble, free_bytes = f"{type(error).__name__}: {first[:300]}", 0
    return Finding(trouble, free_bytes, time.monotonic() - started_s)


def _multiply(device: torch.device) -> str:
    numbers = torch.arange(SIDE * SIDE)
    left = ((numbers * 7 + 3) % 11 - 5).reshape(SIDE, SIDE).to(device, torch.float32)
    right = ((numbers * 5 + 1) % 13 - 6).reshape(SIDE, SIDE).to(device, torch.float32)
    weights = (numbers % 97).reshape(SIDE, SIDE)
    with torch.no_grad():
        for _ in range(REPETITIONS):
            found = int(((left @ right).cpu().long() * weights).sum())
            if found != KNOWN_SUM:
                return f"{device} computes wrongly: a product whose sum is {KNOWN_SUM} came out as {found}"
    return ""


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


class SpareCheck:
    """The checks of one worker, counted. `faults`: those that a test ordered."""

    def __init__(self, session: Session, faults: Sequence[CheckFault] = ()) -> None:
        self._session = session
        self._faults = faults
        self._count = 0

    def before_parking(self) -> None:
        """Report what is found. Returns only when it was good: an unfit worker waits here for its end."""
        told = threading.Event()
        fit: list[bool] = []

        def work() -> None:
            fit.append(self._look_and_tell())
            told.set()

        threading.Thread(target=work, name="keepstep-check", daemon=True).start()
        if not told.wait(FIRST_DEADLINE_S):
            self._tell(Finding(f"its device gave no result in {FIRST_DEADLINE_S:.0f} s", 0, FIRST_DEADLINE_S))
        if fit != [True]:
            threading.Event().wait(UNFIT_WAIT_S)
            self._session.leave("its check failed", status=EXIT_UNFIT)

    def again(self) -> None:
        """Asked by the controller, on the listening thread: answered by a thread, whatever the others do."""
        threading.Thread(target=self._look_and_tell, name="keepstep-check", daemon=True).start()

    def _look_and_tell(self) -> bool:
        finding = look(self._device())
        self._count += 1
        session = self._session
        for fault in self._faults:
            if fault.strikes(session.worker, session.identity.slot, self._count):
                finding = Finding(f"a fault was ordered: {fault}", finding.free_bytes, finding.seconds)
        self._tell(finding)
        return not finding.trouble

    def _tell(self, finding: Finding) -> None:
        session = self._session
        if finding.trouble:
            session.say(f"cannot play a rank: {finding.trouble}")
        session.link.send(
            SpareChecked(
                worker=session.worker,
                ok=not finding.trouble,
                detail=finding.trouble,
                free_bytes=finding.free_bytes,
                seconds=finding.seconds,
            )
        )

    def _device(self) -> torch.device:
        if self._session.device_type == "cuda":
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")

"""Carries out ordered faults inside the worker, at exact places of a step (tests, `keepstep prove`).

The vocabulary is `keepstep.core.faults`; KEEPSTEP_FAULTS holds a JSON list of them. Each fault
happens once in a job: a marker in the run directory tells the replacement.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from keepstep.core.faults import (
    CheckFault,
    Fault,
    fault_from_mapping,
    is_check_fault,
    parse_check_fault,
    parse_fault,
)

if TYPE_CHECKING:
    from keepstep.trainer.session import Session

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
BACKWARDS_BEFORE_FAULT = 2


def read_faults(text: str) -> list[Fault]:
    """Parse KEEPSTEP_FAULTS: a JSON list of mappings or of texts such as "rank=2,step=7"."""
    return [
        parse_fault(entry) if isinstance(entry, str) else fault_from_mapping(entry)
        for entry in json.loads(text or "[]")
        if not (isinstance(entry, str) and is_check_fault(entry))
    ]


def read_check_faults(text: str) -> list[CheckFault]:
    """Those of KEEPSTEP_FAULTS that make a spare's check fail."""
    entries = json.loads(text or "[]")
    return [parse_check_fault(e) for e in entries if isinstance(e, str) and is_check_fault(e)]


class Faults:
    """The faults ordered for this job, and the places where they strike."""

    def __init__(self, faults: list[Fault], marks: Path, session: Session) -> None:
        self._faults = list(enumerate(faults))
        self._marks = marks
        self._session = session
        self._random = random.Random(os.environ.get("KEEPSTEP_FAULT_SEED", str(os.getpid())))
        self._step_s = 0.01
        self._hooks: list[RemovableHandle] = []

    @classmethod
    def from_environment(cls, session: Session) -> Faults:
        """No KEEPSTEP_FAULTS: no faults, and no cost."""
        faults = read_faults(os.environ.get("KEEPSTEP_FAULTS", ""))
        return cls(faults, Path(session.identity.run_dir) / "faults", session)

    def at(self, place: str) -> None:
        """Strike when a fault is ordered for this rank, this step and this place."""
        if self._faults:
            for number, fault in self._due(at_target=place.startswith("transfer")):
                if fault.at == place:
                    self._strike(number, fault)

    def begin_block(self) -> None:
        """Arm the faults that strike in the middle of forward or backward, or at a random moment."""
        for number, fault in self._due() if self._faults else ():
            if fault.at == "random" and self._claim(number):
                self._in_a_moment(fault, self._random.uniform(0.0, self._step_s))
            elif fault.at == "forward":
                self._on_forward(functools.partial(self._strike, number, fault))
            elif fault.at == "backward":
                self._in_backward(number, fault)

    def begin_update(self) -> None:
        """Arm the faults that strike while the optimizer works."""
        for number, fault in self._due() if self._faults else ():
            if fault.at == "update" and self._claim(number):
                self._in_a_moment(fault, self._random.uniform(0.0, 0.002))

    def note_step_time(self, seconds: float) -> None:
        """How long a step takes: a random fault strikes within it (a recovery is no step's time)."""
        self._step_s = min(seconds, 2 * self._step_s)

    def _due(self, *, at_target: bool = False) -> list[tuple[int, Fault]]:
        """The faults for this rank and step; `at_target`: the step is the verdict's, not yet one's own."""
        session = self._session
        if not session.live:
            return []
        rank, step = session.rank, session.machine.step_count
        verdict = session.machine.verdict
        if at_target and verdict is not None and verdict.target is not None:
            step = verdict.target
        return [(n, f) for n, f in self._faults if f.rank == rank and f.step == step]

    def _claim(self, number: int) -> bool:
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            with open(self._marks / f"{number}.done", "x", encoding="ascii") as mark:
                mark.write(f"{time.time():.6f} worker {self._session.worker}\n")
        except FileExistsError:
            return False
        return True

    def _strike(self, number: int, fault: Fault, *_: object) -> None:
        if self._claim(number):
            os.kill(os.getpid(), SIGNALS[fault.kind])

    def _in_a_moment(self, fault: Fault, delay_s: float) -> None:
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), SIGNALS[fault.kind]))
        timer.daemon = True
        timer.start()

    def _in_backward(self, number: int, fault: Fault) -> None:
        """Strike when the gradient of the second tensor arrives. Hooks on tensors leave the graph alone."""
        seen = 0

        def arrived(_: torch.Tensor) -> None:
            nonlocal seen
            seen += 1
            if seen == BACKWARDS_BEFORE_FAULT:
                self._strike(number, fault)

        def watch(output: object) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(arrived)

        self._on_forward(watch)

    def _on_forward(self, work: Callable[[object], None]) -> None:
        """Call `work` with each module's output until the block ends."""
        self._hooks.append(register_module_forward_hook(lambda module, inputs, output: work(output)))

    def end_block(self) -> None:
        """Take the hooks away again."""
        while self._hooks:
            self._hooks.pop().remove()

"""How a worker's process ends: whose fault it was, told to the agent before the process is gone."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from keepstep.core.events import ScriptFailed, UsageRefused, WorkerFinished
from keepstep.core.observing import UNWOUND_EXIT_CODE
from keepstep.errors import UsageError
from keepstep.trainer import blame
from keepstep.trainer.elastic import Place
from keepstep.trainer.exit_status import leave_status
from keepstep.trainer.session import Released

if TYPE_CHECKING:
    from keepstep.trainer.session import Session

EXIT_USAGE = 2
EXIT_REHEARSAL = 77
EXIT_UNWOUND = UNWOUND_EXIT_CODE
EXIT_HARDWARE = 79

PACKAGE = str(Path(__file__).resolve().parent.parent)


def own_line(trace: TracebackType | None) -> str:
    """Where in the user's script an exception came from, as file:line."""
    frames = [
        f
        for f in traceback.extract_tb(trace)
        if not f.filename.startswith(PACKAGE) and "torch" not in f.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


def _register_stacks() -> TextIO | None:
    """Let the agent ask for the Python stacks of all threads, as evidence before it ends a suspect."""
    path = os.environ.get("KEEPSTEP_STACKS")
    if not path:
        return None
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file


class Ends:
    """Installed once per session: an exception hook and an exit hook."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._failed = False
        self._older_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)
        self._stacks = _register_stacks()
        leave_status(session.identity.page_path)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # torch's own hook, which calls this one, holds stderr back; a process that ends here must not lose it.
        with contextlib.redirect_stderr(sys.__stderr__):
            self._tell(kind, error, trace)

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failed = True
        session = self._session
        if isinstance(error, Released):
            self._failed = False
            return
        if isinstance(error, UsageError):
            self._refused(error, trace)
            return
        self._older_hook(kind, error, trace)
        sys.stderr.flush()
        sys.stdout.flush()
        if session.rehearsing or session.rank is None:
            # A spare that fails alone is replaced; the training goes on without it.
            session.leave("the rehearsal failed", status=EXIT_REHEARSAL)
        if session.groups.failed:
            session.leave(f"a collective failed ({session.groups.failed})", status=EXIT_UNWOUND)
        if session.groups.poisoned:
            session.leave("user code outside a step choked on a poisoned step", status=EXIT_UNWOUND)
        hardware = blame.is_hardware(error)
        session.link.deliver(
            ScriptFailed(
                worker=session.worker,
                summary=f"{kind.__name__}: {error}"[:1000],
                traceback="".join(traceback.format_exception(kind, error, trace))[-60_000:],
                hardware=hardware,
            )
        )
        if hardware:
            session.end_now(EXIT_HARDWARE)

    def _refused(self, error: UsageError, trace: TracebackType | None) -> None:
        text = f"{own_line(trace)}: {error}"
        sys.stderr.write(f"keepstep: refused: {text}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        self._session.link.deliver(UsageRefused(worker=self._session.worker, message=text))
        self._session.end_now(EXIT_USAGE)

    def exited_by_script(self, status: object) -> None:
        """The script called sys.exit(status) in a healthy step: its own decision."""
        if status in (None, 0):
            return
        self._failed = True
        self._session.link.deliver(
            ScriptFailed(worker=self._session.worker, summary=f"SystemExit: {status}", traceback="")
        )

    def _on_exit(self) -> None:
        session = self._session
        if not self._failed and session.live and session.groups.place is Place.SETUP:
            message = "the script ended without reaching run.steps(): there is nothing to protect"
            session.link.deliver(UsageRefused(worker=session.worker, message=message))
        if not self._failed and session.closed_gates:
            session.page.finished_step = session.final_step
            session.link.send(
                WorkerFinished(
                    worker=session.worker, step=session.final_step, generation=session.generation_number
                )
            )
        # gloo's threads must not outlive the interpreter's teardown.
        with session.lock:
            fabric = session.fabric
        if fabric is not None:
            fabric.cut()
        session.groups.drain()
        session.groups.detach()

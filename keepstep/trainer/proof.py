"""Digests of a rank's state, at its end and (when asked) after every step, for whoever compares runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from keepstep.trainer.adapters import fingerprint
from keepstep.trainer.reports import Reports

if TYPE_CHECKING:
    from keepstep.trainer.session import Session


class Proof:
    """Writes digests beside the reports, when KEEPSTEP_FINGERPRINT asks for them (1, or "steps")."""

    def __init__(self, session: Session, reports: Reports) -> None:
        self._session = session
        self._reports = reports
        self._mode = os.environ.get("KEEPSTEP_FINGERPRINT", "")

    def after_commit(self) -> None:
        """The digest of every tensor after each commit, in mode "steps"."""
        if self._mode == "steps":
            tensors = fingerprint.digests(self._session.protected.tensors())
            self._write(
                {"fingerprint": True, "step": self._session.machine.step_count - 1, "tensors": tensors}
            )

    def at_end(self, step: int) -> None:
        """The digest of the final state, after `step` steps."""
        if not self._mode:
            return
        tensors = fingerprint.digests(self._session.protected.tensors())
        digest = fingerprint.combined(tensors)
        self._write({"final": True, "step": step, "digest": digest, "tensors": tensors})

    def _write(self, line: dict[str, object]) -> None:
        rank = self._session.rank
        assert rank is not None
        self._reports.write(rank, line)

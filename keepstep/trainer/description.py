"""What this rank holds, told to the controller once: after two updates, when optimizer state exists.

In a dry run (`keepstep replicas --ranks N script.py`) the rank then stands still until it is ended: no line
of the script behind its second step is carried out.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from keepstep.core.events import FingerprintTaken, StateDescribed
from keepstep.trainer.adapters import shard
from keepstep.trainer.adapters.fingerprint import combined
from keepstep.trainer.adapters.manifest import VALUES, Manifest
from keepstep.trainer.record import Recorder
from keepstep.wire.page import Phase

if TYPE_CHECKING:
    from keepstep.trainer.session import Session

FINGERPRINT_STEP = 2
DRY_RUN_WAIT_S = 600.0


def describe_state(session: Session, recorder: Recorder) -> None:
    """Send the manifest, and at FINGERPRINT_STEP the digests: whoever comes later has nobody to compare with."""
    assert session.rank is not None
    protected, step = session.protected, session.machine.step_count
    manifest = Manifest(protected, recorder.recorded_buffers, recorder.written_bytes)
    if step == FINGERPRINT_STEP:
        parts = manifest.digests()
        session.link.send(
            FingerprintTaken(
                worker=session.worker,
                rank=session.rank,
                step=step,
                shard=session.machine.shard,
                digest=combined({part: digest for part, digest in parts.items() if part != VALUES}),
                parts=parts,
            )
        )
    session.link.send(
        StateDescribed(
            worker=session.worker,
            rank=session.rank,
            step=step,
            shard=session.machine.shard,
            place=shard.describe(protected.parameters()),
            parts=manifest.parts(),
        )
    )
    if os.environ.get("KEEPSTEP_DRY_RUN") == "1":
        session.page.enter(Phase.WAITING)
        threading.Event().wait(DRY_RUN_WAIT_S)
        session.leave("the dry run is over", status=0)

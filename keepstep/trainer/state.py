"""A rank's state on its way: offered by its twins at a step's boundary, received by a replacement.

Between the boundary and the next update parameters and optimizer state stand still, so a source
serves from another thread while it computes. What only the dead rank knew comes from its record.
"""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Any

import torch

from keepstep.core.worker_events import CopyCompleted, CopyStarted, ReceiveState, ServeState
from keepstep.errors import ProtectionError
from keepstep.trainer import rng, values
from keepstep.trainer.offers import manifest_of
from keepstep.trainer.recovery import Copied
from keepstep.transfer import Manifest, Received, StateServer, fetch_manifest, receive
from keepstep.transfer.staging import Landing
from keepstep.wire.tls import TlsFiles

if TYPE_CHECKING:
    from keepstep.trainer.loop import Loop
    from keepstep.trainer.session import Session

OFFER_TIMEOUT_S = 120.0
COPY_TIMEOUT_S = 3600.0


class StateExchange:
    """Serves and receives state for one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._server: StateServer | None = None
        self._offered: str | None = None
        self._tls = TlsFiles.from_environment()

    def offer(self, action: ServeState, cursor: dict[str, Any] | None, closed_gates: int) -> None:
        """Let the named targets copy this worker's state, from now until the next update."""
        session = self._session
        lineage = action.verdict.lineage
        if lineage is None or session.store is None:
            raise ProtectionError("asked to serve state without a target")
        if self._server is None:
            tls = None if self._tls is None else self._tls.server()
            self._server = StateServer(session.link.welcome.advertise, session.identity.token, tls=tls)
        manifest, buffers = manifest_of(session, cursor, closed_gates, lineage=lineage.digest)
        key = f"{session.generation_number}/{lineage.digest}"
        self.withdraw()
        self._server.offer(key, manifest, buffers)
        self._offered = key
        session.store.set(f"serve/{session.worker}", self._server.address)
        session.faults.at("transfer_source")

    def withdraw(self) -> None:
        """The update is about to change everything: serve no longer."""
        if self._offered is not None and self._server is not None:
            self._server.withdraw(self._offered)
            self._offered = None

    def await_copies(self, targets: tuple[int, ...]) -> None:
        """Wait until the targets hold their state (or something newer happens): for a source that ends."""
        session = self._session
        try:
            for target in targets:
                assert session.store is not None
                session.store.get_within(f"copied/{target}", OFFER_TIMEOUT_S)
        except (ProtectionError, TimeoutError) as error:
            session.say(f"worker {target} did not say that its copy is complete: {error}")

    def receive(self, action: ReceiveState, loop: Loop) -> Copied:
        """Take the state of the verdict's target. Raises what transfer and store raise."""
        session = self._session
        lineage, store = action.verdict.lineage, session.store
        if lineage is None or store is None:
            raise ProtectionError("asked to receive state without a target")
        started_s = time.monotonic()
        key = f"{session.generation_number}/{lineage.digest}"
        token = session.identity.token
        addresses = {
            worker: store.get_within(f"serve/{worker}", OFFER_TIMEOUT_S).decode() for worker in action.sources
        }
        if not addresses:
            raise ProtectionError("the verdict names no source")
        first = next(iter(addresses.values()))
        tls = None if self._tls is None else self._tls.client()
        manifest = fetch_manifest(first, token, key, OFFER_TIMEOUT_S, tls=tls)
        session.tell(CopyStarted())
        session.faults.at("transfer_target")
        result = copy_in_place(session, list(addresses.values()), key, manifest, tls)
        bit_exact = self._become(manifest, lineage.digest, loop)
        session.tell(CopyCompleted())
        store.set(f"copied/{session.worker}", b"1")
        return Copied(result.bytes, time.monotonic() - started_s, tuple(addresses), bit_exact)

    def _become(self, manifest: Manifest, lineage: str, loop: Loop) -> bool:
        """Values and record: after this the worker is the rank. False without a fitting record."""
        session = self._session
        shared = values.from_bytes(manifest.values)
        session.protected.load_values(shared["values"])
        rank = session.rank
        assert rank is not None
        answer = session.link.fetch("record", rank, lineage=lineage)
        if answer.data is None:
            session.say(f"no record of rank {rank} for step {manifest.step}: {answer.detail}")
            loop.stand_at(shared["cursor"], shared["closed"], own=False)
            rng.restore(shared["rng"])
            return False
        record = loop.recorder.load(answer.data)
        loop.stand_at(record["cursor"], record["closed"], own=True)
        rng.restore(record["rng"])
        return True


def copy_in_place(
    session: Session, sources: list[str], key: str, manifest: Manifest, tls: ssl.SSLContext | None
) -> Received:
    """Copy a state's tensors over this worker's own. Raises what transfer raises, and UsageError."""
    session.protected.ensure({spec.name: (spec.dtype, tuple(spec.shape)) for spec in manifest.tensors})
    tensors = session.protected.tensors()
    missing = [spec.name for spec in manifest.tensors if spec.name not in tensors]
    if missing:
        raise ProtectionError(f"this worker has no {missing[0]}: does the script build the same model?")
    landing = Landing(tensors[spec.name] for spec in manifest.tensors)
    token = session.identity.token
    result = receive(sources, token, key, manifest, landing.views, COPY_TIMEOUT_S, session.copying, tls=tls)
    landing.land()
    return result


def drop_gradients(session: Session) -> None:
    """A rank that received its state starts the step without gradients."""
    for optimizer in session.protected.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, torch.Tensor):
                    parameter.grad = None

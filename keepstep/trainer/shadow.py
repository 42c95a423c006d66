"""A target's part in a planned move: built as the rank, it stands at the gate of a step that only it computes.

There it copies the source's state while the source trains on. When all ranks switch it is given that step's
reduced gradients, the script's own code applies them, and the result is proven by the source's sums: the
target then enters the planned generation as somebody who was there. Whatever goes wrong, it enters without
state and is sent the whole of it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from keepstep.core.events import StateReceived
from keepstep.core.move_events import MoveReady
from keepstep.core.types import Lineage
from keepstep.core.worker_events import CopyStarted, StateAdopted
from keepstep.errors import KeepstepError, ProtectionError
from keepstep.trainer import niceness, rng, values
from keepstep.trainer.adapters.tensors import in_memory_order, local_part
from keepstep.trainer.lending import Keys
from keepstep.trainer.offers import sums_of
from keepstep.trainer.state import COPY_TIMEOUT_S, copy_in_place
from keepstep.transfer import Manifest, Received, TransferError, fetch_manifest, receive, tell_source
from keepstep.transfer.staging import Landing
from keepstep.wire.page import Phase
from keepstep.wire.tls import TlsFiles

if TYPE_CHECKING:
    from keepstep.trainer.loop import Loop
    from keepstep.trainer.session import Session
    from keepstep.trainer.step import Step

LOOK_S = 0.1  # how often a target that waits looks whether a generation has named it
PROOF_TIMEOUT_S = 30.0
COPIES_UNTIL_TOO_LARGE = 2


class NamedMeanwhileError(Exception):
    """A generation has named this worker: it goes where that needs it."""


class Shadow:
    """Follows one source until the switch. All of it runs on the user's thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: int | None = None  # the step whose state lies in this worker's tensors
        self._seen = -1  # the newest step that the source has offered
        self._failed_copies = 0
        self._told = False
        self._address = ""
        self._bytes, self._seconds = 0, 0.0
        self._switch: dict[str, Any] | None = None  # what came with the gradients
        self._crossed = Received(bytes=0, seconds=0.0, sources=(), replanned=0)
        self._source = -1
        self._adopted: dict[str, Any] | None = None
        tls = TlsFiles.from_environment()
        self._tls = None if tls is None else tls.client()

    @property
    def due(self) -> bool:
        """Whether this worker is built as a rank that it is to follow now."""
        session = self._session
        wanted = session.prepare is not None and session.announced is None
        return wanted and session.prepare.rank == dist.get_rank()  # type: ignore[union-attr]

    def stand_in(self, step: Step) -> bool:
        """At the gate. True: gradients of the source's step are in place, apply them; False: unwind."""
        session = self._session
        session.page.enter(Phase.WAITING)
        assert session.prepare is not None
        self._address, self._source = session.prepare.address, session.prepare.source
        niceness.step_back()
        try:
            return self._follow(step)
        except NamedMeanwhileError:
            return False
        finally:
            niceness.step_forward()
            session.prepare = None

    def _follow(self, step: Step) -> bool:
        session = self._session
        assert session.prepare is not None
        keys = Keys(session.worker)
        while True:
            self._look()
            if self._failed_copies < COPIES_UNTIL_TOO_LARGE:
                self._copy(keys.state)
                if self._held is None and self._failed_copies < COPIES_UNTIL_TOO_LARGE:
                    continue
            self._say_ready()
            if not self._wait_for_plan():
                continue
            too_large = self._failed_copies >= COPIES_UNTIL_TOO_LARGE
            if not self._note(keys.state, None if too_large else self._held):
                continue
            switch = self._await_switch(keys)
            if switch is not None:
                return self._take_gradients(keys.switch, switch, step)

    # ---- copies ---------------------------------------------------------------------------------

    def _copy(self, key: str) -> None:
        """One try at the state of one step; `_held` says whether it came whole before the step ended."""
        session = self._session
        manifest = self._manifest(key, LOOK_S, self._seen)
        if manifest is None:
            return
        # The first offer may be of a step that is nearly over; those after it come as their step begins.
        fresh, self._seen, self._held = self._seen >= 0, manifest.step, None
        session.tell(CopyStarted())
        began_s = time.monotonic()
        session.faults.at("transfer_target")
        try:
            result = copy_in_place(session, [self._address], key, manifest, self._tls)
        except TransferError as error:
            self._look()
            self._failed_copies += fresh
            if self._failed_copies >= COPIES_UNTIL_TOO_LARGE:
                session.say(f"a step is too short to copy its state in: {error}")
            return
        self._failed_copies, self._held = 0, manifest.step
        self._bytes, self._seconds = result.bytes, time.monotonic() - began_s

    def _say_ready(self) -> None:
        session = self._session
        if self._told or session.prepare is None:
            return
        self._told = True
        session.link.send(
            MoveReady(
                worker=session.worker,
                rank=session.prepare.rank,
                bytes=self._bytes,
                seconds=self._seconds,
                fits=self._held is not None,
            )
        )

    def _wait_for_plan(self) -> bool:
        """False: it has only now come to be known, so that what was copied is of an older step."""
        session = self._session
        known = session.plan is not None
        with session.lock:
            while session.plan is None and session.announced is None:
                session.lock.wait(1.0)
        self._look()
        if not known:
            self._held, self._failed_copies = None, 0  # the source waits a moment for a copy from here on
        return known

    # ---- the switch -----------------------------------------------------------------------------

    def _await_switch(self, keys: Keys) -> Manifest | None:
        """The source's word that all switch; None when it has begun another step without that."""
        while True:
            self._look()
            switch = self._manifest(keys.switch, LOOK_S)
            if switch is not None:
                return switch
            copies = self._failed_copies < COPIES_UNTIL_TOO_LARGE
            if copies and self._manifest(keys.state, 0.02, self._seen) is not None:
                return None

    def _take_gradients(self, key: str, switch: Manifest, step: Step) -> bool:
        """Everybody switches. Without this step's state or gradients: enter the generation with nothing."""
        session = self._session
        session.announced = session.announced or session.plan
        if switch.step != self._held:
            return False
        content = values.from_bytes(switch.values)
        parameters = session.protected.parameters()
        named = {spec.name for spec in switch.tensors}
        try:
            for name, parameter in parameters.items():
                if name not in named:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            landing = Landing(
                in_memory_order(local_part(parameters[spec.name].grad))  # type: ignore[arg-type]
                for spec in switch.tensors
            )
            token = session.identity.token
            self._crossed = receive(
                [self._address],
                token,
                key,
                switch,
                landing.views,
                COPY_TIMEOUT_S,
                session.copying,
                tls=self._tls,
            )
            landing.land()
        except (TransferError, ValueError, KeyError) as error:
            session.say(f"the gradients of step {switch.step} did not come: {error}")
            session.tell(CopyStarted())  # what is held is a step too old
            return False
        session.protected.load_values(content["values"])
        step.number = switch.step
        self._switch = content
        return True

    # ---- after the update -----------------------------------------------------------------------

    def conclude(self) -> None:
        """The script has applied the gradients: hold the result to be state if the source's sums say so."""
        content, self._switch = self._switch, None
        if content is None:
            return
        session = self._session
        try:
            proof = self._proof()
        except NamedMeanwhileError:
            proof = None
        own = sums_of(session)
        if proof is None or proof != own:
            differing = [] if proof is None else [name for name in own if proof.get(name) != own[name]]
            found = f"{', '.join(differing[:3]) or 'the set of tensors'} differ" if proof else "no proof came"
            session.say(f"the update of the last step cannot be relied on ({found}): the whole state is sent")
            return
        after = content["lineage"]
        lineage = Lineage(after["digest"], after["step"], tuple(after["tail"]))
        session.tell(StateAdopted(step=after["step"], lineage=lineage))
        self._adopted = content

    def _proof(self) -> dict[str, int] | None:
        until_s = time.monotonic() + PROOF_TIMEOUT_S
        while time.monotonic() < until_s:
            manifest = self._manifest(Keys(self._session.worker).proof, LOOK_S)
            if manifest is not None:
                sums: dict[str, int] = values.from_bytes(manifest.values)["sums"]
                return sums
            if self._session.announced is not self._session.plan:
                raise NamedMeanwhileError
        return None

    def settle(self, loop: Loop) -> None:
        """This worker plays the rank: what only the source knew of itself."""
        content, self._adopted = self._adopted, None
        session = self._session
        if content is None or not session.machine.has_state:
            return
        record = loop.recorder.load(content["record"])
        loop.stand_at(record["cursor"], record["closed"], own=True)
        rng.restore(record["rng"])
        session.link.send(
            StateReceived(
                worker=session.worker,
                generation=session.generation_number,
                transfer_s=self._crossed.seconds,
                bytes=self._crossed.bytes,
                sources=(self._source,),
                bit_exact=True,
            )
        )

    # ---- small words ----------------------------------------------------------------------------

    def _look(self) -> None:
        if self._session.announced is not None:
            raise NamedMeanwhileError

    def _manifest(self, key: str, wait_s: float, after: int = -1) -> Manifest | None:
        """What the source offers, of a step beyond `after`, now or within `wait_s`; None when it does not."""
        token = self._session.identity.token
        try:
            return fetch_manifest(self._address, token, key, wait_s, after=after, tls=self._tls)
        except TransferError:
            time.sleep(0.005)  # a source that is gone refuses at once; its generation is on its way
            return None

    def _note(self, key: str, held: int | None) -> bool:
        try:
            tell_source(self._address, self._session.identity.token, key, held, tls=self._tls)
        except (TransferError, KeepstepError, ProtectionError):
            return False
        return True

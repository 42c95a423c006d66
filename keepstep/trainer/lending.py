"""A source's part in a planned move: its state lent at each step's start, the last step's gradients after the gate.

Between the start of a step and its update parameters and optimizer state stand still, so they are copied while
the step is computed. In the step whose state the target holds, this rank puts the planned generation into the
gate; what crosses at the boundary then is gradients only, and a proof of the state that the update made of them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from keepstep.core.move_events import LendReady
from keepstep.core.types import Generation
from keepstep.core.worker_events import PlanDue
from keepstep.errors import ProtectionError
from keepstep.trainer.adapters.tensors import in_memory_order, local_part
from keepstep.trainer.offers import manifest_of, sums_of
from keepstep.transfer import StateServer
from keepstep.wire.tls import TlsFiles

if TYPE_CHECKING:
    from keepstep.trainer.loop import Loop
    from keepstep.trainer.session import Session


# How long, and in how many steps, a source stands at its gate for a copy that is under way.
PATIENCE_S = 0.05
PATIENT_STEPS = 3


class Keys:
    """What a source offers one target, by name."""

    def __init__(self, target: int) -> None:
        self.state = f"move/{target}/state"
        self.switch = f"move/{target}/switch"
        self.proof = f"move/{target}/proof"


class Lender:
    """Lends this rank's state to one target at a time. `begin` runs on the listening thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._server: StateServer | None = None
        self._target: int | None = None
        self._keys = Keys(-1)
        self._noted = threading.Condition()
        self._patience = 0
        self._held_step: int | None = None  # as its target says
        self._forced = False
        self._offered: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether anybody is to copy from here."""
        return self._target is not None

    def begin(self, target: int) -> None:
        """From the next step on `target` may copy this rank's state. Asked again: it is told again."""
        session = self._session
        if self._server is None:
            tls = TlsFiles.from_environment()
            self._server = StateServer(
                session.link.welcome.advertise,
                session.identity.token,
                tls=None if tls is None else tls.server(),
                on_note=self._note,
            )
        if target != self._target:
            self._target, self._keys = target, Keys(target)
            self._held_step, self._forced, self._patience = None, False, PATIENT_STEPS
        session.link.send(LendReady(worker=session.worker, target=target, address=self._server.address))

    def _note(self, key: str, held: int | None) -> None:
        """The target's word, on the server's thread: the step whose state it holds; None: it never will in time."""
        if key == self._keys.state:
            with self._noted:
                self._held_step, self._forced = held, held is None
                self._noted.notify_all()

    # ---- the user's thread ----------------------------------------------------------------------

    def lend(self, cursor: dict[str, Any] | None, closed_gates: int) -> None:
        """At a step's start: from now until the update the target may copy."""
        assert self._server is not None
        planned = self._session.machine.planned is not None
        self._withdraw(self._keys.state)
        if planned or self._server.awaited(self._keys.state):
            manifest, buffers = manifest_of(self._session, cursor, closed_gates)
            self._offer(self._keys.state, manifest, buffers)

    def tell_due(self) -> None:
        """Before the gate: when the targets hold this step's state, the switch is due with it."""
        session = self._session
        plan, step = session.machine.planned, session.machine.step_count
        if plan is None or session.worker not in plan.donors:
            return
        if self._held_step != step and not self._forced and self._patience:
            self._await_copy(step)
        if self._forced:
            session.tell(PlanDue(number=plan.number, step=None))
        elif self._held_step == step and self._all_hold(plan, step):
            session.tell(PlanDue(number=plan.number, step=step))

    def _await_copy(self, step: int) -> None:
        """A target that is in the middle of its copy is worth a moment: else the whole of it is for nothing."""
        assert self._server is not None
        if self._server.taken(self._keys.state):
            self._patience -= 1
            with self._noted:
                self._noted.wait_for(lambda: self._held_step == step or self._forced, PATIENCE_S)

    def _all_hold(self, plan: Generation, step: int) -> bool:
        """Ranks that move together switch together: each source says here that its target is ready."""
        store = self._session.store
        if len(plan.donors) == 1:
            return True
        if store is None:
            return False
        try:
            store.set(f"held/{plan.number}/{step}/{self._session.worker}", b"1")
            return store.check([f"held/{plan.number}/{step}/{donor}" for donor in plan.donors])
        except (RuntimeError, OSError, ProtectionError):
            return False  # the store is going down: whoever cut it says why

    def after_gate(self, passed: int, loop: Loop) -> None:
        """The update begins. `passed`: what the gate said; the plan's number when all switch at this step's end."""
        self._withdraw(self._keys.state)
        session = self._session
        plan = session.machine.planned
        if plan is None or passed != plan.number or session.worker not in plan.donors:
            return
        gradients = {} if self._forced else self._gradients()
        after = session.next_lineage
        manifest, buffers = manifest_of(
            session,
            None,
            session.closed_gates,
            tensors=gradients,
            extra={
                "record": loop.recorder.payload,
                "lineage": {"digest": after.digest, "step": after.step, "tail": list(after.tail)},
            },
        )
        self._offer(self._keys.switch, manifest, buffers)

    def _gradients(self) -> dict[str, Any]:
        """The reduced gradients as the optimizers will find them, by parameter; no copies."""
        found = {}
        for name, parameter in self._session.protected.parameters().items():
            if parameter.grad is not None:
                found[name] = in_memory_order(local_part(parameter.grad))
        return found

    def prove(self) -> None:
        """After the update: what the target's state must be, bit for bit."""
        if self._target is None or self._forced:
            return
        manifest, _ = manifest_of(self._session, None, 0, tensors={}, extra={"sums": sums_of(self._session)})
        self._offer(self._keys.proof, manifest, [])

    def end(self) -> None:
        """A generation without this move: nothing is lent any more."""
        for key in list(self._offered):
            self._withdraw(key)
        self._target, self._held_step, self._forced = None, None, False

    def _offer(self, key: str, manifest: Any, buffers: list[memoryview]) -> None:
        assert self._server is not None
        self._withdraw(key)
        self._server.offer(key, manifest, buffers)
        self._offered.add(key)

    def _withdraw(self, key: str) -> None:
        if key in self._offered and self._server is not None:
            self._offered.discard(key)
            self._server.withdraw(key)

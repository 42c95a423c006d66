"""The gate: one scalar all-reduce before `optimizer.step()` that decides whether a step commits.

It lives in a global optimizer pre-step hook, so the user's `optimizer.step()` stays as it is. To
return is to commit; to raise StepInterrupted is to serve the step again. Vote and reconnection
happen in here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep.core.worker_events import ApplyUpdate, EnterGate, GatePassed, GradientsCompleted
from keepstep.errors import UsageError
from keepstep.trainer.elastic import Place
from keepstep.trainer.recovery import Outcome
from keepstep.wire.page import Phase

if TYPE_CHECKING:
    from keepstep.trainer.loop import Loop
    from keepstep.trainer.session import Session


class Gate:
    """This rank's gate, and the hook that leads every optimizer through it."""

    def __init__(self, session: Session, loop: Loop) -> None:
        self._session = session
        self._loop = loop
        self._value = torch.zeros(1, dtype=torch.int64)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.passed = False  # in the block that is open
        self._known: set[int] = set()
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        self._scalers = [
            value for value in session.protected.others.values() if isinstance(value, torch.amp.GradScaler)
        ]
        for scaler in self._scalers:
            self._lead_scaler(scaler)

    # ---- the hook -------------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._loop.in_block:
            if self._session.live and self._session.groups.place is not Place.SETUP:
                raise UsageError(
                    "optimizer.step() outside `with step:`: nobody could serve it again to a replacement. "
                    "Move it into the block."
                )
            return None
        self._refuse_strangers(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.reach()
            return None
        wrapped = self._gated(closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _gated(self, closure: Any) -> Any:
        calls = 0

        def run() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UsageError(
                    "the optimizer evaluates its closure more than once in a step (LBFGS does): it cannot be "
                    "repeated exactly. Use an optimizer that evaluates it once."
                )
            with torch.enable_grad():
                loss = closure()
            self.reach()
            return loss

        return run

    def _lead_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler that skips the update fires no hook: the gate is then passed as an empty commit."""
        original = scaler.step

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            if self._loop.in_block:
                self.reach()
            return result

        scaler.step = step  # type: ignore[method-assign]

    def forget_unscaled(self) -> None:
        """Before a redo: a scaler remembers that this step's gradients were unscaled already."""
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()

    def _refuse_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._known:
            return
        known = {
            id(parameter)
            for one in self._session.protected.optimizers.values()
            for group in one.param_groups
            for parameter in group["params"]
        }
        listed = any(optimizer is one for one in self._session.protected.optimizers.values())
        if not listed and not all(id(p) in known for g in optimizer.param_groups for p in g["params"]):
            raise UsageError(
                f"{type(optimizer).__name__} is not protected: its state would be lost with its rank. "
                "Name it: run.protect(optimizer=...)."
            )
        self._known.add(id(optimizer))

    # ---- the gate itself ------------------------------------------------------------------------

    def reach(self, closed_gates: int | None = None) -> None:
        """Pass the gate once in this block. Raises StepInterrupted when the step is served again.

        `closed_gates`: for the gates after the last step, how many will have been passed with this one.
        """
        if self.passed:
            return  # a container and its parts, or a later optimizer of the same block
        session = self._session
        if not session.rehearsing:
            began_ns, generation = time.monotonic_ns(), session.generation_number
            self._pass(session.closed_gates if closed_gates is None else closed_gates)
            if session.generation_number == generation:  # else it was a recovery
                session.page.count_gate(time.monotonic_ns() - began_ns)
        else:
            self._loop.rehearsal.at_gate()
        self.passed = True

    def _pass(self, closed_gates: int) -> None:
        session, loop = self._session, self._loop
        if session.groups.finish_outstanding():
            loop.before_gate(closed_gates)
            if session.lender.active:
                session.lender.tell_due()
            actions = session.tell(GradientsCompleted())
            entry = next((action for action in actions if isinstance(action, EnterGate)), None)
            if entry is not None and (passed := self._reduce(entry.pending)) is not None:
                actions = session.tell(GatePassed(pending=passed))
                if any(isinstance(action, ApplyUpdate) for action in actions):
                    loop.exchange.withdraw()
                    if session.lender.active:
                        session.lender.after_gate(passed, loop)
                    session.groups.settle(place=Place.AFTER_GATE)
                    session.faults.at("after_gate")
                    session.page.enter(Phase.UPDATE)
                    session.faults.begin_update()
                    return
        outcome = loop.recover()
        if outcome is Outcome.ROLL:
            session.groups.settle(place=Place.AFTER_GATE)
            session.page.enter(Phase.UPDATE)
            return
        loop.interrupt(outcome)

    def _reduce(self, pending: int) -> int | None:
        """The all-reduce: the largest contribution. None when it failed (the failure was told)."""
        session = self._session
        groups = session.groups
        session.page.enter(Phase.GATE)
        if session.node_gate is not None:
            value = session.node_gate.reduce(pending, lambda: groups.poisoned)
            return None if groups.poisoned else value
        inner = groups.members[0].inner
        if inner is None:
            return None
        self._value.fill_(pending)
        try:
            inner.allreduce([self._value], self._options).wait()
        except RuntimeError as error:
            groups.poison(f"gate: {str(error).splitlines()[0][:200]}")
            if groups.observing and not groups.poisoned:
                raise  # recovery is for protected jobs
            return None
        return None if groups.poisoned else int(self._value[0])

"""The record: what only this rank knows, kept off the process and within it.

Two records a step leave for the shared-memory page: one at the step's start, one before the rank
contributes to the gate (a passed gate then implies that every rank's record exists elsewhere). In
memory stays what a redo needs: values, buffers and gradients as the step found them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.trainer import rng, values
from keepstep.trainer.adapters.protected import Protected
from keepstep.wire.page import Page


class Recorder:
    """Takes, keeps and restores the records of this rank."""

    def __init__(self, page: Page, protected: Protected, record_bytes: int) -> None:
        self._page = page
        self._protected = protected
        self._record_bytes = record_bytes
        self._recorded_buffers: list[str] = []
        self._packed: dict[str, tuple[Any, bytes]] = {}
        self._written: dict[str, Any] = {}
        self._written_key: tuple[int, str] | None = None
        self._remembered_step = -1
        self._values: dict[str, Any] = {}
        self._per_rank: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._had_gradient: list[bool] = []
        self._gradients: list[torch.Tensor | None] = []
        self._stale: list[weakref.ref[torch.Tensor] | None] = []
        self._keeps_gradients = False
        self.late_changes = False
        self.start_rng: dict[str, Any] = {}  # at the start of the step under way

    @property
    def recorded_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that this rank changes in forward: they are its own."""
        return tuple(self._recorded_buffers)

    # ---- off the process ------------------------------------------------------------------------

    def _piece(self, cursor: dict[str, Any] | None, closed_gates: int) -> dict[str, Any]:
        buffers = self._protected.buffers() if self._recorded_buffers else {}
        return {
            "rng": rng.capture(),
            "cursor": cursor,
            "closed": closed_gates,
            "buffers": {name: buffers[name].detach().clone() for name in self._recorded_buffers},
            "per_rank": self._protected.per_rank_values() if self._protected.per_rank else {},
        }

    def write_start(self, step: int, lineage: str, cursor: dict[str, Any] | None, closed_gates: int) -> None:
        """The record of the step that begins: `step` commits, then this is the rank's state."""
        piece = self._piece(cursor, closed_gates)
        self.start_rng = piece["rng"]
        if self._written_key == (step, lineage) and self._same(piece):
            return  # the gate's record said the same
        if self._written_key == (step, lineage):
            self.late_changes = True
        self._write("start", step, lineage, piece)

    def write_gate(self, step: int, lineage: str, cursor: dict[str, Any] | None, closed_gates: int) -> None:
        """The record for after the update: what this rank will start step `step` with."""
        self._write("gate", step, lineage, self._piece(cursor, closed_gates))

    def _write(self, kind: str, step: int, lineage: str, piece: dict[str, Any]) -> None:
        payload = values.to_bytes({**piece, "rng": self._packed_rng(piece["rng"])})
        if len(payload) > self._record_bytes:
            raise UsageError(
                f"the record of this rank has {len(payload)} bytes, the limit is {self._record_bytes}: "
                f"protect large state as replicated, or raise --record-limit ({self._largest(piece)})."
            )
        self._page.write_record(kind, step, lineage, payload)
        self._written, self._written_key = piece, (step, lineage)

    def _packed_rng(self, state: dict[str, Any]) -> dict[str, Any]:
        """The generators' state; one that has not moved since the last record is not packed again."""
        packed: dict[str, Any] = {}
        for name, part in state.items():
            if isinstance(part, torch.Tensor):
                packed[name] = part
                continue
            kept = self._packed.get(name)
            if kept is None or kept[0] is not part:
                kept = self._packed[name] = (part, values.to_bytes(part))
            packed[name] = kept[1]
        return packed

    def _largest(self, piece: dict[str, Any]) -> str:
        sizes = {f"buffer {name}": tensor.nbytes for name, tensor in piece["buffers"].items()}
        sizes |= {f"per rank {name}": len(values.to_bytes(item)) for name, item in piece["per_rank"].items()}
        if not sizes:
            return "random generators and the data cursor"
        name = max(sizes, key=lambda key: sizes[key])
        return f"largest: {name}, {sizes[name]} bytes"

    def _same(self, piece: dict[str, Any]) -> bool:
        old = self._written
        if old["cursor"] != piece["cursor"] or old["closed"] != piece["closed"]:
            return False
        if not rng.same(old["rng"], piece["rng"]):
            return False
        if piece["buffers"] and not all(
            torch.equal(old["buffers"][name], tensor) if name in old["buffers"] else False
            for name, tensor in piece["buffers"].items()
        ):
            return False
        return not piece["per_rank"] or values.to_bytes(old["per_rank"]) == values.to_bytes(piece["per_rank"])

    def load(self, payload: bytes) -> dict[str, Any]:
        """Become what the record says, but for the random generators and the cursor: the caller restores
        those, in this order: `cursor`, then `rng`. Returns the record."""
        record: dict[str, Any] = values.from_bytes(payload)
        record["rng"] = {
            name: values.from_bytes(part) if isinstance(part, bytes) else part
            for name, part in record["rng"].items()
        }
        buffers = self._protected.buffers()
        with torch.no_grad():
            for name, tensor in record["buffers"].items():
                buffers[name].copy_(tensor)
        self._recorded_buffers = sorted(set(self._recorded_buffers) | set(record["buffers"]))
        if record["per_rank"]:
            self._protected.load_per_rank_values(record["per_rank"])
        return record

    # ---- within the process ---------------------------------------------------------------------

    def remember(self, step: int) -> None:
        """At the step's start: what a redo puts back."""
        self._remembered_step = step
        self._values = self._protected.values()
        self._per_rank = self._protected.per_rank_values() if self._protected.per_rank else {}
        if self._recorded_buffers:
            buffers = self._protected.buffers()
            self._buffers = {name: buffers[name].detach().clone() for name in self._recorded_buffers}
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        self._had_gradient = [gradient is not None for gradient in gradients]
        self._stale = [None if gradient is None else weakref.ref(gradient) for gradient in gradients]
        if self._keeps_gradients:
            self._gradients = [None if g is None else g.detach().clone() for g in gradients]
        self._protected.watch_mutations()

    def put_back(self, step: int) -> None:
        """Before a redo of `step`: the state of its start (random generators are the loop's business)."""
        if step != self._remembered_step:
            return  # interrupted before it began: the state is that of its start
        self._protected.load_values(self._values)
        if self._per_rank:
            self._protected.load_per_rank_values(self._per_rank)
        with torch.no_grad():
            if self._buffers:
                buffers = self._protected.buffers()
                for name, tensor in self._buffers.items():
                    buffers[name].copy_(tensor)
            for index, parameter in enumerate(self._parameters()):
                if not self._keeps_gradients or not self._had_gradient[index]:
                    parameter.grad = None  # zeroing would turn -0.0 into 0.0
                elif (kept := self._gradients[index]) is not None:
                    parameter.grad = kept.clone()

    def check_before_gate(self) -> None:
        """Look at what forward changed in place: small buffers join the record, the rest is refused."""
        for name in self._protected.mutated_before_gate():
            if name in self._recorded_buffers:
                continue
            tensor = self._protected.buffers().get(name)
            if tensor is None or tensor.nbytes > self._record_bytes // 4:
                size = "a parameter" if tensor is None else f"{tensor.nbytes} bytes"
                raise UsageError(
                    f"{name} ({size}) is changed in place before optimizer.step(): a step that is served again "
                    "would change it twice. Change it after optimizer.step(), or keep it out of run.protect()."
                )
            self._recorded_buffers = sorted([*self._recorded_buffers, name])
        if not self._keeps_gradients and any(
            old is not None and parameter.grad is not None and old() is parameter.grad
            for old, parameter in zip(self._stale, self._parameters(), strict=False)
        ):
            # The block neither drops the old gradients nor starts without any: a redo needs them.
            self._keeps_gradients = True

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for optimizer in self._protected.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

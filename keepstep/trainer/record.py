"""The record: what only this rank knows, kept off the process and within it.

Two records a step leave for the shared-memory page: one at the step's start, one before the rank
contributes to the gate (a passed gate then implies that every rank's record exists elsewhere). In
memory stays what a redo needs: values, buffers and gradients as the step found them.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch

from keepstep.errors import UsageError, WireError
from keepstep.trainer import rng, values
from keepstep.trainer.adapters.protected import Protected
from keepstep.trainer.checks import Checks
from keepstep.wire.page import Page

# A record's payload: this head, the rest (packed values), then for each generator its name, its length
# and its state. The generators' bytes stand raw: they are most of a record, and two are written a step.
_HEAD = struct.Struct("<4sII")  # magic, length of the rest, number of generators
_PART = struct.Struct("<8sI")
# A record above the limit is refused while the script is new; later it costs protection, not the training.
REFUSED_STEPS = 3
_MAGIC = b"KSR2"

Pieces = tuple[bytes, dict[str, bytes]]  # the rest, and the generators' states


def _packed_rest(
    cursor: dict[str, Any] | None, closed_gates: int, buffers: dict[str, Any], per_rank: dict[str, Any]
) -> bytes:
    content = {"cursor": cursor, "closed": closed_gates, "buffers": buffers, "per_rank": per_rank}
    return values.to_bytes(content)


def joined(pieces: Pieces) -> bytes:
    """The payload of a record."""
    rest, generators = pieces
    parts = [_HEAD.pack(_MAGIC, len(rest), len(generators)), rest]
    for name, state in generators.items():
        parts += (_PART.pack(name.encode(), len(state)), state)
    return b"".join(parts)


def parted(payload: bytes) -> dict[str, Any]:
    """What a payload says: cursor, closed, buffers, per_rank, rng. Raises WireError when it is malformed."""
    try:
        magic, length, count = _HEAD.unpack_from(payload)
        if magic != _MAGIC:
            raise WireError("not a record of this version of Keepstep")
        at = _HEAD.size + length
        record: dict[str, Any] = values.from_bytes(payload[_HEAD.size : at])
        record["rng"] = {}
        for _ in range(count):
            name, length = _PART.unpack_from(payload, at)
            at += _PART.size
            if at + length > len(payload):
                raise WireError("a record is cut short")
            text = name.rstrip(b"\0").decode()
            record["rng"][text] = rng.unpacked(text, payload[at : at + length])
            at += length
    except (struct.error, UnicodeDecodeError, TypeError) as error:
        raise WireError(f"a record is malformed: {error}") from None
    return record


class Recorder:
    """Takes, keeps and restores the records of this rank."""

    def __init__(self, page: Page, protected: Protected, record_bytes: int, checks: Checks) -> None:
        self._page = page
        self._checks = checks
        self._protected = protected
        self._record_bytes = record_bytes
        self._recorded_buffers: list[str] = []
        self._packer = rng.Packer()
        self._plain_rest: dict[int, bytes] = {}
        self._written: Pieces = (b"", {})
        self._payload = b""  # of the pieces written last
        self._written_key: tuple[int, str] | None = None
        self._remembered_step = -1
        self._values: dict[str, Any] = {}
        self._per_rank: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._clean = True  # no parameter had a gradient at the step's start
        self._had_gradient: list[bool] = []
        self._gradients: list[torch.Tensor | None] = []
        self._stale: list[weakref.ref[torch.Tensor] | None] = []
        self._keeps_gradients = False
        self.late_changes = False
        self.on_record: Callable[[str, int, str, bytes], None] | None = (
            None  # sees a record before the page does
        )
        self.start_rng: dict[str, Any] = {}  # at the start of the step under way

    @property
    def recorded_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that this rank changes in forward: they are its own."""
        return tuple(self._recorded_buffers)

    @property
    def payload(self) -> bytes:
        """The newest record."""
        return self._payload

    @property
    def written_bytes(self) -> int:
        """Size of the newest record."""
        return len(self._payload)

    # ---- off the process ------------------------------------------------------------------------

    def _rest(self, cursor: dict[str, Any] | None, closed_gates: int) -> bytes:
        """All of the record but the random generators."""
        per_rank = self._protected.per_rank_values() if self._protected.per_rank else {}
        if cursor is None and not self._recorded_buffers and not per_rank:
            if closed_gates not in self._plain_rest:
                self._plain_rest = {closed_gates: _packed_rest(None, closed_gates, {}, {})}
            return self._plain_rest[closed_gates]
        buffers = self._protected.buffers() if self._recorded_buffers else {}
        own = {name: buffers[name] for name in self._recorded_buffers}
        return _packed_rest(cursor, closed_gates, own, per_rank)

    def write_start(self, step: int, lineage: str, cursor: dict[str, Any] | None, closed_gates: int) -> None:
        """The record of the step that begins: `step` commits, then this is the rank's state."""
        self.start_rng = rng.capture()
        pieces = (self._rest(cursor, closed_gates), self._packer.pack(self.start_rng))
        if self._written_key == (step, lineage):
            if self._written == pieces:
                return  # the gate's record said the same
            self.late_changes = True
        self._write("start", step, lineage, pieces)

    def write_gate(self, step: int, lineage: str, cursor: dict[str, Any] | None, closed_gates: int) -> None:
        """The record for after the update: what this rank will start step `step` with."""
        pieces = (self._rest(cursor, closed_gates), self._packer.pack(rng.capture()))
        self._write("gate", step, lineage, pieces)

    def _write(self, kind: str, step: int, lineage: str, pieces: Pieces) -> None:
        rest, generators = pieces
        if rest is not self._written[0] or generators is not self._written[1]:
            self._payload = joined(pieces)
            self._written, self._written_key = pieces, None
        payload = self._payload
        if len(payload) > self._record_bytes:
            text = (
                f"the record of this rank has {len(payload)} bytes, the limit is {self._record_bytes}: "
                f"protect large state as replicated, or raise --record-limit ({self._largest()})."
            )
            if step <= REFUSED_STEPS:
                raise UsageError(text)
            self._checks.failed("record", text, step)
            return
        if self.on_record is not None:
            self.on_record(kind, step, lineage, payload)
        try:
            self._page.write_record(kind, step, lineage, payload)
        except OSError as error:  # no memory is left for it: training goes on, this rank unprotected
            self._checks.failed("record", f"its record of step {step} cannot be kept: {error}", step)
            return
        self._page.count_record(len(payload))
        self._written_key = (step, lineage)
        if self._checks.failing:
            self._checks.held("record")

    def _largest(self) -> str:
        buffers = self._protected.buffers()
        sizes = {f"buffer {name}": buffers[name].nbytes for name in self._recorded_buffers}
        per_rank = self._protected.per_rank_values()
        sizes |= {f"per rank {name}": len(values.to_bytes(item)) for name, item in per_rank.items()}
        if not sizes:
            return "random generators and the data cursor"
        name = max(sizes, key=lambda key: sizes[key])
        return f"largest: {name}, {sizes[name]} bytes"

    def load(self, payload: bytes) -> dict[str, Any]:
        """Become what the record says, but for the random generators and the cursor: the caller restores
        those, in this order: `cursor`, then `rng`. Returns the record. Raises WireError."""
        record = parted(payload)
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
        gradients = [parameter.grad for parameter in self._protected.trained()]
        self._clean = gradients.count(None) == len(gradients)  # the usual case
        if not self._clean:
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
            for index, parameter in enumerate(self._protected.trained()):
                if self._clean or not self._keeps_gradients or not self._had_gradient[index]:
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
        if (
            not self._clean
            and not self._keeps_gradients
            and any(
                old is not None and parameter.grad is not None and old() is parameter.grad
                for old, parameter in zip(self._stale, self._protected.trained(), strict=False)
            )
        ):
            # The block neither drops the old gradients nor starts without any: a redo needs them.
            self._keeps_gradients = True

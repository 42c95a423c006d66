"""What a source offers: the tensors in order, the packed values, and which state it is."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from keepstep.errors import WireError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: `bytes` of C-contiguous data of `dtype` (torch's name without "torch.") and `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The state after `step` committed steps of `lineage`: `tensors` come as raw bytes, `values` are here."""

    tensors: tuple[TensorSpec, ...]
    values: bytes
    step: int
    lineage: str

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.bytes for spec in self.tensors)

    def identity(self) -> str:
        """Equal at two sources exactly when they offer the same tensors of the same state."""
        text = json.dumps([[asdict(spec) for spec in self.tensors], self.step, self.lineage])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> bytes:
        """The manifest as JSON text."""
        tensors = [[spec.name, spec.dtype, spec.shape, spec.bytes] for spec in self.tensors]
        values = base64.b64encode(self.values).decode()
        body = {"tensors": tensors, "values": values, "step": self.step, "lineage": self.lineage}
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read what `to_json` wrote. Raises WireError when anything is missing, extra or of a wrong type."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or set(body) != {"tensors", "values", "step", "lineage"}:
                raise ValueError("wrong fields")
            if type(body["step"]) is not int or type(body["lineage"]) is not str:
                raise ValueError("step or lineage of a wrong type")
            tensors = tuple(_spec(*entry) for entry in body["tensors"])
            values = base64.b64decode(body["values"], validate=True)
        except (ValueError, TypeError, RecursionError) as error:
            raise WireError(f"the source's manifest is malformed: {error}") from None
        return cls(tensors=tensors, values=values, step=body["step"], lineage=body["lineage"])


def _spec(name: Any, dtype: Any, shape: Any, size: Any) -> TensorSpec:
    if type(name) is not str or type(dtype) is not str or type(shape) is not list:
        raise ValueError("a tensor's name, dtype or shape of a wrong type")
    if any(type(number) is not int or number < 0 for number in (size, *shape)):
        raise ValueError(f"sizes of tensor {name!r:.60} are no natural numbers")
    return TensorSpec(name, dtype, tuple(shape), size)

"""Keepstep: a PyTorch job outlives its hardware. What a training script may use, loaded on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.trainer.api import Run as Run
    from keepstep.trainer.api import init as init

__version__ = "0.1.0"
__all__ = ["KeepstepError", "Run", "init"]


def __getattr__(name: str) -> Any:
    """Load the trainer (and with it torch) only when a script asks for it; the CLI never does."""
    if name in ("Run", "init"):
        from keepstep.trainer import entry

        return entry.load(name)
    if name == "KeepstepError":
        from keepstep.errors import KeepstepError

        return KeepstepError
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")

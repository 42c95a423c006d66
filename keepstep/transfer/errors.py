"""What a copy of state can end with, other than success."""

from __future__ import annotations

from keepstep.errors import ProtectionError


class TransferError(ProtectionError):
    """No source could deliver: the message says which failed and why."""


class TransferCancelledError(TransferError):
    """The caller cancelled: a newer generation was announced while the copy ran."""

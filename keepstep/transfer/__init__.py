"""Moves state between workers: memory to memory, striped from every live source, verified, without pickle."""

from __future__ import annotations

from keepstep.transfer.errors import TransferCancelledError, TransferError
from keepstep.transfer.manifest import Manifest, TensorSpec
from keepstep.transfer.receive import Received, fetch_manifest, receive, tell_source
from keepstep.transfer.server import StateServer

__all__ = [
    "Manifest",
    "Received",
    "StateServer",
    "TensorSpec",
    "TransferCancelledError",
    "TransferError",
    "fetch_manifest",
    "receive",
    "tell_source",
]

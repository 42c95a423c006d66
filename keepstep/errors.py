"""Every error that Keepstep raises on purpose, and whose fault each one is.

KeepstepError
├── UsageError          the script or the command line asks for what cannot work: change it
├── ProtectionError     protection cannot go on (no live copy, no spare, no controller): the cluster's
├── WireError           a peer sent what the protocol does not allow: a version or a stranger
└── InvariantError      Keepstep itself is wrong: report it, with the story in its message

StepInterrupted stands apart: it is no error, it unwinds a step that will be served again.
"""

from __future__ import annotations


class KeepstepError(Exception):
    """The common base: catch this to catch everything that Keepstep raises on purpose."""


class UsageError(KeepstepError):
    """The script or the command line asks for what cannot work. The message says what to change."""


class ProtectionError(KeepstepError):
    """Protection cannot go on, through no fault of the script."""


class WireError(KeepstepError):
    """A message breaks the protocol: unknown type, wrong field, too large, wrong token."""


class InvariantError(KeepstepError):
    """A promise of Keepstep's own code is broken. The message tells state, event and history."""


class StepInterrupted(BaseException):
    """Unwinds the user's code out of a step (or an aside) that is served again.

    A BaseException, so that `except Exception` in a training loop does not swallow it.
    """

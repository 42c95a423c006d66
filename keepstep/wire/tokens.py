"""Secrets of a job: the token that may do everything, and the one that follows from it and may only look."""

from __future__ import annotations

import base64
import hashlib
import hmac


def same_token(shown: str, expected: str) -> bool:
    """Compared in constant time, so that a stranger cannot guess it letter by letter."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), expected.encode("utf-8"))


def read_token(token: str) -> str:
    """The secret that may look and not touch. It follows from the job's own, so a restarted controller has the same;
    nobody can go the other way."""
    digest = hmac.digest(token.encode(), b"keepstep: read only", hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")

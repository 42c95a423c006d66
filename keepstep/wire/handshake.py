"""How a listener for other nodes and its caller prove the job's token to each other without showing it.

The listener speaks first: a banner with a fresh nonce. The caller answers with one small frame: an HMAC over
banner and hello, keyed by the token, a nonce of its own, and the hello, which is parsed only when the HMAC is
right. The listener answers with an HMAC over all of that, and its reply. A stranger on either side learns
nothing with which it could speak as the other; whoever only passes the bytes on is caught by the address
that the hello names (PeerHello.to). What follows is neither encrypted nor signed: that is TLS's part.

Bytes only: no socket, no clock. Source: the pattern of ISO/IEC 9798-4, mutual authentication in three passes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from keepstep.errors import WireError

MAGIC = b"KSP1"
NONCE_BYTES = 32
PROOF_BYTES = 32
BANNER_BYTES = len(MAGIC) + NONCE_BYTES
MAX_GREETING_BYTES = 2048  # all that a stranger can make a listener read

_CALLER, _LISTENER = b"keepstep peer caller\0", b"keepstep peer listener\0"


def make_banner() -> bytes:
    """The listener's first bytes, never the same twice."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def check_banner(banner: bytes) -> None:
    """Raises WireError when these are not the first bytes of an agent's listener."""
    if len(banner) != BANNER_BYTES or not banner.startswith(MAGIC):
        raise WireError("who answers there is no agent of this version of Keepstep")


def greet(token: str, banner: bytes, hello: bytes) -> bytes:
    """The caller's one frame."""
    body = secrets.token_bytes(NONCE_BYTES) + hello
    return _proof(token, _CALLER, banner, body) + body


def hello_of(token: str, banner: bytes, greeting: bytes) -> bytes | None:
    """The hello in a greeting; None when its sender does not have the token. Takes the same time for both."""
    proof, body = greeting[:PROOF_BYTES], greeting[PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _CALLER, banner, body)) or len(body) < NONCE_BYTES:
        return None
    return body[NONCE_BYTES:]


def reply(token: str, banner: bytes, greeting: bytes, message: bytes) -> bytes:
    """The listener's frame to a caller that has the token."""
    return _proof(token, _LISTENER, banner, greeting, message) + message


def message_of(token: str, banner: bytes, greeting: bytes, answer: bytes) -> bytes:
    """The message in the listener's reply. Raises WireError when the listener does not have the token."""
    proof, message = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _LISTENER, banner, greeting, message)):
        raise WireError("the listener does not have this job's token")
    return message


def _proof(token: str, side: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(token.encode(), side, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()

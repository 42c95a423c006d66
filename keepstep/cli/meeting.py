"""The first words with a controller: is it there, does it know the token, which job is it, and from where do we reach it.

What will never work is told apart from what may only need time.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from keepstep.cli.addresses import Endpoint
from keepstep.errors import KeepstepError, UsageError
from keepstep.wire.tls import TlsFiles, await_objection, explain

ATTEMPT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 << 20


class NotThere(KeepstepError):  # noqa: N818 - an outcome: try again
    """Nobody answers there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """`local_address`: this machine's address as the connection had it."""

    job: str
    local_address: str


def connection_to(endpoint: Endpoint, tls: TlsFiles | None, timeout_s: float) -> http.client.HTTPConnection:
    """An HTTP connection, not open yet; never through a proxy. Every address of a name is tried."""
    if tls is None:
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    context = tls.client(by_name=True)
    return http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)


def meet(endpoint: Endpoint, token: str, tls: TlsFiles | None) -> Meeting:
    """Ask once. Raises NotThere (try again later) and UsageError (it will never work, and why)."""
    whom = f"the controller at {endpoint}"
    connection = connection_to(endpoint, tls, ATTEMPT_TIMEOUT_S)
    shaken = False
    try:
        connection.connect()
        local = str(connection.sock.getsockname()[0])
        if isinstance(connection.sock, ssl.SSLSocket):
            shaken = True
            await_objection(connection.sock)
            shaken = False
        connection.request("GET", "/api/status", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        status, text = answer.status, answer.read(MAX_ANSWER_BYTES)
    except ssl.SSLError as error:
        raise UsageError(explain(error, whom) or str(error)) from None
    except (http.client.RemoteDisconnected, http.client.BadStatusLine, ConnectionResetError) as error:
        if tls is not None and shaken:
            raise UsageError(
                f"{whom} ends the connection once it has seen our certificate: is --tls-ca the same there?"
            ) from None
        if tls is None:
            hint = "it may want TLS (--tls-cert, --tls-key, --tls-ca)"
            raise NotThere(f"it closes the connection without an answer: {hint}") from None
        raise NotThere(f"it closes the connection without an answer ({error})") from None
    except OSError as error:
        raise NotThere(error.strerror or str(error) or type(error).__name__) from None
    except http.client.HTTPException as error:
        raise UsageError(f"{endpoint} answers, but is no controller of Keepstep ({error!r})") from None
    finally:
        connection.close()
    if status == 401:
        raise UsageError(f"{whom} does not know this token: is the file the same on every node?")
    if status != 200:
        raise UsageError(f"{endpoint} answers, but is no controller of Keepstep (HTTP status {status})")
    return Meeting(job=_job(endpoint, text), local_address=local)


def _job(endpoint: Endpoint, text: bytes) -> str:
    try:
        body: Any = json.loads(text)
        job = body["job"]
    except (ValueError, KeyError, TypeError, RecursionError):
        job = None
    if not isinstance(job, str) or not job or "/" in job or job.startswith("."):
        raise UsageError(f"{endpoint} answers, but is no controller of Keepstep")
    return job

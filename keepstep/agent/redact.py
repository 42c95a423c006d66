"""Takes secrets out of what is kept as evidence: the job's token, and what variables with telling names hold.

It knows values and a few shapes of text. A secret that a script prints and that stands in no variable can
only be caught by its shape.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|COOKIE|"
    r"_(KEY|PWD|AUTH|PAT|DSN)$|^(KEY|AUTH)$",
    re.I,
)
# A shorter value is more likely a number or a switch than a secret, and would tear the text to pieces.
MIN_SECRET_BYTES = 6
HIDDEN = b"***"

_URL = re.compile(rb"(?P<head>[a-z][a-z0-9+.-]{1,20}://)[^\s/@:]{0,200}:[^\s/@]{1,200}@", re.I)
_BEARER = re.compile(rb"(?P<head>\bBearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.I)
_NAMED = re.compile(
    rb"(?P<head>\b[A-Za-z0-9_-]{0,40}(?:token|secret|passwo?r?d|api[_-]?key|access[_-]?key)[\"']?\s{0,3}[=:\0]\s{0,3}[\"']?)"
    rb"[^\s\"',;&\0]{6,}",
    re.I,
)


class Redactor:
    """Learns secrets, then hides them wherever they stand."""

    def __init__(self, *secrets: str) -> None:
        self._secrets: set[bytes] = set()
        self._add(secrets)

    def learn(self, environment: Mapping[str, str]) -> None:
        """What variables with telling names hold is a secret from now on."""
        # A path that is there (an agent's socket, a key file's name) tells nothing, and stands in every stack.
        self._add(
            value
            for name, value in environment.items()
            if SECRET_NAME.search(name) and not (value.startswith("/") and os.path.exists(value))
        )

    def clean(self, data: bytes) -> bytes:
        """The same without secrets."""
        for secret in self._secrets:
            if secret in data:
                data = data.replace(secret, HIDDEN)
        for shape in (_URL, _BEARER, _NAMED):
            data = shape.sub(rb"\g<head>" + HIDDEN, data)
        return data

    def clean_text(self, text: str) -> str:
        return self.clean(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")

    def _add(self, values: Iterable[str]) -> None:
        found = {value.encode("utf-8", "surrogateescape") for value in values}
        self._secrets |= {value for value in found if len(value) >= MIN_SECRET_BYTES}

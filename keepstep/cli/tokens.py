"""The job's token: from a file or the environment, never from an argument, which everybody on a machine can read.

Who gives none on one node gets a random one. It does not know who shows the token to whom.
"""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from keepstep.errors import UsageError

TOKEN_VARIABLE = "KEEPSTEP_JOB_TOKEN"
FILE_VARIABLE = "KEEPSTEP_TOKEN_FILE"
LEAST_CHARACTERS = 16
MOST_CHARACTERS = 1024
HOW_TO_MAKE_ONE = "(umask 077; openssl rand -base64 32 > token)"


def find_token(
    argument: str | None, from_settings: Path | None, environ: MutableMapping[str, str]
) -> str | None:
    """The token that was given, or None. Takes the variable away, so that no process started later shows it.

    `argument`: --token-file as typed; `from_settings`: the same out of the environment or the settings file.
    Raises UsageError, in one line that never shows a token.
    """
    direct = environ.pop(TOKEN_VARIABLE, None)
    if argument is None and direct is not None:
        if environ.get(FILE_VARIABLE):
            raise UsageError(f"{TOKEN_VARIABLE} and {FILE_VARIABLE} are both set: one of them says the token")
        return check_token(direct, TOKEN_VARIABLE)
    return None if from_settings is None else read_token_file(from_settings)


def read_token_file(path: Path) -> str:
    """The token in a file that nobody but its owner can read. Raises UsageError."""
    try:
        # Looked at and read through one descriptor: what was checked is what is read.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UsageError(f"the token file {path} is no file")
            if about.st_mode & 0o077:
                mode = stat.S_IMODE(about.st_mode)
                raise UsageError(
                    f"the token file {path} can be read by others (mode {mode:03o}): chmod 600 {path}"
                )
            if about.st_uid not in (os.geteuid(), 0):
                raise UsageError(f"the token file {path} belongs to another user (number {about.st_uid})")
            text = file.read(MOST_CHARACTERS + 3)
    except OSError as error:
        raise UsageError(f"the token file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the token file {path} does not hold text") from None
    return check_token(text, f"the token file {path}")


def check_token(text: str, source: str) -> str:
    """A token without the white space around it. Raises UsageError for one that is no secret."""
    token = text.strip()
    if not token:
        raise UsageError(f"{source} is empty: make a token with {HOW_TO_MAKE_ONE}")
    if len(token) < LEAST_CHARACTERS:
        raise UsageError(
            f"{source} holds a token of {len(token)} characters, at least {LEAST_CHARACTERS} are needed: "
            f"make one with {HOW_TO_MAKE_ONE}"
        )
    if len(token) > MOST_CHARACTERS or not token.isascii() or not all(33 <= ord(c) < 127 for c in token):
        raise UsageError(f"{source} must hold one line of at most {MOST_CHARACTERS} plain characters")
    return token


def token_is_missing(why: str) -> UsageError:
    """The line that says how to give a token."""
    return UsageError(
        f"{why} needs a token that all nodes share: make one with {HOW_TO_MAKE_ONE}, give it to every node "
        f"as --token-file token (or {TOKEN_VARIABLE} in the environment)"
    )

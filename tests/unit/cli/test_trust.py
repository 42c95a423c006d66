"""Tokens and certificates: where they may come from, and one clear line for each that cannot serve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.cli.config import resolve
from keepstep.cli.tokens import find_token, read_token_file
from keepstep.cli.trust import choose_trust
from keepstep.errors import UsageError

TOKEN = "an-honest-token-of-a-job"


def token_file(folder: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_file_is_read_without_the_white_space_around(tmp_path: Path) -> None:
    assert read_token_file(token_file(tmp_path, f"{TOKEN}\n")) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_token_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=r"can be read by others \(mode 6\d\d\): chmod 600"):
        read_token_file(token_file(tmp_path, mode=mode))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("short", "at least 16 are needed"),
        (f"two\n{TOKEN}", "one line"),
        ("x" * 2000, "one line"),
    ],
)
def test_a_token_that_is_none_is_refused_and_never_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_token_file(token_file(tmp_path, text))
    assert not text or text not in str(caught.value)


def test_a_token_file_that_is_not_there_or_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_token_file(tmp_path / "none")
    with pytest.raises(UsageError, match="token file"):
        read_token_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="is no file"):
        read_token_file(tmp_path / "pipe")


def test_the_variable_is_taken_away_once_read_and_an_argument_beats_it(tmp_path: Path) -> None:
    environ = {"KEEPSTEP_JOB_TOKEN": f" {TOKEN}-2 "}
    assert find_token(None, None, environ) == f"{TOKEN}-2"
    assert environ == {}
    file = token_file(tmp_path)
    environ = {"KEEPSTEP_JOB_TOKEN": f"{TOKEN}-2"}
    assert find_token(str(file), file, environ) == TOKEN and environ == {}


def test_a_file_named_by_the_environment_and_a_token_in_it_are_one_too_many(tmp_path: Path) -> None:
    environ = {"KEEPSTEP_JOB_TOKEN": TOKEN, "KEEPSTEP_TOKEN_FILE": str(token_file(tmp_path))}
    settings = resolve({}, environ, tmp_path)
    with pytest.raises(UsageError, match="are both set"):
        choose_trust({}, settings, environ)


def test_a_token_never_stands_in_what_is_printed_of_the_settings(tmp_path: Path) -> None:
    environ = {"KEEPSTEP_JOB_TOKEN": TOKEN}
    assert TOKEN not in repr(choose_trust({}, resolve({}, environ, tmp_path), environ))


def test_part_of_the_tls_files_is_one_clear_line(tmp_path: Path) -> None:
    given = {"tls_cert": "a.pem", "tls_ca": "b.pem"}
    with pytest.raises(UsageError, match="--tls-key is missing: TLS needs"):
        choose_trust(given, resolve(given, {}, tmp_path), {})
    given["tls_key"] = "c.pem"
    with pytest.raises(UsageError, match=r"--tls-cert .*a.pem cannot be read"):
        choose_trust(given, resolve(given, {}, tmp_path), {})

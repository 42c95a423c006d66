"""Settings: argument beats environment beats file beats default, and a wrong value names its source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.cli.config import SETTINGS, resolve
from keepstep.errors import UsageError


def resolved(
    tmp_path: Path, given: dict[str, str] | None = None, environ: dict[str, str] | None = None
) -> dict:
    return resolve(given or {}, environ or {}, tmp_path)


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    assert resolved(tmp_path)["spares"] == 0
    (tmp_path / "keepstep.toml").write_text("[run]\nspares = 1\nlog-dir = 'from-file'\n")
    assert resolved(tmp_path)["spares"] == 1
    assert resolved(tmp_path)["log_dir"] == Path("from-file")
    assert resolved(tmp_path, {}, {"KEEPSTEP_SPARES": "2"})["spares"] == 2
    assert resolved(tmp_path, {"spares": "3"}, {"KEEPSTEP_SPARES": "2"})["spares"] == 3


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_can_come_from_each_source(tmp_path: Path, setting) -> None:  # type: ignore[no-untyped-def]
    text = {
        "mode": "observe",
        "record-limit": "1MiB",
        "labels": "rack=r1",
        "spare-node": "yes",
        "open-metrics": "yes",
        "webhook": "https://example.org/hook",
        "replace-unit": "node",
    }.get(setting.name, "3")
    values = [
        resolved(tmp_path, {setting.key: text})[setting.key],
        resolved(tmp_path, {}, {setting.variable: text})[setting.key],
    ]
    (tmp_path / "keepstep.toml").write_text(f"[run]\n{setting.name} = '{text}'\n")
    values.append(resolved(tmp_path)[setting.key])
    assert values[0] == values[1] == values[2] != setting.default


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("nproc_per_node", "0", "--nproc-per-node must be 1 or more, not 0"),
        ("nproc_per_node", "many", "--nproc-per-node must be a whole number, not 'many' (or cpu, gpu, auto)"),
        ("spares", "-1", "--spares must be 0 or more, not -1"),
        ("spares", "1.5", "--spares must be a whole number, not '1.5'"),
        ("slots", "0", "--slots must be 1 or more, not 0"),
        ("mode", "dry", "--mode must be run or observe, not 'dry'"),
        ("spare_timeout", "-5", "--spare-timeout must be 0 or more seconds, not -5"),
        ("spare_timeout", "nan", "--spare-timeout must be 0 or more seconds, not nan"),
        ("spare_timeout", "soon", "--spare-timeout must be a number of seconds, not 'soon'"),
        ("controller_port", "65536", "--controller-port must be 65535 or less, not 65536"),
        ("max_restarts", "-1", "--max-restarts must be 0 or more, not -1"),
        ("record_limit", "1KiB", "--record-limit must be between 4KiB and 8MiB, not 1KiB"),
        ("record_limit", "-4MiB", "--record-limit must be a size such as 4MiB, not '-4MiB'"),
        ("tee", "4", "--tee must be 0, 1, 2 or 3, or pairs such as 0:1,1:3, not '4'"),
        ("redirects", "0:1,2", "--redirects must be 0, 1, 2 or 3, or pairs"),
        ("webhook", "example.org", "--webhook must be an http:// or https:// address, not 'example.org'"),
        ("webhook", "https://me:pw@example.org", "--webhook must not hold a name or password"),
        ("metrics_port", "65536", "--metrics-port must be 65535 or less, not 65536"),
        ("log_dir", " ", "--log-dir must name a directory"),
        ("job", "../x", "--job must be 1 to 64 letters"),
        ("job", ".x", "--job must not begin with a dot"),
        ("job", "x" * 65, "--job must be 1 to 64 letters"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(
    tmp_path: Path, key: str, text: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(tmp_path, {key: text})
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_wrong_value_names_the_variable_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^KEEPSTEP_SPARES must be 0 or more, not -1$"):
        resolved(tmp_path, {}, {"KEEPSTEP_SPARES": "-1"})
    (tmp_path / "keepstep.toml").write_text("[run]\nspares = -2\n")
    with pytest.raises(UsageError, match=r"keepstep.toml: spares must be 0 or more, not -2$"):
        resolved(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[run]\nspears = 1\n", "unknown setting spears"),
        ("run = 3\n", "run must be a table"),
        ("[run\n", "is not valid TOML"),
        ("[run]\nspares = [1]\n", "spares must be a whole number"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "keepstep.toml").write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        resolved(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no configuration file"):
        resolve({}, {"KEEPSTEP_CONFIG": str(tmp_path / "none.toml")}, tmp_path)


def test_a_job_started_inside_a_worker_does_not_take_its_name(tmp_path: Path) -> None:
    assert resolved(tmp_path, {}, {"KEEPSTEP_JOB": "outer", "KEEPSTEP_SLOT": "4"})["job"] is None


def test_sizes_and_rank_words_are_understood(tmp_path: Path) -> None:
    for text, value in (("65536", 65536), ("64KiB", 65536), ("64k", 65536), ("2 MB", 2 << 20)):
        assert resolved(tmp_path, {"record_limit": text})["record_limit"] == value
    assert resolved(tmp_path, {"nproc_per_node": "cpu"})["nproc_per_node"] == len(os.sched_getaffinity(0))
    assert resolved(tmp_path, {"tee": "0:1,2:3"})["tee"] == "0:1,2:3"

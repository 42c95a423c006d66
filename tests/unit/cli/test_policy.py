"""`keepstep policy`: what it prints it accepts, every fault has its line, and recorded signals tell a story."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.main import run
from keepstep.cli.policy_file import check_policy, read_policy, write_policy
from keepstep.core.policy_rules import DEFAULT_RULES, Act, Policy
from keepstep.errors import UsageError


def test_what_show_prints_check_accepts_and_means_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["policy", "show"]) == 0
    file = tmp_path / "policy.toml"
    file.write_text(capsys.readouterr().out)
    assert run(["policy", "check", str(file)]) == 0
    assert f"{len(DEFAULT_RULES)} rules" in capsys.readouterr().out
    assert read_policy(file) == Policy()


def test_a_files_rules_come_first_and_replace_those_of_the_same_name() -> None:
    text = """
dry_run = true
[[rule]]
name = "mine"
action = "alert"
kind = "noise"
[[rule]]
name = "xid-lost"
action = "alert"
codes = [79]
kind = "xid"
"""
    policy, faults = check_policy(text)
    assert policy is not None and not faults and policy.dry_run
    assert [rule.name for rule in policy.rules[:2]] == ["mine", "xid-lost"]
    assert policy.rules[1].action is Act.ALERT and len(policy.rules) == len(DEFAULT_RULES) + 1
    alone, _ = check_policy("defaults = false\n" + text)
    assert alone is not None and len(alone.rules) == 2


FAULTY = '''dry_run = "no"
spares = 3
[[rule]]
name = "a"
action = "move"
why = """
several = lines
"""
[[rule]]
name = "b"
action = "alert"
times = 0
[[rule]]
action = "alert"
codes = "79"
[[rule]]
name = "b"
action = "alert"
severity = "awful"
'''


def test_every_fault_is_one_line_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(FAULTY)
    assert run(["policy", "check", str(file)]) == 2
    said = capsys.readouterr().err.splitlines()
    expected = [
        (1, "dry_run must be true or false"),
        (2, "unknown setting 'spares'"),
        (5, "rule 'a': action must be one of migrate, drain"),
        (6, "rule 'a': why must be a line of text"),
        (12, "rule 'b': times must be at least 1, not 0"),
        (13, "rule 3 has no name"),
        (15, "rule 3: codes must be a list"),
        (17, "two rules are called 'b': the first is in line 10"),
    ]
    assert len(said) == len(expected)
    for line, (number, text) in zip(said, expected, strict=True):
        assert line.startswith(f"{file}:{number}: ") and text in line
    with pytest.raises(UsageError, match=r"policy.toml:1: .*and 7 more"):
        read_policy(file)


@pytest.mark.parametrize(
    ("text", "line"), [("a = 1\nb = [1,\n", 2), ("x = \n", 1), ("rule = 3\n", 1), ("[[rule]\n", 1)]
)
def test_what_is_no_toml_or_no_list_of_rules_has_a_line_too(text: str, line: int) -> None:
    policy, faults = check_policy(text)
    assert policy is None and faults[0].line == line


def test_a_policy_survives_being_written(tmp_path: Path) -> None:
    policy = Policy(rules=DEFAULT_RULES[3:5], dry_run=True, spares_per_hour=1, moves_per_rank_per_hour=0)
    assert check_policy(write_policy(policy)) == (policy, [])


def test_recorded_signals_tell_what_would_have_been_done_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xid = {"source": "kernel", "kind": "xid", "severity": "critical", "slot": 0}
    slow = {"source": "straggler", "kind": "slow_rank", "slot": 1, "value": 1.2}
    lines = [
        {"at_s": 0.0, "node": "a", **xid, "code": 13},
        *({"at_s": at_s, "node": "a", **slow} for at_s in (1.0, 12.0)),
        {"at_s": 20.0, "node": "a", **xid, "code": 79},
        *({"at_s": at_s, "node": "b", **slow, "rank": 1} for at_s in (100.0, 112.0)),
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run(["policy", "test", str(file)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert ["ignore;" in said[0], "migrate rank 1;" in said[1], "rebuild rank 0;" in said[2]] == [True] * 3
    assert "no migrate rank 1, because rank 1 was moved for it and is no better" in said[3] and len(said) == 4
    assert "slow_rank 1.2 on slot 1 of a, seen by straggler" in said[1]
    assert run(["policy", "test", str(file), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["did"] for one in told] == ["ignore", "migrate", "rebuild", "alert"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nothing", "not a recorded signal"),
        ('{"at_s": 1}', "required keyword"),
        ('{"node": "a", "source": "x", "kind": "y"}', "at_s' is missing"),
        ('{"at_s": 1, "node": "a", "source": "x", "kind": "y", "slot": "0"}', "slot cannot be '0'"),
        (
            '{"at_s": 1, "node": "a", "source": "x", "kind": "y", "severity": "bad"}',
            "severity must be one of",
        ),
    ],
)
def test_a_line_that_is_no_signal_is_named(
    line: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(line)
    assert run(["policy", "test", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"{file}:1: " in said and why in said


def test_the_built_in_rules_stand_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "policy.md").read_text(encoding="utf-8")
    for rule in DEFAULT_RULES:
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{rule.name}` |")]
        assert f"| {rule.action.value} | {rule.quarantine} | {rule.why} |" in row
        assert all(str(code) in row for code in rule.codes)

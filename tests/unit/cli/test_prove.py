"""`keepstep prove`: what counts as a difference, what as a proof, and bad input in one line each."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from keepstep.cli import prove_runs
from keepstep.cli.main import run
from keepstep.cli.prove_compare import Death, Difference, first_difference, usual_cause
from keepstep.cli.prove_faults import Strike, beyond_the_end, deaths, read_faults, strikes
from keepstep.cli.prove_record import RunRecord, read_record
from keepstep.cli.prove_runs import NoProof, Proof, Request, Run, carry_out, verdict
from keepstep.cli.prove_view import ProveView
from keepstep.core.faults import parse_fault
from keepstep.errors import UsageError

STEPS = 5
Change = Callable[[int, dict[str, object]], dict[str, object] | None]


def write_run(run_dir: Path, change: Change = lambda rank, line: line, *, ranks: int = 2) -> RunRecord:
    """The reports of a run of two ranks; `change` alters a line or leaves it out (None)."""
    (run_dir / "reports").mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        lines: list[dict[str, object]] = []
        for step in range(STEPS):
            stamp = {"generation": 0, "worker": rank, "time_s": 100.0 + step}
            lines.append({"step": step, "loss": 1.0 / (step + 1), **stamp})
            tensors = {"model.weight": f"w{step}", "model.bias": f"b{step}"}
            lines.append({"fingerprint": True, "step": step, "tensors": tensors, **stamp})
        lines.append({"final": True, "step": STEPS, "digest": "d", "tensors": {"model.weight": "w"}})
        kept = [changed for line in lines if (changed := change(rank, line)) is not None]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (run_dir / "reports" / f"rank-{rank}.jsonl").write_text(text)
    return read_record(run_dir)


def at(rank: int, step: int, kind: str, **values: object) -> Change:
    """Change one line; without values it is left out."""

    def change(rank_: int, line: dict[str, object]) -> dict[str, object] | None:
        is_kind = {"fingerprint": "fingerprint" in line, "final": "final" in line, "value": "loss" in line}[
            kind
        ]
        if rank_ != rank or line["step"] != step or not is_kind:
            return line
        return {**line, **values} if values else None

    return change


def difference(tmp_path: Path, change: Change, *lost: Death) -> Difference | None:
    return first_difference(write_run(tmp_path / "a"), write_run(tmp_path / "b", change), lost)


# ---- what differs -----------------------------------------------------------------------------------


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    assert difference(tmp_path, lambda rank, line: line) is None


def test_the_first_differing_tensor_is_named_with_step_and_rank(tmp_path: Path) -> None:
    found = difference(tmp_path, at(1, 3, "fingerprint", tensors={"model.weight": "w3", "model.bias": "x"}))
    assert found == Difference(what="tensor", name="model.bias", rank=1, step=3, expected="b3", found="x")
    assert str(found) == "the tensor model.bias after step 3 on rank 1"


def test_the_earliest_step_wins_and_within_it_the_reported_value(tmp_path: Path) -> None:
    tensor = at(0, 2, "fingerprint", tensors={"model.weight": "x", "model.bias": "b2"})
    value = at(1, 2, "value", loss=0.5)
    later = at(0, 4, "value", loss=9.0)
    found = difference(
        tmp_path, lambda r, line: later(r, value(r, tensor(r, line) or {}) or {}) if line else None
    )
    assert found is not None and (found.what, found.name, found.rank, found.step) == ("value", "loss", 1, 2)


def test_values_are_compared_by_their_bits(tmp_path: Path) -> None:
    assert difference(tmp_path / "1", at(0, 0, "value", loss=1.0000000000000002)) is not None
    zero = write_run(tmp_path / "zero", at(0, 0, "value", loss=0.0))
    minus = write_run(tmp_path / "minus", at(0, 0, "value", loss=-0.0))
    assert first_difference(zero, minus) is not None


def test_a_loss_that_is_nan_in_both_runs_is_no_difference(tmp_path: Path) -> None:
    nan = at(0, 3, "value", loss=float("nan"))
    assert first_difference(write_run(tmp_path / "a", nan), write_run(tmp_path / "b", nan)) is None


def test_a_final_state_that_differs_is_found_though_every_step_agrees(tmp_path: Path) -> None:
    found = difference(tmp_path, at(0, STEPS, "final", tensors={"model.weight": "x"}))
    assert found is not None and (found.what, found.step) == ("tensor", None)


def test_a_step_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    found = difference(tmp_path, at(1, 4, "value"))
    assert found is not None and found.what == "missing" and found.step == 4


def test_a_tensor_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    found = difference(tmp_path, at(1, 4, "fingerprint", tensors={"model.weight": "w4"}))
    assert found is not None and found.name == "model.bias" and found.found is None


def test_a_rank_that_died_after_its_commit_may_lack_that_steps_digests(tmp_path: Path) -> None:
    lacking = at(1, 3, "fingerprint")
    assert difference(tmp_path, lacking, Death(rank=1, step=3)) is None
    assert difference(tmp_path, lacking, Death(rank=1, step=4)) is None
    for elsewhere in (Death(rank=0, step=3), Death(rank=1, step=2), Death(rank=1, step=5)):
        assert difference(tmp_path, lacking, elsewhere) is not None
    assert difference(tmp_path, lacking) is not None


def test_a_death_excuses_no_reported_value_and_no_wrong_digest(tmp_path: Path) -> None:
    death = Death(rank=1, step=3)
    assert difference(tmp_path, at(1, 3, "value"), death) is not None
    wrong = at(1, 3, "fingerprint", tensors={"model.weight": "x", "model.bias": "b3"})
    assert difference(tmp_path, wrong, death) is not None


def test_a_run_without_digests_proves_nothing(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "a", lambda rank, line: None if "tensors" in line else line)
    with pytest.raises(ValueError, match="left no digest"):
        first_difference(bare, bare)


def test_a_reported_value_can_be_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", at(1, 2, "value", loss=7.0))
    ours, theirs = (read_record(tmp_path / name, ignored=frozenset({"loss"})) for name in "ab")
    assert first_difference(ours, theirs) is None


# ---- what was reported --------------------------------------------------------------------------------


def test_the_last_report_of_a_step_counts(tmp_path: Path) -> None:
    write_run(tmp_path)
    with (tmp_path / "reports" / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 4, "generation": 1, "worker": 7, "time_s": 1.0, "loss": 0.25}\n')
    record = read_record(tmp_path)
    assert record.values[0][4] == {"loss": 0.25}
    assert record.steps == STEPS and len(record.lines) == 2 * STEPS + 1


def test_only_committed_steps_count(tmp_path: Path) -> None:
    """A value that is reported after optimizer.step() stands in the next step's line."""
    write_run(tmp_path)
    with (tmp_path / "reports" / "rank-0.jsonl").open("a") as file:
        file.write('{"step": %d, "generation": 0, "worker": 0, "time_s": 1.0, "loss": 0.25}\n' % STEPS)  # noqa: UP031
    record = read_record(tmp_path)
    assert record.steps == STEPS and record.noted_steps == list(range(STEPS + 1))


def test_a_line_torn_by_a_death_does_not_hide_the_one_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "reports" / "rank-0.jsonl"
    file.parent.mkdir()
    whole = '{"fingerprint": true, "step": 3, "tensors": {"a": "00", "b": "11"}}'
    file.write_text('{"fingerprint": true, "step": 2, "tensors": {"a": "00", "b": "1' + whole + "\n")
    prints = read_record(tmp_path).prints[0]
    assert list(prints) == [3] and prints[3].tensors() == {"a": "00", "b": "11"}


def test_a_growing_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    file = tmp_path / "reports" / "rank-0.jsonl"
    file.parent.mkdir()
    lines = [
        '{"fingerprint": true, "step": %d, "tensors": {"a": "%02d"}}\n' % (step, step)  # noqa: UP031
        for step in range(3)
    ]
    record = RunRecord(tmp_path)
    file.write_text(lines[0] + lines[1][:20])
    record.poll()
    assert record.steps == 1
    file.write_text("".join(lines))
    record.poll()
    assert [record.prints[0][step].tensors() for step in range(3)] == [{"a": "00"}, {"a": "01"}, {"a": "02"}]


# ---- what usually causes it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "agrees", "said"),
    [
        (Difference(what="value", name="loss", rank=0, step=0), False, "torch.manual_seed"),
        (Difference(what="tensor", name="w", rank=0, step=3), False, "use_deterministic_algorithms"),
        (Difference(what="value", name="tokens_per_s", rank=0, step=0), True, "--ignore tokens_per_s"),
        (Difference(what="missing", name="x", rank=0, step=3), False, "depends on time"),
    ],
)
def test_the_usual_cause_fits_the_difference(found: Difference, agrees: bool, said: str) -> None:
    assert said in usual_cause(found, state_agrees=agrees)


# ---- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "beyond"), [("backward", True), ("random", True), ("gate", False), ("between", False)]
)
def test_after_the_last_step_only_the_last_gate_can_be_struck(place: str, beyond: bool) -> None:
    assert beyond_the_end(parse_fault(f"rank=0,step=5,at={place}"), STEPS) is beyond
    assert not beyond_the_end(parse_fault(f"rank=0,step=4,at={place}"), STEPS)
    assert beyond_the_end(parse_fault(f"rank=0,step=6,at={place}"), STEPS)


def test_a_fault_has_struck_when_its_worker_is_a_victim(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0.done").write_text("1.0 worker 4\n")
    (tmp_path / "faults" / "1.done").write_text("2.0 worker 5\n")
    faults = read_faults(["rank=0,step=1", "rank=1,step=2"], ["rank=1,step=3"], 2)
    incidents = [{"number": 1, "victims": [{"worker": 4, "rank": 0, "step": 1}]}]
    struck, marked_only, never = strikes(faults, tmp_path, incidents)
    assert (struck.worker, struck.incident, struck.why_not(STEPS)) == (4, 1, "")
    assert not marked_only.struck and "worker 5 had finished before" in marked_only.why_not(STEPS)
    assert not never.struck and "rank 1 never came to at=random" in never.why_not(STEPS)
    assert deaths(incidents) == [Death(rank=0, step=1)]
    assert "the script has 2 steps, the last is step 1" in never.why_not(2)


# ---- what the runs come to -------------------------------------------------------------------------------


def prove_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    second: Change = lambda rank, line: line,
    harmed: Change = lambda rank, line: line,
    harmed_exit: int = 0,
    struck: bool = True,
    faults: tuple[str, ...] = ("rank=1,step=2",),
) -> Proof:
    """A proof over made-up runs."""
    incidents = [
        {
            "number": 1,
            "steps_recomputed": 1,
            "steps_lost": 0,
            "victims": [{"worker": 1, "rank": 1, "step": 2}],
        }
    ]

    def made_up(request: Request, run_dir: Path, view: ProveView, *, limit_s: float, **given: object) -> Run:
        with_faults = bool(given.get("faults"))
        change = harmed if with_faults else second if run_dir.name == "undisturbed-2" else None
        record = write_run(run_dir, change) if change else write_run(run_dir)
        if with_faults and struck:
            (run_dir / "faults").mkdir()
            (run_dir / "faults" / "0.done").write_text("1.0 worker 1\n")
        return Run(
            record=record,
            exit_code=harmed_exit if with_faults else 0,
            seconds=1.0,
            incidents=incidents if with_faults and struck else [],
            last_output="the end",
        )

    monkeypatch.setattr(prove_runs, "_run", made_up)
    return carry_out(request_for(*faults), tmp_path, ProveView(Console(file=io.StringIO())))


def request_for(*faults: str) -> Request:
    return Request(
        script="train.py",
        args=(),
        ranks=2,
        spares=1,
        faults=read_faults(faults, [], 2),
        ignored=frozenset(),
        limit_s=None,
    )


def said(proof: Proof) -> str:
    return "\n".join(verdict(request_for("rank=1,step=2"), proof))


def test_three_equal_runs_and_a_fault_that_struck_are_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = prove_with(tmp_path, monkeypatch, harmed=at(1, 2, "fingerprint"))
    assert (proof.exit_code, proof.identical, proof.recomputed_steps) == (0, True, 1)
    assert said(proof).startswith("Identical: 5 steps on 2 ranks")
    told = proof.as_json()
    assert told["faults"][0]["struck"] and told["first_difference"] is None and len(told["incidents"]) == 1


def test_a_script_that_does_not_repeat_itself_proves_nothing_about_keepstep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = prove_with(tmp_path, monkeypatch, second=at(0, 1, "value", loss=3.0))
    assert (proof.exit_code, proof.deterministic, proof.identical) == (3, False, None)
    assert "nothing is proven about Keepstep" in said(proof) and "'loss' in step 1 on rank 0" in said(proof)
    assert not (tmp_path / "with-faults").exists()


def test_a_difference_with_faults_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = prove_with(tmp_path, monkeypatch, harmed=at(0, 4, "value", loss=3.0))
    assert (proof.exit_code, proof.identical) == (1, False)
    assert said(proof).startswith(
        "Not identical: the first difference is the reported value 'loss' in step 4"
    )
    told: Mapping[str, object] = proof.as_json()["first_difference"]
    assert told == {"what": "value", "name": "loss", "rank": 0, "step": 4, "expected": 0.2, "found": 3.0}


def test_a_run_that_does_not_survive_its_faults_is_not_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = prove_with(tmp_path, monkeypatch, harmed_exit=1)
    assert (proof.exit_code, proof.identical) == (1, False)
    assert "ends with exit code 1" in said(proof) and "the end" in said(proof)


def test_a_run_that_fails_before_any_fault_struck_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoProof, match="exit code 1 before any fault struck"):
        prove_with(tmp_path, monkeypatch, harmed_exit=1, struck=False)


def test_a_fault_that_never_struck_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = prove_with(tmp_path, monkeypatch, struck=False)
    assert (proof.exit_code, proof.identical) == (4, None)
    assert said(proof).startswith("No proof")


def test_a_fault_beyond_the_end_is_found_before_the_third_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = prove_with(tmp_path, monkeypatch, faults=("rank=1,step=2", "rank=1,step=99"))
    assert proof.exit_code == 4 and not (tmp_path / "with-faults").exists()
    assert "the script has 5 steps, the last is step 4" in said(proof)


# ---- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prove --kill rank=1,step=7", "no script given: keepstep prove [OPTIONS] SCRIPT [ARGS]..."),
        ("prove --kill rank=1,step=7 missing.py", "there is no script missing.py"),
        ("prove train.py", "no fault given"),
        ("prove --kill step=7 train.py", "--kill: fault 'step=7': rank is missing"),
        ("prove --kill rank=1 train.py", "--kill: fault 'rank=1': step is missing"),
        ("prove --kill rank=x,step=7 train.py", "rank must be a whole number, not 'x'"),
        (
            "prove --kill rank=1,step=7,at=nowhere train.py",
            "at='nowhere' is no place of a step; one of: random",
        ),
        ("prove --kill 7 train.py", "'7' is not NAME=VALUE, as in rank=2,step=7"),
        ("prove --stop rank=1,step=7,kind=kill train.py", "--stop: fault"),
        (
            "prove --ranks 2 --kill rank=2,step=7 train.py",
            "--kill: fault 'rank=2,step=7': with 2 ranks the last one is rank 1",
        ),
        ("prove --kill rank=1,step=7,at=setup train.py", "at=setup is before the first step: step=0"),
        ("prove --ranks none --kill rank=1,step=7 train.py", "Invalid value for '--ranks'"),
        ("prove --ranks 0 --kill rank=0,step=7 train.py", "Invalid value for '--ranks'"),
        ("prove --spares -1 --kill rank=1,step=7 train.py", "Invalid value for '--spares'"),
        ("prove --limit 0 --kill rank=1,step=7 train.py", "Invalid value for '--limit'"),
        ("prove --keep train.py --kill rank=1,step=7 train.py", "cannot write train.py"),
        ("prove --keep kept --kill rank=1,step=7 train.py", "kept already holds a proof"),
        ("prove --nonsense train.py", "No such option: --nonsense"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "kept" / "with-faults").mkdir(parents=True)
    assert run(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_fault_of_the_other_option_is_refused() -> None:
    with pytest.raises(UsageError, match="kind=stop"):
        read_faults(["rank=0,step=1,kind=stop"], [], 2)


def test_a_strike_says_its_fault_in_json() -> None:
    told = Strike(fault=parse_fault("rank=0,step=1,at=gate")).as_json()
    assert told == {
        "rank": 0,
        "step": 1,
        "at": "gate",
        "kind": "kill",
        "struck": False,
        "worker": None,
        "incident": None,
    }

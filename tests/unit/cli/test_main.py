"""The command line: bad input is one line and code 2, and torch is never loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli.main import COMMANDS, run


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "unreadable.py").write_text("")
    (tmp_path / "unreadable.py").chmod(0)
    (tmp_path / "folder").mkdir()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line; nothing may have been written but that."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run", "no script given: keepstep run [OPTIONS] SCRIPT [ARGS]..."),
        ("run missing.py", "there is no script missing.py"),
        ("run folder", "folder is not a file"),
        ("run -m no_such_module_at_all", "there is no module no_such_module_at_all"),
        ("run --no-python no-such-program", "there is no program no-such-program"),
        ("run -m --no-python x", "exclude each other"),
        (
            "run --nproc-per-node 2 --spares 2 --slots 3 train.py",
            "2 ranks and 2 spares need 4 slots, --slots gives 3",
        ),
        ("run --spares -1 train.py", "--spares must be 0 or more"),
        ("run --spares", "requires an argument"),
        ("run --mode dry train.py", "--mode must be run or observe"),
        ("run --log-dir /proc/none train.py", "cannot write the log directory /proc/none"),
        ("run --log-dir train.py train.py", "cannot write the log directory train.py"),
        ("run --nnodes 2 train.py", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ("run --nnodes 2 --rdzv-endpoint 127.0.0.1:1 train.py", "--nnodes 2 needs --node-rank"),
        ("run --nnodes 1:4 train.py", "--nnodes is 1:4: give one number, since the world never shrinks"),
        ("run --nnodes two train.py", "--nnodes must be a whole number"),
        ("run --node-rank 1 train.py", "needs --rdzv-endpoint HOST:PORT"),
        (
            "run --nnodes 2 --node-rank 0 --rdzv-endpoint 127.0.0.1:1 train.py",
            "a job on several nodes needs a token that all nodes share",
        ),
        (
            "run --nnodes 2 --node-rank 0 --rdzv-endpoint 127.0.0.1:0 train.py",
            "--rdzv-endpoint needs a port that every node knows",
        ),
        ("run --nnodes 2 --node-rank 0 --rdzv-endpoint a:b:c train.py", "--rdzv-endpoint must be HOST:PORT"),
        ("run --bind 0.0.0.0:29400 train.py", "a listener on 0.0.0.0 needs a token"),
        ("run --tls-cert a.pem train.py", "--tls-key is missing"),
        ("run --token-file nowhere train.py", "the token file nowhere cannot be read"),
        ("run --labels rack train.py", "--labels must be KEY=VALUE pairs"),
        ("agent", "which controller?"),
        ("agent --join host:port", "--join must be HOST:PORT"),
        ("agent --join http://127.0.0.1:1?token=abc", "--join must not carry a token"),
        ("agent --join 127.0.0.1:1", "an agent needs the job's token"),
        ("controller", "no script given: keepstep controller"),
        ("run --run-path train.py", "--run-path is not supported"),
        ("run --numa-binding node train.py", "--numa-binding is not supported"),
        ("run --local-ranks-filter x train.py", "--local-ranks-filter must be numbers"),
        ("run --unknown train.py", "No such option: --unknown"),
        ("run -m folder", "folder is a package without __main__"),
        ("run -m folder.train", "there is no module folder.train: folder has no train"),
        ("prove -m no_such_module.train", "there is no module no_such_module.train"),
        ("prove -m folder.train", "folder has no train"),
        ("prove --no-python train.py", "name the Python script, or -m MODULE"),
        ("prove --log-dir logs train.py", "keep them with --keep DIR"),
        ("prove --nnodes 2 train.py", "a proof runs on this machine alone"),
        ("prove --max-restarts 2 train.py", "--max-restarts: a proof has the faults that it was ordered"),
        ("prove train.py", "no fault given"),
        ("nonsense", "No such command 'nonsense'"),
        ("status folder", "folder holds no ledger"),
        ("status missing", "there is no run directory missing"),
        ("status", "no run found under keepstep-runs/"),
        ("status folder --run other", "two run directories given"),
        ("incidents", "no run found"),
        ("incidents --run folder show 1", "holds no ledger"),
        ("incidents show", "Missing argument 'N'"),
        ("incidents show zero", "Invalid value"),
        ("incidents show 0", "Invalid value"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert said in refused(capsys, *arguments.split())


def test_an_unreadable_script_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "os.access", lambda path, mode, **_: "unreadable" not in str(path)
    )  # tests may run as root
    assert "cannot read unreadable.py: permission denied" in refused(capsys, "run", "unreadable.py")


def test_nothing_is_created_by_a_refused_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, "run", "missing.py")
    assert not (tmp_path / "keepstep-runs").exists()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], [], ["run", "--help"], ["incidents", "--help"]]
)
def test_help_is_no_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 0
    assert "keepstep" in capsys.readouterr().out


def test_every_flag_of_torchrun_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Known, whether honoured, said to be without effect, or refused: never "no such option"."""
    code = "from torch.distributed.run import get_args_parser as p; print(*p()._option_string_actions)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    options = [option for option in done.stdout.split() if option not in ("-h", "--help")]
    assert "--nproc-per-node" in options
    for option in options:
        run(["run", option, "1", "missing.py"])
        assert "No such option" not in capsys.readouterr().err, option


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_torch_is_never_loaded_for_help(arguments: list[str]) -> None:
    code = (
        "import sys; from keepstep.cli.main import run; run(sys.argv[1:])\n"
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        cwd=Path(__file__).parents[3],
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done


def test_torch_is_not_loaded_by_the_launcher_either() -> None:
    code = "import sys, keepstep.cli.launch; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0

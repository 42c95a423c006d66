"""`keepstep prove`: the user's own script, twice left alone and once harmed, compared bit for bit.

Only when the two undisturbed runs agree does the third say anything about Keepstep. Here are the command line
and the folder of the runs; `prove_runs` carries them out. Exit codes: EXIT_* there, and docs/commands/prove.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.errors import UsageError

COMMAND: dict[str, Any] = {
    # Everything behind the script is the script's own, flags included.
    "context_settings": {"allow_interspersed_args": False},
    "options_metavar": "[OPTIONS]",
}

# Flags of `keepstep run` that a proof cannot have, and what to do instead.
REFUSED = {
    "no_python": "--no-python: a program's values and tensors cannot be compared: name the Python script, or -m MODULE",
    "log_dir": "--log-dir: a proof has three run directories: keep them with --keep DIR",
    "nnodes": "--nnodes: a proof runs on this machine alone: --ranks N says how many ranks it has",
    "max_restarts": "--max-restarts: a proof has the faults that it was ordered: --spares N says who takes over",
}


def prove(
    ctx: typer.Context,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="The training script.")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "--nproc-per-node", "--nproc_per_node", min=1, max=4096, metavar="N", help="Ranks of each run.")] = 2,
    kill: Annotated[list[str] | None, typer.Option(metavar="rank=R,step=S[,at=PLACE]", help="SIGKILL the worker of rank R in step S (the first is 0). Can be repeated.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="rank=R,step=S[,at=PLACE]", help="SIGSTOP it instead. Can be repeated.")] = None,
    spares: Annotated[int, typer.Option(min=0, max=4096, metavar="N", help="Spares of the run with faults.")] = 1,
    ignore: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Leave out a reported value, such as a speed. Can be repeated.")] = None,
    limit: Annotated[float | None, typer.Option(min=1.0, metavar="SECONDS", help="The longest that one run may take [without faults: none; with: 10 times the undisturbed, and 300].", show_default=False)] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the three run directories here.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.", show_default=False)] = False,
    no_python: Annotated[bool, typer.Option("--no-python", "--no_python", hidden=True)] = False,
    log_dir: Annotated[str | None, typer.Option("--log-dir", "--log_dir", hidden=True)] = None,
    nnodes: Annotated[str | None, typer.Option(hidden=True)] = None,
    max_restarts: Annotated[str | None, typer.Option("--max-restarts", "--max_restarts", hidden=True)] = None,
) -> None:  # fmt: skip
    """Run a script twice undisturbed and once with faults, and compare every value and tensor bit for bit."""
    from rich.console import Console

    from keepstep.cli.jobs import stoppable
    from keepstep.cli.options import check_script
    from keepstep.cli.prove_faults import read_faults
    from keepstep.cli.prove_runs import (
        EXIT_IDENTICAL,
        EXIT_NO_ANSWER,
        NoProof,
        Request,
        carry_out,
        verdict,
    )
    from keepstep.cli.prove_view import ProveView

    for name, instead in REFUSED.items():
        if ctx.params.get(name):
            raise UsageError(instead)
    if not script:
        raise UsageError("no script given: keepstep prove [OPTIONS] SCRIPT [ARGS]...")
    check_script(script, "module" if module else "script")
    request = Request(
        script=script,
        module=module,
        args=tuple(args or ()),
        ranks=ranks,
        spares=spares,
        faults=read_faults(kill or (), stop or (), ranks),
        ignored=frozenset(ignore or ()),
        limit_s=limit,
    )
    console = Console(stderr=True, highlight=False)
    with stoppable(), _folder(keep) as folder:
        try:
            with ProveView(console) as view:
                proof = carry_out(request, folder.path, view)
        except NoProof as error:
            folder.keep = True
            typer.echo(f"keepstep: nothing is proven: {error}", err=True)
            _say_where(folder)
            raise typer.Exit(EXIT_NO_ANSWER) from None
        folder.keep = proof.exit_code != EXIT_IDENTICAL
        if as_json:
            typer.echo(json.dumps(proof.as_json(), indent=2))
        typer.echo("\n".join(verdict(request, proof)), err=as_json)
        _say_where(folder)
    raise typer.Exit(proof.exit_code)


# ---- around the runs ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Folder:
    """Where the run directories lie. `keep`: not removed at the end."""

    path: Path
    keep: bool = False


def _say_where(folder: Folder) -> None:
    if folder.keep:
        typer.echo(f"run directories: {folder.path}", err=True)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Folder]:
    """The folder that the user named, or one of our own that is removed when all went well."""
    if keep is None:
        folder = Folder(Path(tempfile.mkdtemp(prefix="keepstep-prove-")))
        try:
            yield folder
        finally:
            if not folder.keep:
                shutil.rmtree(folder.path, ignore_errors=True)
        return
    from keepstep.cli.prove_runs import RUNS

    if any((keep / name).exists() for name in RUNS):
        raise UsageError(f"{keep} already holds a proof: choose another --keep")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {keep}: {error.strerror}") from None
    if not os.access(keep, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {keep}: permission denied")
    yield Folder(keep.resolve(), keep=True)

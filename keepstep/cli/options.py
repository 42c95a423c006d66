"""What one `keepstep run` was asked for, checked as a whole: the script is there, the numbers fit together."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.cli.config import resolve
from keepstep.cli.torchrun_flags import ranks_filter
from keepstep.controller.rundir import DEFAULT_PARENT
from keepstep.errors import UsageError

Launch = Literal["script", "module", "program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything that `keepstep run` needs, resolved and checked."""

    script: str
    args: tuple[str, ...]
    launch: Launch
    world_size: int
    spares: int
    slots: int
    mode: Literal["run", "observe"]
    job: str
    run_dir: Path
    spare_timeout_s: float
    stop_grace_s: float
    max_restarts: int | None
    record_limit_bytes: int
    controller_port: int
    tee: str
    redirects: str
    shown_slots: frozenset[int] | None


def choose(
    given: Mapping[str, str | None],
    *,
    script: str | None,
    args: tuple[str, ...],
    launch: Launch,
    both: bool,
    environ: Mapping[str, str],
    directory: Path,
) -> RunOptions:
    """Resolve and check. Raises UsageError with one line about the first thing that is wrong."""
    settings = resolve(given, environ, directory, given.get("config"))
    if both:
        raise UsageError("--module and --no-python exclude each other")
    if not script:
        raise UsageError("no script given: keepstep run [OPTIONS] SCRIPT [ARGS]...")
    check_script(script, launch)
    world_size, spares = settings["nproc_per_node"], settings["spares"]
    slots = settings["slots"] if settings["slots"] is not None else world_size + spares
    if world_size + spares > slots:
        raise UsageError(
            f"{world_size} ranks and {spares} spares need {world_size + spares} slots, --slots gives {slots}"
        )
    job = settings["job"] or make_job_name(script)
    return RunOptions(
        script=script,
        args=args,
        launch=launch,
        world_size=world_size,
        spares=spares,
        slots=slots,
        mode=settings["mode"],
        job=job,
        run_dir=settings["log_dir"] or directory / DEFAULT_PARENT / job,
        spare_timeout_s=settings["spare_timeout"],
        stop_grace_s=settings["shutdown_timeout"],
        max_restarts=settings["max_restarts"],
        record_limit_bytes=settings["record_limit"],
        controller_port=settings["controller_port"],
        tee=settings["tee"],
        redirects=settings["redirects"],
        shown_slots=ranks_filter(given.get("local_ranks_filter")),
    )


def check_script(script: str, launch: Launch) -> None:
    """Raises UsageError when there is nothing there that could be started."""
    if launch == "module":
        try:
            found = importlib.util.find_spec(script.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        # The worker's directory is on its path, the launcher's need not be.
        if found is None and not any(Path(script.partition(".")[0] + end).exists() for end in ("", ".py")):
            raise UsageError(f"there is no module {script}")
        return
    if launch == "program":
        if shutil.which(script) is None:
            raise UsageError(f"there is no program {script} that can be run")
        return
    path = Path(script)
    if not path.exists():
        raise UsageError(f"there is no script {script}")
    if not path.is_file():
        raise UsageError(f"{script} is not a file: name the training script")
    if not os.access(path, os.R_OK):
        raise UsageError(f"cannot read {script}: permission denied")


def make_job_name(script: str) -> str:
    """Tells runs apart and sorts by time: train-20261130-221500-3f2a."""
    stem = (
        "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(script).stem).strip("-")[:32] or "job"
    )
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"

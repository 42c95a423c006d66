"""What a worker is started with: its command line and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.wire.messages import JobSpec
from keepstep.wire.tls import TlsFiles

# What another launcher around us may have left: a script that reads it early would take a wrong rank.
_FOREIGN = ("RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FOREIGN_PREFIX = "TORCHELASTIC_"
# A worker has the token as KEEPSTEP_TOKEN; where its launcher had it from is not its affair.
_LAUNCHERS_OWN = ("KEEPSTEP_JOB_TOKEN", "KEEPSTEP_TOKEN_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one worker lives: its number, slot and files."""

    worker: int
    node: str
    slot: int
    slots: int
    socket: Path
    page: Path
    stacks: Path
    run_dir: Path


def command_line(spec: JobSpec) -> list[str]:
    """The words to execute, by `spec.launch`: script, module (python -m) or program (as it is)."""
    match spec.launch:
        case "script":
            return [sys.executable, "-u", spec.script, *spec.args]
        case "module":
            return [sys.executable, "-u", "-m", spec.script, *spec.args]
        case "program":
            return [spec.script, *spec.args]


def worker_environment(
    spec: JobSpec,
    place: Place,
    token: str,
    base: Mapping[str, str] | None = None,
    *,
    tls: TlsFiles | None = None,
) -> dict[str, str]:
    """The whole environment of a worker. RANK is left out: `keepstep.init` sets it with the rank."""
    inherited = os.environ if base is None else base
    found = {
        name: value
        for name, value in inherited.items()
        if name not in (*_FOREIGN, *_LAUNCHERS_OWN) and not name.startswith(_FOREIGN_PREFIX)
    }
    found.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores
    found.update(spec.env)
    found.update(
        KEEPSTEP_SOCKET=str(place.socket),
        KEEPSTEP_TOKEN=token,
        KEEPSTEP_JOB=spec.job,
        KEEPSTEP_WORKER=str(place.worker),
        KEEPSTEP_NODE=place.node,
        KEEPSTEP_SLOT=str(place.slot),
        KEEPSTEP_PAGE=str(place.page),
        KEEPSTEP_STACKS=str(place.stacks),
        KEEPSTEP_RUN_DIR=str(place.run_dir),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_RANK=str(place.slot),
        LOCAL_WORLD_SIZE=str(min(place.slots, spec.world_size)),
    )
    if tls is not None:
        found.update(tls.environment())
    return found

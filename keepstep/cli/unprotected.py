"""KEEPSTEP_DISABLE=1 under `keepstep run`: the job is handed to torchrun, ranks and script as they are."""

from __future__ import annotations

import os
import sys

from keepstep.cli.options import RunOptions


def torchrun_command(options: RunOptions) -> list[str]:
    """The command line of the same job without Keepstep: no spares, no ledger, no repair."""
    how = {"script": [], "module": ["--module"], "program": ["--no-python"]}[options.launch]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.world_size), *how, options.script, *options.args),
    ]


def hand_over(options: RunOptions) -> None:
    """Become torchrun: this process is replaced and does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = torchrun_command(options)
    os.execv(command[0], command)

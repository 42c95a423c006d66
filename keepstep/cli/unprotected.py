"""KEEPSTEP_DISABLE=1 under `keepstep run`: the job is handed to torchrun, ranks and script as they are."""

from __future__ import annotations

import os
import sys

from keepstep.cli.options import RunOptions
from keepstep.errors import UsageError


def torchrun_command(options: RunOptions) -> list[str]:
    """The command line of the same job without Keepstep: no spares, no ledger, no repair."""
    how = {"script": [], "module": ["--module"], "program": ["--no-python"]}[options.launch]
    where = ["--standalone"]
    if options.endpoint is not None:
        where = [
            *("--nnodes", str(options.nnodes), "--node-rank", str(options.node_rank)),
            *("--master-addr", options.endpoint.host, "--master-port", str(options.endpoint.port)),
        ]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *where),
        *("--nproc-per-node", str(options.ranks_per_node), *how, options.script, *options.args),
    ]


def hand_over(options: RunOptions) -> None:
    """Become torchrun: this process is replaced and does not return. A node for spares has nothing to do."""
    if options.node_rank >= options.nnodes:
        raise UsageError("KEEPSTEP_DISABLE=1: torchrun has no spares, so this node is not needed")
    sys.stdout.flush()
    sys.stderr.flush()
    command = torchrun_command(options)
    os.execv(command[0], command)

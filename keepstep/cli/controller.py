"""`keepstep controller`: one job's controller and its ledger, with no worker of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.cli.run import _flag, _option

COMMAND: dict[str, Any] = {
    # Everything behind the script is the script's own, flags included.
    "context_settings": {"allow_interspersed_args": False},
    "options_metavar": "[OPTIONS]",
}

_Text = str | None


def controller(
    ctx: typer.Context,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="The training script, as the agents find it.")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    bind: Annotated[_Text, _option("--bind", help="Where to listen [127.0.0.1, any free port].", metavar="HOST:PORT")] = None,
    log_dir: Annotated[_Text, _option("--run", "--log-dir", help="The run directory [keepstep-runs/JOB].", metavar="DIR")] = None,
    nnodes: Annotated[_Text, _option("--nnodes", help="Nodes that play ranks [1].", metavar="N")] = None,
    nproc_per_node: Annotated[_Text, _option("--nproc-per-node", help="Ranks on each of them [1].", metavar="N")] = None,
    spares: Annotated[_Text, _option("--spares", help="Workers kept ready to take over a rank [0].", metavar="N")] = None,
    replace_unit: Annotated[_Text, _option("--replace-unit", help="What is replaced after a failure: rank or node [rank].", metavar="UNIT")] = None,
    mode: Annotated[_Text, _option("--mode", help="run, or observe: only say what would be done [run].", metavar="MODE")] = None,
    job: Annotated[_Text, _option("--job", help="The job's name [made from the script's and the time].", metavar="NAME")] = None,
    token_file: Annotated[_Text, _option("--token-file", help="File with the job's token.", metavar="FILE")] = None,
    tls_cert: Annotated[_Text, _option("--tls-cert", help="The controller's certificate (PEM): connections use TLS.", metavar="FILE")] = None,
    tls_key: Annotated[_Text, _option("--tls-key", help="Its key.", metavar="FILE")] = None,
    tls_ca: Annotated[_Text, _option("--tls-ca", help="The authority that signed every node's certificate.", metavar="FILE")] = None,
    spare_timeout: Annotated[_Text, _option("--spare-timeout", help="How long a rank may wait for a worker [600].", metavar="SECONDS")] = None,
    spare_check: Annotated[_Text, _option("--spare-check", help="How often a parked spare proves itself, 0: only at its start [3600].", metavar="SECONDS")] = None,
    max_restarts: Annotated[_Text, _option("--max-restarts", help="Workers started for want of a spare, at most [3].", metavar="N")] = None,
    record_limit: Annotated[_Text, _option("--record-limit", help="Largest per-step record of a rank [4MiB].", metavar="SIZE")] = None,
    shutdown_timeout: Annotated[_Text, _option("--shutdown-timeout", help="Between SIGTERM and SIGKILL when the job is stopped [5].", metavar="SECONDS")] = None,
    redirects: Annotated[_Text, _option("-r", "--redirects", help="Streams that go to the log files only: 0..3, or 0:1,1:3.", metavar="STREAMS")] = None,
    tee: Annotated[_Text, _option("-t", "--tee", help="Streams that go to console and log files: 0..3, or 0:1,1:3.", metavar="STREAMS")] = None,
    policy: Annotated[_Text, _option("--policy", help="What is done about health signals: a file as keepstep policy show prints it.", metavar="FILE")] = None,
    open_metrics: Annotated[bool, _flag("--open-metrics", help="Processes of this machine read /metrics without a token.")] = False,
    webhook: Annotated[_Text, _option("--webhook", help="Post each incident there, at its begin and end.", metavar="URL")] = None,
    webhook_secret_file: Annotated[_Text, _option("--webhook-secret-file", help="File with the secret that signs these messages.", metavar="FILE")] = None,
    config: Annotated[_Text, _option("--config", help="Settings file [keepstep.toml, when there].", metavar="FILE")] = None,
    module: Annotated[bool, _flag("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[bool, _flag("--no-python", help="SCRIPT is a program of its own.")] = False,
) -> None:  # fmt: skip
    """Host one job's controller; nodes join it with `keepstep agent --join`."""
    from keepstep.cli import options

    given = options.as_typed(ctx.params)
    chosen = options.choose(
        given,
        script=script,
        args=tuple(args or ()),
        launch="program" if no_python else "module" if module else "script",
        both=module and no_python,
        environ=os.environ,
        directory=Path.cwd(),
        controller_only=True,
    )
    from keepstep.cli.launch import launch

    raise typer.Exit(launch(chosen, ()))

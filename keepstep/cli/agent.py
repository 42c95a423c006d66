"""`keepstep agent`: this machine's slots for a job whose controller runs somewhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

_Text = str | None


def _option(name: str, help: str, metavar: str = "TEXT") -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(name, help=help, metavar=metavar, show_default=False)
    return found


def agent(
    ctx: typer.Context,
    join: Annotated[_Text, _option("--join", "The controller: HOST:PORT, or its URL.", "URL")] = None,
    node: Annotated[_Text, _option("--node", "This node's name, its own in the job [made from its address].", "NAME")] = None,
    slots: Annotated[_Text, _option("--slots", "Places for workers [1].", "N")] = None,
    labels: Annotated[_Text, _option("--labels", "What placement goes by.", "rack=r1,...")] = None,
    spare_node: Annotated[bool, typer.Option("--spare-node", help="The slots are for spares only.", show_default=False)] = False,
    advertise: Annotated[_Text, _option("--advertise", "This node's address for the others [that which leads to the controller].", "ADDR")] = None,
    token_file: Annotated[_Text, _option("--token-file", "File with the job's token.", "FILE")] = None,
    log_dir: Annotated[_Text, _option("--log-dir", "Where logs and reports of this node go [keepstep-runs/JOB].", "DIR")] = None,
    join_timeout: Annotated[_Text, _option("--join-timeout", "How long to wait for the controller [600].", "SECONDS")] = None,
    isolation_timeout: Annotated[_Text, _option("--isolation-timeout", "How long to go on without the controller [600].", "SECONDS")] = None,
    shutdown_timeout: Annotated[_Text, _option("--shutdown-timeout", "Between SIGTERM and SIGKILL when workers are ended [5].", "SECONDS")] = None,
    tls_cert: Annotated[_Text, _option("--tls-cert", "This node's certificate (PEM): connections use TLS.", "FILE")] = None,
    tls_key: Annotated[_Text, _option("--tls-key", "Its key.", "FILE")] = None,
    tls_ca: Annotated[_Text, _option("--tls-ca", "The authority that signed every node's certificate.", "FILE")] = None,
    metrics_port: Annotated[_Text, _option("--metrics-port", "Port where this node's agent answers Prometheus [none].", "PORT")] = None,
    metrics_bind: Annotated[_Text, _option("--metrics-bind", "Address of that port [127.0.0.1].", "ADDR")] = None,
    open_metrics: Annotated[bool, typer.Option("--open-metrics", help="Processes of this machine read /metrics without a token.", show_default=False)] = False,
    config: Annotated[_Text, _option("--config", "Settings file [keepstep.toml, when there].", "FILE")] = None,
) -> None:  # fmt: skip
    """Offer this machine's slots to a job's controller; ends with the job, and with its exit code."""
    from keepstep.cli import options

    given = options.as_typed(ctx.params)
    chosen, endpoint = options.choose_agent(given, environ=os.environ, directory=Path.cwd())
    from keepstep.cli.node import join as serve

    raise typer.Exit(serve(chosen, endpoint, ()))

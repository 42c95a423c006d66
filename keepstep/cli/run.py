"""`keepstep run`: torchrun's flags and a few more. Checks everything that can be checked, then launches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

COMMAND: dict[str, Any] = {
    # Everything behind the script is the script's own, flags included.
    "context_settings": {"allow_interspersed_args": False},
    "options_metavar": "[OPTIONS]",
}

_Text = str | None


def _option(*names: str, help: str, metavar: str = "TEXT", hidden: bool = False) -> Any:
    """A text option, also under torchrun's spelling with underscores."""
    spelled = [*names, *(name.replace("-", "_").replace("__", "--", 1) for name in names if "-" in name[2:])]
    return typer.Option(*spelled, help=help, metavar=metavar, hidden=hidden, show_default=False)


def _flag(*names: str, help: str) -> Any:
    spelled = [*names, *(name.replace("-", "_").replace("__", "--", 1) for name in names if "-" in name[2:])]
    return typer.Option(*spelled, help=help, show_default=False)


def run(
    ctx: typer.Context,
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", help="The training script.")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    nproc_per_node: Annotated[_Text, _option("--nproc-per-node", help="Ranks: a number, cpu, gpu or auto [1].", metavar="N")] = None,
    spares: Annotated[_Text, _option("--spares", help="Workers kept ready to take over a rank [0].", metavar="N")] = None,
    slots: Annotated[_Text, _option("--slots", help="Places for workers on this machine [ranks + spares].", metavar="N")] = None,
    mode: Annotated[_Text, _option("--mode", help="run, or observe: only say what would be done [run].", metavar="MODE")] = None,
    spare_timeout: Annotated[_Text, _option("--spare-timeout", help="How long a rank may wait for a worker [600].", metavar="SECONDS")] = None,
    spare_check: Annotated[_Text, _option("--spare-check", help="How often a parked spare proves itself, 0: only at its start [3600].", metavar="SECONDS")] = None,
    max_restarts: Annotated[_Text, _option("--max-restarts", help="Workers started for want of a spare, at most [3].", metavar="N")] = None,
    job: Annotated[_Text, _option("--job", help="The job's name [made from the script's and the time].", metavar="NAME")] = None,
    log_dir: Annotated[_Text, _option("--log-dir", help="The run directory [keepstep-runs/JOB].", metavar="DIR")] = None,
    redirects: Annotated[_Text, _option("-r", "--redirects", help="Streams that go to the log files only: 0..3, or 0:1,1:3.", metavar="STREAMS")] = None,
    tee: Annotated[_Text, _option("-t", "--tee", help="Streams that go to console and log files: 0..3, or 0:1,1:3.", metavar="STREAMS")] = None,
    local_ranks_filter: Annotated[_Text, _option("--local-ranks-filter", help="Show only these slots on the console.", metavar="0,1")] = None,
    record_limit: Annotated[_Text, _option("--record-limit", help="Largest per-step record of a rank [4MiB].", metavar="SIZE")] = None,
    shutdown_timeout: Annotated[_Text, _option("--shutdown-timeout", help="Between SIGTERM and SIGKILL when the job is stopped [5].", metavar="SECONDS")] = None,
    controller_port: Annotated[_Text, _option("--controller-port", help="The controller's port on 127.0.0.1 [any free one].", metavar="PORT")] = None,
    metrics_port: Annotated[_Text, _option("--metrics-port", help="Port where this node's agent answers Prometheus [none].", metavar="PORT")] = None,
    metrics_bind: Annotated[_Text, _option("--metrics-bind", help="Address of that port [127.0.0.1].", metavar="ADDR")] = None,
    policy: Annotated[_Text, _option("--policy", help="What is done about health signals: a file as keepstep policy show prints it.", metavar="FILE")] = None,
    open_metrics: Annotated[bool, _flag("--open-metrics", help="Processes of this machine read /metrics without a token.")] = False,
    webhook: Annotated[_Text, _option("--webhook", help="Post each incident there, at its begin and end.", metavar="URL")] = None,
    webhook_secret_file: Annotated[_Text, _option("--webhook-secret-file", help="File with the secret that signs these messages.", metavar="FILE")] = None,
    config: Annotated[_Text, _option("--config", help="Settings file [keepstep.toml, when there].", metavar="FILE")] = None,
    module: Annotated[bool, _flag("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[bool, _flag("--no-python", help="SCRIPT is a program of its own.")] = False,
    standalone: Annotated[bool, _flag("--standalone", help="As in torchrun; always so on one node.")] = False,
    nnodes: Annotated[_Text, _option("--nnodes", help="Nodes that play ranks [1].", metavar="N")] = None,
    node_rank: Annotated[_Text, _option("--node-rank", help="Which node this is: 0 hosts the controller; from N on, spares only.", metavar="R")] = None,
    rdzv_endpoint: Annotated[_Text, _option("--rdzv-endpoint", help="Where node 0 is reached, the same on every node.", metavar="HOST:PORT")] = None,
    bind: Annotated[_Text, _option("--bind", help="Where node 0 listens [--rdzv-endpoint; 127.0.0.1 on one node].", metavar="HOST:PORT")] = None,
    advertise: Annotated[_Text, _option("--advertise", help="This node's address for the others [that which leads to node 0].", metavar="ADDR")] = None,
    labels: Annotated[_Text, _option("--labels", help="What placement goes by.", metavar="rack=r1,...")] = None,
    spare_node: Annotated[bool, _flag("--spare-node", help="This node's slots are for spares only.")] = False,
    replace_unit: Annotated[_Text, _option("--replace-unit", help="What is replaced after a failure: rank or node [rank].", metavar="UNIT")] = None,
    join_timeout: Annotated[_Text, _option("--join-timeout", help="How long to wait for node 0 [600].", metavar="SECONDS")] = None,
    isolation_timeout: Annotated[_Text, _option("--isolation-timeout", help="How long a node goes on without node 0 [600].", metavar="SECONDS")] = None,
    token_file: Annotated[_Text, _option("--token-file", help="File with the job's token, the same on every node.", metavar="FILE")] = None,
    tls_cert: Annotated[_Text, _option("--tls-cert", help="This node's certificate (PEM): connections use TLS.", metavar="FILE")] = None,
    tls_key: Annotated[_Text, _option("--tls-key", help="Its key.", metavar="FILE")] = None,
    tls_ca: Annotated[_Text, _option("--tls-ca", help="The authority that signed every node's certificate.", metavar="FILE")] = None,
    rdzv_id: Annotated[_Text, _option("--rdzv-id", help="The job's name, as --job.", metavar="NAME")] = None,
    rdzv_backend: Annotated[_Text, _option("--rdzv-backend", help="", hidden=True)] = None,
    rdzv_conf: Annotated[_Text, _option("--rdzv-conf", help="", hidden=True)] = None,
    master_addr: Annotated[_Text, _option("--master-addr", help="", hidden=True)] = None,
    master_port: Annotated[_Text, _option("--master-port", help="", hidden=True)] = None,
    local_addr: Annotated[_Text, _option("--local-addr", help="", hidden=True)] = None,
    monitor_interval: Annotated[_Text, _option("--monitor-interval", help="", hidden=True)] = None,
    start_method: Annotated[_Text, _option("--start-method", help="", hidden=True)] = None,
    event_log_handler: Annotated[_Text, _option("--event-log-handler", help="", hidden=True)] = None,
    role: Annotated[_Text, _option("--role", help="", hidden=True)] = None,
    signals_to_handle: Annotated[_Text, _option("--signals-to-handle", help="", hidden=True)] = None,
    logs_specs: Annotated[_Text, _option("--logs-specs", help="", hidden=True)] = None,
    numa_binding: Annotated[_Text, _option("--numa-binding", help="", hidden=True)] = None,
    duplicate_stdout_filters: Annotated[_Text, _option("--duplicate-stdout-filters", help="", hidden=True)] = None,
    duplicate_stderr_filters: Annotated[_Text, _option("--duplicate-stderr-filters", help="", hidden=True)] = None,
    run_path: Annotated[bool, typer.Option("--run-path", "--run_path", hidden=True)] = False,
    virtual_local_rank: Annotated[bool, typer.Option("--virtual-local-rank", "--virtual_local_rank", hidden=True)] = False,
) -> None:  # fmt: skip
    """Start a training script on several ranks, with spares that take over when one dies."""
    from keepstep.cli import options, torchrun_flags

    given = options.as_typed(ctx.params)
    torchrun_flags.check(given)
    chosen = options.choose(
        given,
        script=script,
        args=tuple(args or ()),
        launch="program" if no_python else "module" if module else "script",
        both=module and no_python,
        environ=os.environ,
        directory=Path.cwd(),
    )
    if os.environ.get("KEEPSTEP_DISABLE") == "1":
        from keepstep.cli.unprotected import hand_over

        hand_over(chosen)
    remarks = torchrun_flags.check(given, several_nodes=chosen.endpoint is not None)
    # Only now: a wrong flag is answered without loading the servers.
    if chosen.joins:
        from keepstep.cli.node import join

        assert chosen.node is not None and chosen.endpoint is not None
        raise typer.Exit(join(chosen.node, chosen.endpoint, remarks, working_dir=os.getcwd()))
    from keepstep.cli.launch import launch

    raise typer.Exit(launch(chosen, remarks))

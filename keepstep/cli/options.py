"""What one `keepstep run` or `keepstep controller` was asked for, checked as a whole: the script is there, the numbers fit together."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from typing import Any, Literal

from keepstep.agent.metrics_listener import MetricsAddress
from keepstep.cli.addresses import MASTER_PORT, Endpoint, is_loopback, parse_endpoint, parse_join
from keepstep.cli.config import job_name, resolve
from keepstep.cli.policy_file import read_policy
from keepstep.cli.telemetry import Telemetry, choose_metrics, choose_telemetry
from keepstep.cli.tokens import token_is_missing
from keepstep.cli.torchrun_flags import ranks_filter
from keepstep.cli.trust import Trust, choose_trust
from keepstep.controller.rundir import DEFAULT_PARENT
from keepstep.core.policy_rules import Policy
from keepstep.errors import UsageError

Launch = Literal["script", "module", "program"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What this machine offers.

    `advertise`: as the user named it; None: the address that leads to the controller. `name`: None makes it
    from that address (a machine's own name is no identity: images are cloned, and one may run two agents).
    """

    name: str | None
    slots: int
    labels: Mapping[str, str]
    advertise: str | None
    run_dir: Path | None
    stop_grace_s: float
    join_timeout_s: float
    isolation_timeout_s: float
    shown_slots: frozenset[int] | None = None
    metrics: MetricsAddress | None = None
    trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything that `keepstep run` and `keepstep controller` need, resolved and checked.

    `endpoint`: where nodes find the controller; None for a job on this machine alone. `bind`: where the
    controller listens. `node`: this machine's part; None where only the controller runs. `job_named`: the user
    gave the job its name.
    """

    script: str
    args: tuple[str, ...]
    launch: Launch
    world_size: int
    nnodes: int
    node_rank: int
    ranks_per_node: int
    spares: int
    replace_unit: Literal["rank", "node"]
    mode: Literal["run", "observe"]
    job: str
    job_named: bool
    run_dir: Path
    endpoint: Endpoint | None
    bind: Endpoint
    spare_timeout_s: float
    spare_check_s: float
    stop_grace_s: float
    max_restarts: int | None
    policy: Policy
    record_limit_bytes: int
    tee: str
    redirects: str
    trust: Trust
    telemetry: Telemetry
    node: NodeOptions | None

    @property
    def outlived(self) -> bool:
        """Whether there may be workers that outlive this process: then another one can take the run up."""
        return self.node is None or self.endpoint is not None

    @property
    def joins(self) -> bool:
        """Whether the controller is another node's."""
        return self.node_rank > 0


def as_typed(parameters: Mapping[str, Any]) -> dict[str, str | None]:
    """A command's flags as text; one that was not given is absent, a switch that is off is None."""
    return {
        key: (None if value is False else str(value))
        for key, value in parameters.items()
        if value is not None
    }


def choose(
    given: Mapping[str, str | None],
    *,
    script: str | None,
    args: tuple[str, ...],
    launch: Launch,
    both: bool,
    environ: MutableMapping[str, str],
    directory: Path,
    controller_only: bool = False,
) -> RunOptions:
    """Resolve and check. Raises UsageError with one line about the first thing that is wrong."""
    settings = resolve(given, environ, directory, given.get("config"))
    command = "controller" if controller_only else "run"
    if both:
        raise UsageError("--module and --no-python exclude each other")
    if not script:
        raise UsageError(f"no script given: keepstep {command} [OPTIONS] SCRIPT [ARGS]...")
    if not controller_only:  # a controller's machine need not have the script
        check_script(script, launch)
    nnodes, per_node, spares = settings["nnodes"], settings["nproc_per_node"], settings["spares"]
    endpoint, node_rank = None, 0
    if not controller_only:
        endpoint, node_rank = _meeting(settings, given, nnodes)
    bind = settings["bind"] or endpoint or Endpoint(LOOPBACK, settings["controller_port"])
    trust = choose_trust(given, settings, environ)
    if (
        trust.token is None
        and (nnodes > 1 or not _stays_here(bind))
        and not (controller_only and _stays_here(bind))
    ):
        raise token_is_missing("a job on several nodes" if nnodes > 1 else f"a listener on {bind.host}")
    node = None
    if not controller_only:
        node = _node(settings, given, trust, alone=endpoint is None, node_rank=node_rank)
    job = settings["job"] or given.get("rdzv_id") or make_job_name(script)
    if settings["job"] is None and given.get("rdzv_id") is not None:
        try:
            job_name(job)
        except ValueError as error:
            raise UsageError(f"--rdzv-id {error}") from None
    named = settings["job"] is not None or given.get("rdzv_id") is not None
    run_dir = settings["log_dir"] or directory / DEFAULT_PARENT / job
    if node is not None and node_rank > 0 and (named or settings["log_dir"] is not None):
        node = replace(node, run_dir=run_dir)
    return RunOptions(
        script=script,
        args=args,
        launch=launch,
        world_size=nnodes * per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        ranks_per_node=per_node,
        spares=spares,
        replace_unit=settings["replace_unit"],
        mode=settings["mode"],
        job=job,
        job_named=named,
        run_dir=run_dir,
        endpoint=endpoint,
        bind=bind,
        spare_timeout_s=settings["spare_timeout"],
        spare_check_s=settings["spare_check"],
        stop_grace_s=settings["shutdown_timeout"],
        max_restarts=settings["max_restarts"],
        policy=Policy() if settings["policy"] is None else read_policy(settings["policy"]),
        record_limit_bytes=settings["record_limit"],
        tee=settings["tee"],
        redirects=settings["redirects"],
        trust=trust,
        telemetry=choose_telemetry(settings, environ),
        node=node,
    )


def _meeting(
    settings: Mapping[str, Any], given: Mapping[str, str | None], nnodes: int
) -> tuple[Endpoint | None, int]:
    """Where the nodes meet and which of them this is; torchrun's static flags serve as well."""
    endpoint, node_rank = settings["rdzv_endpoint"], settings["node_rank"]
    spare = settings["spare_node"] or (node_rank or 0) >= nnodes
    if nnodes == 1 and not spare:
        return settings["bind"], 0  # other nodes may still offer spares to one that listens
    if endpoint is None and given.get("master_addr") is not None:
        port = given.get("master_port") or str(MASTER_PORT)
        try:
            endpoint = parse_endpoint(f"{format_host(given['master_addr'] or '')}:{port}")
        except ValueError as error:
            raise UsageError(f"--master-addr and --master-port {error}") from None
    if endpoint is None:
        raise UsageError(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT: the address of node 0, the same on every node"
        )
    if endpoint.port == 0:
        raise UsageError("--rdzv-endpoint needs a port that every node knows, not 0")
    if node_rank is None:
        raise UsageError(
            f"--nnodes {nnodes} needs --node-rank: 0 on the node of --rdzv-endpoint, then 1, 2, ... "
            "(from N on: nodes for spares)"
        )
    if node_rank == 0 and settings["spare_node"]:
        raise UsageError("node 0 hosts ranks: --spare-node belongs to the others")
    return endpoint, node_rank


def _node(
    settings: Mapping[str, Any], given: Mapping[str, str | None], trust: Trust, *, alone: bool, node_rank: int
) -> NodeOptions:
    per_node, spares = settings["nproc_per_node"], settings["spares"]
    slots = settings["slots"]
    if slots is None:
        slots = per_node + spares if alone else per_node
    spare = settings["spare_node"] or node_rank >= settings["nnodes"]
    if alone and per_node + spares > slots:
        raise UsageError(
            f"{per_node} ranks and {spares} spares need {per_node + spares} slots, --slots gives {slots}"
        )
    if not spare and per_node > slots:
        raise UsageError(f"{per_node} ranks a node need {per_node} slots, --slots gives {slots}")
    own = {} if alone else {"host": short_host(), "node_rank": str(node_rank)}
    if spare:
        own["keepstep"] = "spare"
    return NodeOptions(
        name=settings["node"] or f"node{node_rank}",
        slots=slots,
        labels={**own, **settings["labels"]},
        advertise=settings["advertise"] or given.get("local_addr"),
        run_dir=None,
        stop_grace_s=settings["shutdown_timeout"],
        join_timeout_s=settings["join_timeout"],
        isolation_timeout_s=settings["isolation_timeout"],
        shown_slots=ranks_filter(given.get("local_ranks_filter")),
        metrics=choose_metrics(settings),
        trust=trust,
    )


def choose_agent(
    given: Mapping[str, str | None], *, environ: MutableMapping[str, str], directory: Path
) -> tuple[NodeOptions, Endpoint]:
    """What `keepstep agent` needs. Raises UsageError with one line about the first thing that is wrong."""
    settings = resolve(given, environ, directory, given.get("config"))
    if not given.get("join"):
        raise UsageError("which controller? keepstep agent --join HOST:PORT [OPTIONS]")
    try:
        endpoint, tls_said = parse_join(given["join"] or "")
    except ValueError as error:
        raise UsageError(f"--join {error}") from None
    trust = choose_trust(given, settings, environ)
    if tls_said and trust.tls is None:
        raise UsageError("--join names https: give --tls-cert, --tls-key and --tls-ca too")
    if tls_said is False and trust.tls is not None:
        raise UsageError("--join names http, but --tls-cert asks for TLS: write https://")
    if trust.token is None:
        raise UsageError(
            "an agent needs the job's token: --token-file FILE (the controller's run directory holds one), "
            "or KEEPSTEP_JOB_TOKEN in the environment"
        )
    host = short_host()
    labels = {"host": host, **({"keepstep": "spare"} if settings["spare_node"] else {}), **settings["labels"]}
    node = NodeOptions(
        name=settings["node"],
        slots=settings["slots"] or 1,
        labels=labels,
        advertise=settings["advertise"],
        run_dir=settings["log_dir"],
        stop_grace_s=settings["shutdown_timeout"],
        join_timeout_s=settings["join_timeout"],
        isolation_timeout_s=settings["isolation_timeout"],
        metrics=choose_metrics(settings),
        trust=trust,
    )
    return node, endpoint


def short_host() -> str:
    """This machine's name as a label, for people: nothing goes by it."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in socket.gethostname())
    return name[:64] or "unknown"


def format_host(host: str) -> str:
    """With brackets round an IPv6 address."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _stays_here(bind: Endpoint) -> bool:
    return is_loopback(bind.host) or bind.host == "localhost"


def check_script(script: str, launch: Launch) -> None:
    """Raises UsageError when there is nothing there that could be started."""
    if launch == "module":
        _check_module(script)
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


def _check_module(name: str) -> None:
    """Finds it as `python -m` does, but imports nothing: a package's own code may be long or loud."""
    top, *parts = name.split(".")
    try:
        # The worker's directory is on its path, the launcher's need not be.
        spec = PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UsageError(f"there is no module {name}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for depth, part in enumerate(parts, 1):
        is_file = _has_module(folders, part)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if not folders and not (is_file and depth == len(parts)):
            raise UsageError(
                f"there is no module {name}: {'.'.join([top, *parts[: depth - 1]])} has no {part}"
            )
        if is_file and not _has_module(folders, "__init__"):
            folders = []  # a file beats a folder that is no regular package
    if folders and not _has_module(folders, "__main__"):
        raise UsageError(f"{name} is a package without __main__: name the module in it that trains")


def _has_module(folders: Iterable[Path], name: str) -> bool:
    return any((folder / f"{name}{suffix}").is_file() for folder in folders for suffix in all_suffixes())


def make_job_name(script: str) -> str:
    """Tells runs apart and sorts by time: train-20261130-221500-3f2a."""
    stem = (
        "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(script).stem).strip("-")[:32] or "job"
    )
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"

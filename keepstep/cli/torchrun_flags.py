"""torchrun's other flags: which are met already, which have no meaning here, which cannot be honoured yet.

`keepstep run` takes torchrun's command lines as they are. A flag without effect is said in one line; a
flag whose silent loss would change the job is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.errors import UsageError

# Flag -> why it has no effect. Said once, the job starts.
WITHOUT_EFFECT: Mapping[str, str] = {
    "rdzv_backend": "ranks meet through the agent's own store",
    "rdzv_conf": "ranks meet through the agent's own store",
    "monitor_interval": "a death is seen at once, nothing is polled",
    "start_method": "every worker is a process of its own",
    "event_log_handler": "events are kept in the ledger",
    "role": "roles are not used",
    "signals_to_handle": "SIGINT, SIGTERM, SIGHUP and SIGQUIT end the job in order",
}

# What only matters where nodes meet. Without effect on a single one.
FOR_SEVERAL_NODES: Mapping[str, str] = {
    "rdzv_endpoint": "the job has one node",
    "master_addr": "the job has one node",
    "master_port": "the job has one node",
    "local_addr": "workers of one machine meet on 127.0.0.1",
}

# Flag -> what to do instead.
REFUSED: Mapping[str, str] = {
    "run_path": "name the script itself",
    "logs_specs": "use --log-dir, --tee and --redirects",
    "numa_binding": "bind inside the script, or start keepstep under numactl",
    "virtual_local_rank": "use LOCAL_RANK, it is the slot's number",
    "duplicate_stdout_filters": "filter the files under the run directory's logs/",
    "duplicate_stderr_filters": "filter the files under the run directory's logs/",
}


def check(given: Mapping[str, str | None], *, several_nodes: bool = False) -> list[str]:
    """One line for every flag without effect. Raises UsageError for what cannot be honoured."""
    for key, instead in REFUSED.items():
        if given.get(key) is not None:
            raise UsageError(f"{_flag(key)} is not supported: {instead}")
    ignored = {**WITHOUT_EFFECT, **({} if several_nodes else FOR_SEVERAL_NODES)}
    return [
        f"{_flag(key)} has no effect: {why}" for key, why in ignored.items() if given.get(key) is not None
    ]


def ranks_filter(text: str | None) -> frozenset[int] | None:
    """--local-ranks-filter: the slots whose lines are shown (None: all)."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--local-ranks-filter must be numbers such as 0,2, not {text!r}")
    return frozenset(int(part) for part in parts)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")

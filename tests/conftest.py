"""What every test shares: hypothesis' profile, no variable of an outer job, and the thrift that many processes need."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.distribution import by_length, scheduler

settings.register_profile(
    "keepstep", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("keepstep")

# What torchrun and Keepstep's agent set for a worker, and what changes how the trainer behaves.
JOB_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(f"KEEPSTEP_{name}" for name in ("SOCKET", "TOKEN", "JOB", "WORKER", "NODE", "SLOT", "PAGE", "RUN_DIR")),
    *("KEEPSTEP_FAULTS", "KEEPSTEP_FINGERPRINT", "KEEPSTEP_DISABLE", "KEEPSTEP_CONFIG"),
)
THRIFT = str(Path(__file__).parent / "thrift")


@pytest.fixture(autouse=True, scope="session")
def _no_outer_job() -> None:
    """Tests started from inside a job must not take part in it."""
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True, scope="session")
def _thrift() -> None:
    """The processes that tests start load tests/thrift/sitecustomize.py."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([path for path in paths if path and path != THRIFT] + [THRIFT])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_length(items)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return scheduler(config, log)

"""What every test shares: the seed profile of hypothesis, and no variable of an outer job leaking in."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture(autouse=True, scope="session")
def _no_outer_job() -> None:
    """Tests started from inside a job must not take part in it."""
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)

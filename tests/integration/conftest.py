"""What the whole-job tests share: where the undisturbed runs lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for every test process of this session (pytest-xdist runs several)."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    return folder

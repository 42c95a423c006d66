"""However a worker ends by itself, its page says with which status; a signal leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.wire.page import Page


@pytest.fixture
def page() -> Iterator[Page]:
    file = Path(f"/dev/shm/keepstep-test-{uuid.uuid4().hex}")
    with Page.create(str(file), worker=1, record_bytes=4096) as made:
        yield made
    file.unlink()


def run(page: Page, code: str) -> int:
    start = f"import os, signal, sys; from keepstep.trainer.exit_status import leave_status; leave_status({page.path!r})"
    return subprocess.run(
        [sys.executable, "-c", f"{start}\n{code}"], stderr=subprocess.DEVNULL, check=False, timeout=60
    ).returncode


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "sys.exit(7)",
        "raise SystemExit(3)",
        "exit(300)",
        "sys.exit('a text')",
        "1 / 0",
        "import ctypes; ctypes.CDLL(None).exit(9)",
    ],
)
def test_the_page_says_what_the_kernel_says(page: Page, code: str) -> None:
    assert page.exit_status is None
    status = run(page, code)
    assert page.exit_status == status


def test_a_signal_leaves_nothing(page: Page) -> None:
    assert run(page, "os.kill(os.getpid(), signal.SIGKILL)") == -9
    assert page.exit_status is None


def test_the_end_of_a_forked_child_is_not_the_workers(page: Page) -> None:
    code = """
if (child := os.fork()) == 0: sys.exit(4)
os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGKILL)"""
    assert run(page, code) == -9
    assert page.exit_status is None


def test_the_finished_step_survives_in_the_page(page: Page) -> None:
    assert page.finished_step is None
    page.finished_step = 0
    with Page.open(page.path) as other:
        assert other.finished_step == 0
    page.exit_status = 200
    assert page.exit_status == 200 and os.path.exists(page.path)

"""Outlives an embedded agent by a moment: when that process is gone, its workers and files go too.

PR_SET_PDEATHSIG would reach the direct children only (no loader's workers, no files), would be tied to
the *thread* that started them, and needs code between fork and exec. This small process holds the end
of a pipe instead: whatever way the launcher ends, SIGKILL included, the pipe closes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keepstep
from keepstep.agent import cleanup

END_DEADLINE_S = 5.0


class Guardian:
    """The agent's end of the pipe."""

    def __init__(self, page_dir: Path, socket_dir: Path) -> None:
        root = str(Path(keepstep.__file__).parent.parent)
        self._child = subprocess.Popen(
            # -S: it needs nothing installed, and starts faster.
            [sys.executable, "-S", "-m", "keepstep.agent.guardian", str(page_dir), str(socket_dir)],
            env={"PYTHONPATH": root, "PATH": os.environ.get("PATH", "")},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Everything is tidied up: it looks once more and leaves. Blocks, at most END_DEADLINE_S."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def main(page_dir: Path, socket_dir: Path) -> None:
    """Wait for the end of the pipe, then leave nothing."""
    while os.read(0, 4096):
        pass
    cleanup.end_users_of(page_dir)
    cleanup.remove(page_dir)
    cleanup.remove(socket_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

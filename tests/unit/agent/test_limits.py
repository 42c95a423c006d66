"""The agent may hold as many files as the machine allows; its workers keep the limit that it was started with."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, subprocess, sys
from keepstep.agent import limits
limits.raise_open_files()
limits.raise_open_files()
child = subprocess.Popen([sys.executable, "-c", "import resource, sys; sys.stdin.read(1); "
    "print(resource.getrlimit(resource.RLIMIT_NOFILE))"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
limits.give_back(child.pid)
print(resource.getrlimit(resource.RLIMIT_NOFILE), child.communicate("x")[0].strip())
"""


def test_a_low_limit_is_raised_for_the_agent_and_given_back_to_its_workers() -> None:
    shell = ["bash", "-c", 'ulimit -Sn 256; ulimit -Hn 3000; exec "$0" -c "$1"', sys.executable, CODE]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "(3000, 3000) (256, 3000)"

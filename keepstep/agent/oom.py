"""Whether the kernel killed for want of memory: the cgroup's own counter, before and after."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


class OomWatch:
    """Counts OOM kills in the agent's cgroup; its workers live in the same one."""

    def __init__(self, files: list[Path] | None = None) -> None:
        self._files = _event_files() if files is None else files
        self._seen = self._count()

    def grew(self) -> bool:
        """Whether there were kills since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        total = 0
        for path in self._files:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return total


def _event_files() -> list[Path]:
    """memory.events of cgroup v2, memory.oom_control of v1: those that exist for this process."""
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [root / path.lstrip("/") / "memory.events" for root in (_CGROUPS, _CGROUPS / "unified")]
        elif "memory" in controllers.split(","):
            found.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return [path for path in found if path.exists()]

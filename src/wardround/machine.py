"""This machine: how many cores and how much memory a process may use."""

from __future__ import annotations

import os
from pathlib import Path

GROUP_LIMITS = (  # of a control group: what it allows, what it uses
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

RUNS_AT_ONCE = "WARDROUND_RUNS_AT_ONCE"


def cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows


def runs_at_once() -> int:
    """Runs that share this process's GPU, its own included; who starts them says so."""
    text = os.environ.get(RUNS_AT_ONCE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def free_memory() -> int:
    """Bytes this process may still take: what the machine has free, or its control group allows."""
    free = [unused_pages()]
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = [int(line.split()[1]) * 1024]
    for limit, used in ((read_text(Path(a)), read_text(Path(b))) for a, b in GROUP_LIMITS):
        if limit.isdecimal() and used.isdecimal():
            free.append(max(0, int(limit) - int(used)))
    return min(free)


def total_memory() -> int:
    """Bytes this machine has, or its control group allows; unlike free memory it does not change, so that a
    resumed run makes the same choices."""
    limits = [read_text(Path(limit)) for limit, _ in GROUP_LIMITS]
    known = getattr(os, "sysconf_names", {})
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in known else 8 << 30
    return min([most, *(int(limit) for limit in limits if limit.isdecimal())])


def unused_pages() -> int:
    """Free memory as the system counts it; half of all memory where it does not tell."""
    known = getattr(os, "sysconf_names", {})
    if "SC_AVPHYS_PAGES" in known:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total_memory() // 2


def read_text(path: Path) -> str:
    """A small file of the system, or nothing where it is not there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

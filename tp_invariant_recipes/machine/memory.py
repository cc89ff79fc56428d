"""The memory that processes of this machine can still get."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# By the version of cgroups: limit, use, and the line of memory.stat with file pages that the kernel gives up at need.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that new processes can take without swapping: of the machine, and under every limit of this process's
    control groups. None: the machine does not say.
    """
    return min([*_of_machine(proc), *_of_groups(proc, cgroups)], default=None)


def _of_machine(proc: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each limit leaves; a group without a limit has none.

    SLURM and containers set them on groups further up.
    """
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            version, root = (2, cgroups) if not controllers else (1, cgroups / "memory")
            if version == 2 or "memory" in controllers.split(","):
                inside = root / path.lstrip("/")
                for group in (inside, *inside.parents):
                    if group.is_relative_to(root):
                        yield from _free_bytes(group, *FILES[version])


def _free_bytes(group: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max": no limit; a container shows its own group as the root
        allowed = int((group / limit).read_text(encoding="ascii"))
        used = int((group / use).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        yield max(0, allowed - used + int(stat.get(reclaimable, 0)))

"""The machine's memory: what there is, how much of it a server may use, and JAX's share."""

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

GIB = 1 << 30
HOST_RESERVE_BYTES = 8 * GIB
"""Left to the system, this process and whatever else runs there; of small machines a tenth is."""
DISCRETE_FRACTION = 0.9
"""Of a GPU's own memory; the rest is for CUDA's context and graphs."""
UNIFIED_GPUS = ("GB10", "Thor", "Orin")
"""GPUs without memory of their own: what they take is taken from the system."""

FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes; limits of control groups (containers) are heeded."""

    total: int
    available: int
    """What new work can take without swapping."""
    gpu: str | None = None
    """Name of the first NVIDIA GPU; None: JAX runs on the CPU."""

    @property
    def unified(self) -> bool:
        """Whether host and device share this memory."""
        return self.gpu is None or any(name in self.gpu for name in UNIFIED_GPUS)


def read_machine(environment: Mapping[str, str], root: Path = Path("/")) -> Machine | None:
    """Reads what the kernel tells; None where it is not Linux.

    Args:
      environment: of the process: whether JAX is to stay on the CPU.
      root: of the file system.
    """
    meminfo = numbers(root / "proc/meminfo")
    if "MemAvailable" not in meminfo:
        return None
    total, available = meminfo["MemTotal"] << 10, meminfo["MemAvailable"] << 10
    for limit, left in group_limits(root):
        total, available = min(total, limit), min(available, left)
    if environment.get("JAX_PLATFORMS") == "cpu":
        return Machine(total, available)
    gpus = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = (re.search(r"^Model:\s*(.*\S)", gpu.read_text(), re.MULTILINE) for gpu in gpus)
    return Machine(total, available, next((model[1] for model in models if model), None))


def group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and bytes left of every control group that this process is in."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if "memory" in controllers.split(","):
            base, limit_name, used_name = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            base, limit_name, used_name = "", "memory.max", "memory.current"
        else:
            continue
        # Inside a container the path may be the host's: then only the top is there.
        mount = root / "sys/fs/cgroup" / base
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            limit, used = number(folder / limit_name), number(folder / used_name)
            if limit is not None and used is not None:
                stat = numbers(folder / "memory.stat")
                reclaimable = stat.get("inactive_file", 0)
                yield limit, max(0, limit - used + reclaimable)


def usable_bytes(machine: Machine, memory_gib: float | None) -> int | None:
    """Returns what a server may use on its device; None where only the device knows.

    Args:
      machine: as it is before anything is loaded.
      memory_gib: the setting; unset, all is used that is available, but for the host's reserve.

    Raises:
      ValueError: more is asked for than there is.
    """
    asked = None if memory_gib is None else round(memory_gib * GIB)
    if not machine.unified:
        return asked
    if asked is None:
        return max(0, machine.available - min(HOST_RESERVE_BYTES, machine.total // 10))
    if asked > machine.available:
        raise ValueError(
            f"memory_gib is {memory_gib:g}, must be at most {machine.available / GIB:.1f}: of"
            f" {machine.total / GIB:.1f} GiB as much is available"
        )
    return asked


def limit_jax(machine: Machine, usable: int | None, environment: MutableMapping[str, str]) -> None:
    """Limits the pool from which JAX takes device memory; call it before JAX meets the device.

    On unified memory the pool grows as it is used, up to what may be used: by default JAX would take
    three quarters of the machine at once, and an allocation beyond what is free freezes the host.

    Args:
      machine: where JAX will run.
      usable: see `usable_bytes`.
      environment: of the process; what it says already is left alone.
    """
    if machine.gpu is None:
        return
    fraction = DISCRETE_FRACTION
    if machine.unified and usable is not None:
        fraction = usable / machine.total
        environment.setdefault(PREALLOCATE, "false")
    if OLD_FRACTION not in environment:
        environment.setdefault(FRACTION, f"{fraction:.4f}")
    logger.info(
        "memory: %s, %.1f of %.1f GiB available; %s=%s, %s=%s",
        machine.gpu,
        machine.available / GIB,
        machine.total / GIB,
        FRACTION,
        environment.get(FRACTION, environment.get(OLD_FRACTION)),
        PREALLOCATE,
        environment.get(PREALLOCATE, "true"),
    )


def resident_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that this process holds; 0 where it is not Linux."""
    return numbers(root / "proc/self/status").get("VmRSS", 0) << 10


def compare(planned: int, peak: int | None, growth: int, usable: int | None) -> None:
    """Holds the plan against what was measured, in the log.

    Args:
      planned: bytes of the plan, workspace included.
      peak: the most that the device held so far; None where it does not tell.
      growth: of this process; on the CPU all is in it, and what the compiler keeps.
      usable: see `usable_bytes`.
    """
    measured = growth if peak is None else peak
    too_much = peak is not None and usable is not None and peak > usable
    logger.log(
        logging.WARNING if too_much else logging.INFO,
        "memory: %.3f GiB planned; after warm-up %.3f GiB %s, %+.3f GiB; %s may be used",
        planned / GIB,
        measured / GIB,
        "more in this process, compiler included" if peak is None else "at most on the device",
        (measured - planned) / GIB,
        "all" if usable is None else f"{usable / GIB:.3f} GiB",
    )


def numbers(file: Path) -> dict[str, int]:
    """Reads the lines of a kernel's file that are a name and a number."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    found = (re.match(r"(\w+):?\s+(\d+)\b", line) for line in lines)
    return {match[1]: int(match[2]) for match in found if match}


def number(file: Path) -> int | None:
    """Reads a file with one number; None when it has none, as for no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None

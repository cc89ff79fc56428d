"""Whether what runs a job, an interpreter or an image, is for the processors of its nodes."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig

# e_machine, bytes 18 and 19 of an ELF file (System V ABI, chapter 4; the numbers are in elf.h).
ELF = {62: "x86_64", 183: "aarch64"}
# The architecture of a SIF file, bytes 45 and 46 (sylabs/sif, docs: global header: launch 32, magic 10, version 3).
SIF = {b"02": "x86_64", b"04": "aarch64"}
SIF_MAGIC, SIF_ARCHITECTURE = slice(32, 41), slice(45, 47)
PROGRAM = "usr/bin/env"  # in an image of squashfs: one that every distribution has


def other_processors(config: RunConfig) -> Iterator[Problem]:
    """Says which key names something for other processors. What this host cannot read is taken as right."""
    cluster = config.cluster
    if cluster.architecture is None:
        return
    nodes = f"the nodes of cluster={cluster.name} are {cluster.architecture}"
    if cluster.container is not None:
        processor = of_image(Path(cluster.container))
        if processor not in (None, cluster.architecture):
            yield Problem("", f"cluster.container={cluster.container} is for {processor}, and {nodes}")
    elif cluster.python is not None:
        processor = of_program(Path(cluster.python))
        if processor not in (None, cluster.architecture):
            yield Problem("", f"cluster.python={cluster.python} is for {processor}, and {nodes}")
    elif platform.machine() != cluster.architecture:
        yield (
            Problem(
                "",
                f"this environment ({sys.prefix}) is for {platform.machine()}, and {nodes}",
                "cluster.container=IMAGE, or cluster.python=PATH of an environment that `make bootstrap` "
                "made on a node",
            )
        )


def of_image(image: Path) -> str | None:
    """Return the architecture of a .sif or .sqsh file or of a folder with a root; None: no such file, or not known."""
    if image.is_dir():
        return of_program(image / PROGRAM)
    if image.suffix == ".sqsh" and (unsquashfs := shutil.which("unsquashfs")):
        read = [unsquashfs, "-cat", str(image), PROGRAM]
        return _elf(subprocess.run(read, capture_output=True, timeout=60).stdout)
    head = _head(image)
    return SIF.get(head[SIF_ARCHITECTURE]) if head[SIF_MAGIC] == b"SIF_MAGIC" else None


def of_program(program: Path) -> str | None:
    """Return the architecture of a program; None: no such file, or no program of Linux."""
    return _elf(_head(program))


def _elf(head: bytes) -> str | None:
    return ELF.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None


def _head(file: Path) -> bytes:
    if not file.is_file():  # a FIFO or a device would block
        return b""
    try:
        with file.open("rb") as stream:
            return stream.read(64)
    except OSError:
        return b""

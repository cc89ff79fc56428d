"""`tpi doctor`."""

import platform
import sys

import typer
from rich.table import Table

from tp_invariant_recipes.cli.arguments import Json
from tp_invariant_recipes.machine import terminal

CPU_LOCK = "make bootstrap (the versions in scripts/lock work together; a plain pip install backtracks)"
# What `make gpu` expects of the machine (docs/install.md). The CUDA compiler is not among it: scripts/lock has one.
GPU_NEEDS = ("a driver for CUDA 13", "g++", "Python's headers")
GPU_LOCK = f"make gpu (needs {', '.join(GPU_NEEDS)}; the lock brings the CUDA compiler), or an NVIDIA container"
# Distribution -> what needs it: every training, one on GPUs, or only some runs; and how to get it.
NEEDED = {
    **dict.fromkeys(
        ("torch", "megatron-bridge", "megatron-core", "transformers", "nvidia-resiliency-ext"), ("all", CPU_LOCK)
    ),
    "emerging-optimizers": ("some", f"optimizer.optimizer=muon; {CPU_LOCK}"),
    "transformer-engine": ("gpu", GPU_LOCK),
    **dict.fromkeys(("causal-conv1d", "mamba-ssm"), ("gpu", f"Nemotron's Mamba layers; {GPU_LOCK}")),
}
COLOURS = {"ok": "green", "missing": "red", "untested": "yellow", "refused": "yellow", "optional": "dim"}


def doctor(as_json: Json = False) -> None:
    """List this machine's software, GPUs, patches and missing parts.

    Each row says how to get what is missing; docs/patches.md explains the patches. "untested" is another version than
    that of the locks. Exit status: 2 if a part is missing that training here needs. A refused patch does not count,
    because it stops only the runs that reach its code.
    """
    from tp_invariant_recipes.machine import gpus
    from tp_invariant_recipes.machine.versions import installed, pinned
    from tp_invariant_recipes.settings import conf_files

    visible, pins = gpus.visible(), pinned()
    rows = [("Python", platform.python_version(), "ok" if sys.version_info[:2] == (3, 12) else "missing", "3.12")]
    for name, (need, advice) in NEEDED.items():
        version, pin = installed(name), pins.get(name)
        if version is None:
            rows.append((name, "", "missing" if need == "all" or (need == "gpu" and visible) else "optional", advice))
        else:
            same = version.split("+")[0] == pin
            rows.append((name, version, "ok" if same else "untested", "" if same else f"the locks have {pin}"))
    names = sorted({f"{g.name} (sm_{g.capability[0]}{g.capability[1]}, {g.memory / 2**30:.0f} GiB)" for g in visible})
    toys = ", ".join(model for model in conf_files.groups()["model"] if model.endswith("_toy"))
    advice = "" if visible else f"device=cpu trains {toys}; if there are GPUs, nvidia-smi shows the fault"
    rows.append(
        ("GPUs", f"{len(visible)} × {', '.join(names)}" if names else "", "ok" if names else "optional", advice)
    )
    if installed("megatron-core") is not None:
        from tp_invariant_recipes.patches import registry

        for patch, verdict in registry.verdicts():
            state = "refused" if verdict.state == "refused" else "ok"
            about = f"needed by {patch.package} {patch.need.versions}; without it: {patch.why}; {patch.upstream or ''}"
            rows.append((f"patch {patch.name}", f"{verdict.state}: {verdict.reason}", state, about.removesuffix("; ")))
    if as_json:
        terminal.print_json(
            [dict(zip(("what", "found", "state", "advice"), row, strict=True)) for row in rows], indent=2
        )
    else:
        table = Table("what", "found", "state", "its purpose, and how to get it")
        patches = [row for row in rows if row[0].startswith("patch ")]
        for what, found, state, advice in rows[: len(rows) - len(patches)]:
            table.add_row(what, found, f"[{COLOURS[state]}]{state}[/]", advice)
        terminal.console().print(table)
        for what, found, _, advice in patches:  # a table would break links in a terminal of 80 columns
            terminal.print_text(f"{what}: {found}; {advice}")
    if any(state == "missing" for _, _, state, _ in rows):
        raise typer.Exit(2)

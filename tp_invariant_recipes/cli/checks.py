# SPDX-License-Identifier: Apache-2.0
"""What can be judged without a training: `tpi check`, `tpi conformance`, and this machine, `tpi doctor`."""

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tp_invariant_recipes.cli.arguments import Json, argument, option
from tp_invariant_recipes.cli.output import finish
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.machine import gpus, terminal
from tp_invariant_recipes.start import needed

if TYPE_CHECKING:
    from tp_invariant_recipes.portable.conformance import Product, Recording


def check(
    what: Annotated[Path, argument("EVIDENCE|RUN", "A guard's evidence, or a run with dumps.")],
    step: Annotated[int | None, option("N", "Of a run: the step, counted from 1; 2 or later.")] = None,
    module: Annotated[str | None, option("MODULE", "Of a run: a linear layer.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute a guard's evidence, or a dumped linear layer.

    EVIDENCE is a file that a run with guard= has written. tpi recomputes its values on this machine.

    RUN has numerics=portable and dumps of the module's input, output, gradients and weight; a message gives the options
    that write them. tpi recomputes the output and the gradients of input and weight, and compares every bit. So you can
    check a GPU run without a GPU. Exit status: 0 identical, 1 different, 2 a mistake.

    \b
    tpi check runs/big/guard/step-12-rank-1.evidence
    tpi check runs/big --step 2 --module decoder.layers.3.mlp.linear_fc2
    """
    needed.check("tpi check", ("torch",))
    what = what.expanduser()
    options = [f"--step {step}"] * (step is not None) + [f"--module {module}"] * (module is not None)
    if what.is_file() and options:
        raise ConfigError(
            f"{what} is a file, and a guard's evidence names the values to compute: leave out {options[0]}"
        )
    if what.is_file():
        from tp_invariant_recipes.features.guard import evidence

        finish(evidence.judge(what), as_json=as_json)
    if not what.exists():
        raise ConfigError(f"{what}: there is no such file and no such run")
    if step is None or module is None:
        raise ConfigError(
            f"{what}: which layer? --step N --module MODULE; without them tpi check takes a guard's evidence"
        )
    from tp_invariant_recipes.features.bisect import recompute

    finish(recompute.check(what, step, module), as_json=as_json)


def conformance(
    record: Annotated[
        Path | None, option("FILE", "Write the results of the first GPU, or of this CPU, to send to others.")
    ] = None,
    check: Annotated[
        Path | None, option("FILE", "Compare a recorded file with the definition, on the CPU. Needs no GPU.")
    ] = None,
    script: Annotated[
        Path | None, option("FILE.py", "Write a script for machines that have torch alone; --check reads its JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that the GPUs here compute GEMMs as an H200 does.

    Each GPU computes recorded GEMMs in bf16, fp32 and FP8, among them subnormals, infinities and sums that cancel. tpi
    compares the results with those of an H200. Without a GPU it checks this CPU. Exit status: 0 bitwise identical, 1 a
    GPU or CPU adds in another order, 2 a mistake.

    \b
    tpi conformance
    tpi conformance --record b300.safetensors
    tpi conformance --check b300.safetensors
    tpi conformance --script card.py
    """
    if sum(file is not None for file in (record, check, script)) > 1:
        raise RunError("--record and --script write a file, and --check reads one: give one of them")
    needed.check("tpi conformance", ("torch",))
    from tp_invariant_recipes.machine.progress import busy

    with busy(terminal.console_of_its_own(), "importing torch"):
        from tp_invariant_recipes.portable import conformance as cases

    if script is not None:
        write_atomically(script, cases.render_script(script.name).encode())
        terminal.print_text(f"{script}: needs torch; run it where the GPU is: python {script.name}")
        return
    if check is not None:
        recording = cases.read(check)
        _verdict([(f"{check} (recorded on {recording.gpu})", recording, cases.by_definition)], as_json, recorded=True)
        return
    visible = gpus.visible()
    built_in = cases.built_in()
    if record is not None:
        import torch

        name, capability = (
            (visible[0].name, visible[0].capability) if visible else (f"a CPU, {platform.machine()}", (0, 0))
        )
        metadata = {"gpu": name, "capability": ".".join(map(str, capability)), "torch": torch.__version__}
        cases.write(record, built_in, cases.on_gpu(0) if visible else cases.by_definition, metadata)
        terminal.print_text(f"{record}: {len(built_in.cases)} cases of {name}")
    if not visible:
        _verdict([(f"this CPU ({platform.machine()})", built_in, cases.by_definition)], as_json)
        return
    _verdict([(f"GPU {i} ({gpu.name})", built_in, cases.on_gpu(i)) for i, gpu in enumerate(visible)], as_json)


def _verdict(checks: "list[tuple[str, Recording, Product]]", as_json: bool, recorded: bool = False) -> None:
    """Print the result of each check; exit with the status of a comparison. recorded: the device is the recording."""
    from tp_invariant_recipes.comparison.compare import EXIT_STATUS, Verdict
    from tp_invariant_recipes.machine.progress import busy
    from tp_invariant_recipes.portable import definition
    from tp_invariant_recipes.portable.conformance import differences

    report: list[dict[str, Any]] = []
    console = terminal.console_of_its_own()
    for name, recording, gemm in checks:
        with busy(console, f"computing {len(recording.cases)} cases: {name}"):
            different = differences(recording, gemm)
        described = [difference.__dict__ for difference in different]
        known = definition.name(recording, None if recorded else gemm) if different else None
        report.append({"what": name, "cases": len(recording.cases), "different": described, "known_sum": known})
        if as_json:
            continue
        if different:
            count = f"{len(different)} of {len(recording.cases)} cases differ"
            terminal.print_text(f"{name} adds in another way: {count}{f'; {known}' if known else ''}")
            for difference in different:
                terminal.print_text(f"  {difference}")
        else:
            terminal.print_text(f"{name} adds as an H200 does: all bits of {len(recording.cases)} cases are equal")
    if as_json:
        terminal.print_json(report, indent=2)
    differ = any(case["different"] for case in report)
    raise typer.Exit(EXIT_STATUS[Verdict.DIFFERENT if differ else Verdict.IDENTICAL])


CPU_LOCK = "make bootstrap, or the locks (docs/install.md)"
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

    Each row gives the command for a missing part; docs/patches.md explains the patches. "untested" means another
    version than that of the locks. Exit status: 2 if a part is missing that training here needs. A refused patch does
    not count, because it stops only the runs that reach its code.
    """
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
            about = f"needed by {patch.package} {patch.versions}; without it: {patch.why}; {patch.upstream or ''}"
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

"""`tpi conformance`."""

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tp_invariant_recipes.cli.arguments import Json, option
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.machine import gpus, terminal
from tp_invariant_recipes.start import needed

if TYPE_CHECKING:
    from tp_invariant_recipes.portable.conformance import Product, Recording


def conformance(
    record: Annotated[
        Path | None, option("FILE", "Write what the first GPU gives, or this CPU, to send to others.")
    ] = None,
    check: Annotated[
        Path | None, option("FILE", "Compare a recorded file with the definition, on the CPU. Needs no GPU.")
    ] = None,
    script: Annotated[
        Path | None, option("FILE.py", "Write a script for machines that have torch alone; --check reads its JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that the GPUs here add products as an H200 does.

    Each GPU multiplies recorded matrices in bf16, fp32 and FP8, among them subnormals, infinities and sums that cancel.
    tpi compares the results with those of an H200. Without a GPU it checks this CPU. Exit status: 0 all bits are equal,
    1 a GPU or CPU adds in another way, 2 a mistake.

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
    from tp_invariant_recipes.compare.compare import EXIT_STATUS, Verdict
    from tp_invariant_recipes.machine.progress import busy
    from tp_invariant_recipes.portable import definition
    from tp_invariant_recipes.portable.conformance import differences

    report: list[dict[str, Any]] = []
    console = terminal.console_of_its_own()
    for name, recording, product in checks:
        with busy(console, f"computing {len(recording.cases)} cases: {name}"):
            different = differences(recording, product)
        described = [difference.__dict__ for difference in different]
        known = definition.name(recording, None if recorded else product) if different else None
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

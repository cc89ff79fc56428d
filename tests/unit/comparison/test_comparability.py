# SPDX-License-Identifier: Apache-2.0
"""What tpi compare says of runs on different architectures, and of runs whose products have other definitions."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.comparison.ledgers import HEADER, A, ledger
from tp_invariant_recipes.comparison.comparability import across_machines, changed_processor, other_gemms
from tp_invariant_recipes.comparison.compare import compare
from tp_invariant_recipes.comparison.text import remarks
from tp_invariant_recipes.features.verify import verdict
from tp_invariant_recipes.launch import resume as launch_resume
from tp_invariant_recipes.ledger.bits import float_bits
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, resume
from tp_invariant_recipes.machine import processor
from tp_invariant_recipes.numerics.tree_modes import ON_GPU

CPU = {"name": "cpu", "compute_capability": "0.0", "machine": "x86_64", "attention": "portable 1"}
ARM = CPU | {"machine": "aarch64"}
SENTENCES = Path(__file__).parent / "sentences"
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "attention": "portable 1"}


def header_of_mode(mode, device):
    return Header(identity={"rng.seed": 1}, numerics={"mode": mode}, device=device)


# --- instructions of a CPU ---

AVX2, AMX = (
    CPU | {"instructions": f"torch {torch}, oneDNN {onednn}, MKL GenuineIntel"}
    for torch, onednn in (("AVX2", "AVX2"), ("AVX512", "AVX512_CORE_AMX"))
)


# Two runs' machines.
MACHINES = {
    "one": (CPU, CPU), "arm": (CPU, ARM), "a GPU": (CPU, H200),
    "another version of attention": (CPU, ARM | {"attention": "portable 2"}), "the same instructions": (AVX2, AVX2),
    "other instructions": (AVX2, AMX), "instructions that a release did not record": (AVX2, CPU),
}  # fmt: skip
MODES = (("portable", "portable"), ("tree", "tree"), ("portable", "tree"), ("stock", "stock"))


def test_only_portable_promises_equal_bits_on_two_machines(data_regression):
    sentences = {}
    for (title, devices), modes, differs in itertools.product(MACHINES.items(), MODES, (True, False)):
        a, b = map(header_of_mode, modes, devices)
        sentences[f"{title}, {' and '.join(modes)}, bits {'differ' if differs else 'agree'}"] = across_machines(
            a, b, differs
        )
    data_regression.check(sentences, fullpath=SENTENCES / "machines.yml")


def test_a_run_that_goes_on_with_other_instructions_is_told(tmp_path):
    before, now = (header_of_mode("tree", device) for device in (AVX2, AMX))
    file = tmp_path / "ledger.jsonl"
    with LedgerWriter(file).create(before) as writer:
        for item in ledger(header=before, digested=lambda step: False).steps:
            writer.append(item)
    message = changed_processor(before, AMX["instructions"], 3)
    assert message.startswith(
        "processor: step 3 was computed with torch AVX2, oneDNN AVX2, MKL GenuineIntel, and step 4 "
    )
    assert changed_processor(before, AVX2["instructions"], 3) is None
    assert changed_processor(header_of_mode("portable", AVX2), AMX["instructions"], 3) is None
    assert changed_processor(header_of_mode("tree", CPU), AMX["instructions"], 3) is None
    with resume(file, now, 3) as writer:
        assert changed_processor(writer.header, AMX["instructions"], 4) is None
        assert changed_processor(writer.header, AVX2["instructions"], 4) is not None


FLAGS = "sse4_1 avx avx2 avx512f avx512bw avx512_vnni avx512_bf16 amx_tile"


@pytest.mark.parametrize(
    "flags, variables, kind",
    (
        (FLAGS, {}, "AVX512_CORE_AMX"),
        (FLAGS, {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, "AVX512_CORE"),
        (FLAGS, {"DNNL_MAX_CPU_ISA": "AVX2"}, "AVX2"),
        (FLAGS, {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, "AVX2"),  # the processor has no such instructions
        (FLAGS, {"ONEDNN_MAX_CPU_ISA": "ALL"}, "AVX512_CORE_AMX"),
        ("sse4_1 avx avx2", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "AVX2"),
        ("", {}, "default"),
    ),
)
def test_onednn_takes_the_best_that_is_there_and_allowed(flags, variables, kind):
    assert processor.onednn({"flags": flags}, variables) == kind


# --- products of tree on a GPU ---

H200_ATTENTION = {"name": "NVIDIA H200", "compute_capability": "9.0", "attention": "fused 1"}
OF_LAST_YEAR = header_of_mode("tree", H200_ATTENTION | {"product": "fixed tiles 0"})
OF_TODAY = replace(OF_LAST_YEAR, device=OF_LAST_YEAR.device | {"product": ON_GPU})
# One that began with last year's products and has today's from step 4 on.
OF_BOTH = replace(OF_LAST_YEAR, notes={"resumed": [{"after_step": 3, "changed": {"device.product": ON_GPU}}]})


# Two runs, of which the first has another definition of products, or the second has, from its start or a later step on.
DEFINITIONS = {
    "last year's and today's": (OF_LAST_YEAR, OF_TODAY),
    "today's and last year's": (OF_TODAY, OF_LAST_YEAR),
    "last year's": (OF_LAST_YEAR, OF_LAST_YEAR),
    "both": (OF_BOTH, OF_BOTH),
    "last year's and both": (OF_LAST_YEAR, OF_BOTH),
    **{
        f"{mode} {device['name']}": (header_of_mode(mode, device), header_of_mode(mode, device | {"product": ON_GPU}))
        for mode, device in (("portable", H200), ("stock", H200), ("tree", CPU))
    },
}


def test_a_difference_of_two_definitions_is_not_promised_to_be_none(data_regression):
    """Initial weights, those before step 1, do not come from products."""
    sentences = {}
    for (title, headers), step in itertools.product(DEFINITIONS.items(), (0, 1, 3, 4, None)):
        sentence = other_gemms(*headers, step)
        where = "equal" if step is None else f"first difference at step {step}"
        sentences[f"{title}, {where}"] = sentence and sentence.replace(ON_GPU, "TODAY'S")
    data_regression.check(sentences, fullpath=SENTENCES / "products.yml")


def test_compare_and_verify_say_so():
    a, b = (ledger(name, digested=lambda step: False) for name in "ab")
    a, b = replace(a, header=OF_LAST_YEAR), replace(b, header=OF_TODAY)
    b = replace(b, steps=(*b.steps[:2], replace(b.steps[2], loss="f32:40c80001"), *b.steps[3:]))
    for against, says in ((a, True), (replace(a, header=OF_TODAY), False)):
        comparison = compare(against, b)
        row = verdict.ConfigurationResult("tp=2", Path("b"), 2, 5, comparison.verdict.value, None, b, comparison)
        for sentences in (remarks(comparison), verdict._remarks((row,), [row])):
            assert any(sentence.startswith("Products have other definitions") for sentence in sentences) == says


def test_a_run_with_another_definition_goes_on_and_is_told(tmp_path):
    """What the terminal says, and what the ledger keeps."""
    file = tmp_path / "ledger.jsonl"
    with LedgerWriter(file).create(OF_LAST_YEAR) as writer:
        for item in ledger(header=OF_LAST_YEAR, digested=lambda step: False).steps:
            writer.append(item)

    def message(start, device="gpu", mode="tree"):
        numerics = SimpleNamespace(mode=mode, invariant=True)
        planned = SimpleNamespace(device=device, config=SimpleNamespace(numerics=numerics), here=True)
        planned.run_dir = SimpleNamespace(ledger=file, path=tmp_path)
        return launch_resume._changed_arithmetic(planned, start)

    first = message(3)
    assert first.startswith(f"products: up to step 3 their definition is fixed tiles 0, from step 4 on {ON_GPU};")
    assert (message(3, "cpu"), message(3, mode="portable")) == (None, None)
    resume(file, OF_TODAY, 3).close()
    assert (message(4), message(3)) == (None, first)


# --- Megatron's own numerics ---


def run(name: str, tp: int, loss: float, mode: str):
    header = replace(HEADER, layout={"tp": tp}, numerics={"mode": mode})
    return replace(ledger(name, header=header), steps=[replace(step, loss=float_bits(loss, 64)) for step in A.steps])


ORDER, REPEATS = "docs/audit.md", "need not repeat its bits"
# Mode, tp and loss of two runs; what the help says.
ROWS = (
    ("stock stock", (1, 6.0), (2, 6.1), ORDER), ("deterministic stock", (1, 6.0), (2, 6.1), ORDER),
    ("tree tree", (1, 6.0), (2, 6.1), None), ("stock tree", (2, 6.0), (2, 6.1), None),
    ("stock stock", (2, 6.0), (2, 6.1), REPEATS), ("stock deterministic", (2, 6.0), (2, 6.1), REPEATS),
    ("deterministic deterministic", (2, 6.0), (2, 6.1), None), ("stock stock", (1, 6.0), (2, 6.0), None),
)  # fmt: skip


@pytest.mark.parametrize("modes, a, b, help_", ROWS)
def test_what_megatrons_numerics_do_not_promise(modes, a, b, help_):
    first, second = modes.split()
    said = [line for line in remarks(compare(run("a", *a, first), run("b", *b, second))) if line.startswith("help: ")]
    assert [help_ in line for line in said] == [True] * bool(help_)

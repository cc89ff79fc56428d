"""What tpi compare says of runs on different architectures, and of runs whose products have other definitions."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.compare.ledgers import ledger
from tp_invariant_recipes.cli.train import _start_text
from tp_invariant_recipes.compare.comparability import across_machines, changed_processor, other_products
from tp_invariant_recipes.compare.compare import compare
from tp_invariant_recipes.compare.text import remarks
from tp_invariant_recipes.features.verify import verdict
from tp_invariant_recipes.launch import resume as launch_resume
from tp_invariant_recipes.ledger.record import Header, LedgerWriter, resume
from tp_invariant_recipes.machine import processor
from tp_invariant_recipes.numerics.mode import definition
from tp_invariant_recipes.numerics.modes.tree import ON_GPU

CPU = {"name": "cpu", "compute_capability": "0.0", "machine": "x86_64", "attention": "portable 1"}
ARM = CPU | {"machine": "aarch64"}
H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "attention": "portable 1"}


def header_of_mode(mode, device):
    return Header(identity={"rng.seed": 1}, numerics={"mode": mode}, device=device)


@pytest.mark.parametrize("other", (ARM, H200), ids=("arm", "gpu"))
def test_portable_promises_equal_bits(other):
    message = across_machines(header_of_mode("portable", CPU), header_of_mode("portable", other), True)
    assert "numerics=portable promises equal bits there" in message
    assert "defect" in message
    assert "with the equal bits" in across_machines(
        header_of_mode("portable", CPU), header_of_mode("portable", other), False
    )


@pytest.mark.parametrize("modes", (("tree", "tree"), ("portable", "tree"), ("stock", "stock")))
def test_other_modes_do_not(modes):
    message = across_machines(header_of_mode(modes[0], CPU), header_of_mode(modes[1], H200), True)
    assert "cpu x86_64; NVIDIA H200 9.0" in message
    assert "equal bits are not promised there, and this difference is no defect" in message
    assert message.endswith("numerics=portable promises them.")


def test_neither_do_two_versions_of_the_definition():
    message = across_machines(
        header_of_mode("portable", CPU), header_of_mode("portable", ARM | {"attention": "portable 2"}), True
    )
    assert message.endswith("(portable 1; portable 2): not promised.")


@pytest.mark.parametrize("mode", ("portable", "tree"))
def test_one_architecture_needs_no_word(mode):
    assert across_machines(header_of_mode(mode, CPU), header_of_mode(mode, CPU | {"attention": "local"}), True) is None


# --- instructions of a CPU ---

AVX2, AMX = (
    CPU | {"instructions": f"torch {torch}, oneDNN {onednn}, MKL GenuineIntel"}
    for torch, onednn in (("AVX2", "AVX2"), ("AVX512", "AVX512_CORE_AMX"))
)


@pytest.mark.parametrize("mode", ("tree", "stock"))
def test_two_processors_of_one_architecture_are_two(mode):
    a, b = header_of_mode(mode, AVX2), header_of_mode(mode, AMX)
    message = across_machines(a, b, True)
    assert (
        "cpu x86_64 torch AVX2, oneDNN AVX2, MKL GenuineIntel; cpu x86_64 torch AVX512, oneDNN AVX512_CORE_AMX"
        in message
    )
    assert "equal bits are not promised there, and this difference is no defect" in message
    assert across_machines(a, a, True) is None
    assert across_machines(a, header_of_mode(mode, CPU), True) is None  # of a release that did not record it


def test_portable_promises_equal_bits_on_two_processors():
    message = across_machines(header_of_mode("portable", AVX2), header_of_mode("portable", AMX), True)
    assert "numerics=portable promises equal bits there" in message


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
WORDS = f"fixed tiles 0; {ON_GPU}"


def test_only_tree_on_a_gpu_has_a_version_of_products():
    results = {
        (mode, kind): definition(mode, kind) for mode in ("tree", "portable", "stock") for kind in ("cpu", "gpu")
    }
    assert {key for key, version in results.items() if version} == {("tree", "gpu")}


def test_a_difference_of_two_definitions_is_not_promised_to_be_none():
    message = other_products(OF_LAST_YEAR, OF_TODAY, 1)
    assert (
        message
        == f"Products have other definitions ({WORDS}): equal bits are not promised, and this difference is no defect."
    )
    assert "these bits are equal all the same" in other_products(OF_TODAY, OF_LAST_YEAR, None)


@pytest.mark.parametrize("result", (OF_LAST_YEAR, OF_TODAY, OF_BOTH), ids=("last-year", "today", "both"))
def test_one_definition_needs_no_word(result):
    """The control: there a difference is one."""
    assert other_products(result, result, 5) is None


@pytest.mark.parametrize("mode, device", (("portable", H200), ("stock", H200), ("tree", CPU)))
def test_other_runs_need_none(mode, device):
    assert other_products(header_of_mode(mode, device), header_of_mode(mode, device | {"product": ON_GPU}), 1) is None


def test_initial_weights_do_not_come_from_products():
    assert other_products(OF_LAST_YEAR, OF_TODAY, 0) is None


@pytest.mark.parametrize("step, excused", ((3, False), (4, True), (None, True)))
def test_a_run_that_went_on_has_both(step, excused):
    message = other_products(OF_LAST_YEAR, OF_BOTH, step)
    assert (message is not None) == excused
    if message:
        assert f"from step 4 on (fixed tiles 0; fixed tiles 0, from step 4 on {ON_GPU})" in message


def test_compare_and_verify_say_so():
    a, b = (ledger(name, digested=lambda step: False) for name in "ab")
    a, b = replace(a, header=OF_LAST_YEAR), replace(b, header=OF_TODAY)
    b = replace(b, steps=(*b.steps[:2], replace(b.steps[2], loss="f32:40c80001"), *b.steps[3:]))
    for against, says in ((a, True), (replace(a, header=OF_TODAY), False)):
        comparison = compare(against, b)
        row = verdict.CellResult("tp=2", Path("b"), 2, 5, comparison.verdict.value, None, b, comparison)
        for sentences in (remarks(comparison), verdict._remarks((row,), [row])):
            assert any(sentence.startswith("Products have other definitions") for sentence in sentences) == says


def test_a_run_with_another_definition_goes_on_and_is_told(tmp_path):
    """What the terminal says, and what the ledger keeps."""
    file = tmp_path / "ledger.jsonl"
    with LedgerWriter(file).create(OF_LAST_YEAR) as writer:
        for item in ledger(header=OF_LAST_YEAR, digested=lambda step: False).steps:
            writer.append(item)

    def planned(device, mode="tree"):
        config = SimpleNamespace(
            numerics=SimpleNamespace(mode=mode, invariant=True),
            recipe=SimpleNamespace(adjusted=[]),
            mixed_precision="bf16_mixed",
            section={"checkpoint": {"save_interval": 1}}.__getitem__,
        )
        return SimpleNamespace(
            device=device, config=config, here=True, run_dir=SimpleNamespace(ledger=file, path=tmp_path)
        )

    message = launch_resume._changed_arithmetic(planned("gpu"), 3)
    assert message.startswith(f"products: up to step 3 their definition is fixed tiles 0, from step 4 on {ON_GPU};")
    assert launch_resume._changed_arithmetic(planned("cpu"), 3) is None
    assert launch_resume._changed_arithmetic(planned("gpu", "portable"), 3) is None
    resume(file, OF_TODAY, 3).close()
    assert launch_resume._changed_arithmetic(planned("gpu"), 4) is None
    assert launch_resume._changed_arithmetic(planned("gpu"), 3) == message
    shown = vars(planned("gpu")) | {"layout": SimpleNamespace(world=1), "steps": 5, "start": 3, "completed": False}
    opening = _start_text(
        SimpleNamespace(**shown, composed=SimpleNamespace(model="qwen3_toy", graphs=None), remark=message)
    )
    assert opening.endswith(f"\n{message}")

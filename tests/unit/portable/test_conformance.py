# SPDX-License-Identifier: Apache-2.0
"""`tpi conformance`: a GPU that adds in another way, and files that are no recordings. tpi conformance --script: the
file that it writes, run as on another machine, and the JSON that --check reads.
"""

import base64
import json
import platform
import re
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.definitions.fp8_sum import fp8_product
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, Quantized
from tp_invariant_recipes.machine.gpus import Gpu
from tp_invariant_recipes.portable import conformance, definition
from tp_invariant_recipes.portable.mode import MODE

by_definition = conformance.by_definition
CASES = len(conformance.built_in().cases)


def with_bf16(gemm):
    """A GPU that multiplies bf16 in this way."""
    return lambda a, b: (by_definition if isinstance(a, Quantized) or a.dtype == torch.float32 else gemm)(a, b)


of_24_bits = with_bf16(partial(tensor_core_cpu.gemm, kept=24))
of_ampere = with_bf16(definition.ampere)  # which test_tensor_core_sum.py compares with such cards


def other_fp8(a, b):
    """A GPU with Blackwell's sum of FP8: 25 bits, one accumulator over all of k."""
    if isinstance(a, Quantized):
        return torch.from_numpy(fp8_product(a, b, kept=25, promoted=1 << 20 if b.blocks == "tensor" else BLOCK))
    return by_definition(a, b)


@pytest.fixture
def recording(tmp_path):
    """What the definition gives for the operands of the built-in files."""
    file = tmp_path / "ours.safetensors"
    metadata = {"gpu": "NVIDIA B300", "capability": "10.3", "torch": torch.__version__}
    conformance.write(file, conformance.built_in(), conformance.by_definition, metadata)
    return file


def test_the_definition_conforms():
    built_in = conformance.built_in()
    assert built_in.gpu == "NVIDIA H200 (sm_90)"
    assert sum(isinstance(case.a, Quantized) for case in built_in.cases) > 40 < len(conformance.read().cases)
    assert conformance.differences(built_in, conformance.by_definition) == []


@pytest.mark.parametrize("gemm", (of_24_bits, of_ampere), ids=("24 bits", "ampere"))
def test_a_gpu_that_adds_in_another_way_differs(gemm):
    wide = conformance.Recording("", tuple(c for c in conformance.read().cases if c.name.endswith("512_wide")))
    (difference,) = conformance.differences(wide, gemm)
    assert f"bf16/512_wide: {difference.count} of 1024 outputs differ" in str(difference)
    assert difference.recorded != difference.computed


def test_what_is_written_is_read(recording):
    written, built_in = conformance.read(recording), conformance.built_in()
    assert written.gpu == "NVIDIA B300 (sm_103)"
    cases = {case.name: case for case in built_in.cases}
    assert {case.name for case in written.cases} == cases.keys()
    for case in written.cases:
        for first, second in ((case.a, cases[case.name].a), (case.b, cases[case.name].b)):
            if isinstance(first, Quantized):
                assert first.blocks == second.blocks
                assert torch.equal(first.scale, second.scale)
                first, second = first.data, second.data
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert conformance.differences(written, conformance.by_definition) == []


def test_a_file_that_conforms(recording, cli):
    done = cli("conformance", "--check", str(recording))
    assert done.status == 0
    assert "(recorded on NVIDIA B300 (sm_103)) adds as an H200 does" in done.out


def test_a_file_with_another_bit(recording, cli):
    tensors = load_file(recording)
    tensors["bf16/k17/c"][3, 4] ^= 1
    save_file(tensors, recording)
    done = cli("conformance", "--check", str(recording))
    assert done.status == 1
    assert "bf16/k17: 1 of 1024 outputs differ, the first at [3, 4]" in done.out
    done = cli("conformance", "--check", str(recording), "--json")
    assert done.status == 1
    (report,) = json.loads(done.out)
    assert [item["case"] for item in report["different"]] == ["bf16/k17"]


def _with_scales_of_another_shape(tensors):
    name = next(name for name in tensors if "1x128/" in name and name.endswith("/sa"))
    return tensors | {name: np.ones((3, 5), np.float32)}


# What is wrong with a file -> its tensors, of those of a recording.
DAMAGED = {
    "resized": lambda tensors: tensors | {"bf16/k17/a": tensors["bf16/k17/a"][:, :16].copy()},
    "renamed": lambda tensors: {"fp16/x/a": np.zeros((1, 1), np.uint16)},
    "incomplete": lambda tensors: {name: x for name, x in tensors.items() if name != "bf16/k17/b"},
    "without scales": lambda tensors: {name: x for name, x in tensors.items() if not name.endswith("/sb")},
    "with scales of another shape": _with_scales_of_another_shape,
    "huge": lambda tensors: {
        f"bf16/x/{name}": np.zeros(shape, np.uint32 if name == "c" else np.uint16)
        for name, shape in {"a": (4096, 256), "b": (256, 4096), "c": (4096, 4096)}.items()
    },
}


@pytest.mark.parametrize("damage", (*DAMAGED, "cut", "absent"))
def test_a_file_that_is_no_recording(recording, damage):
    if damage in DAMAGED:
        save_file(DAMAGED[damage](load_file(recording)), recording)
    elif damage == "cut":
        recording.write_bytes(recording.read_bytes()[:5000])
    else:
        recording.unlink()
    with pytest.raises(RunError, match="is no recording of tpi conformance"):
        conformance.read(recording)


@pytest.fixture
def machine(monkeypatch):
    """(product, whether on a GPU) → this machine multiplies so: a CPU, or a GPU."""

    def make(gemm, gpu):
        gpus = [Gpu("NVIDIA B300", (10, 3), 2**38)] if gpu else []
        monkeypatch.setattr("tp_invariant_recipes.machine.gpus.visible", lambda: gpus)
        monkeypatch.setattr(conformance, "on_gpu", lambda index: gemm)
        if not gpu:
            monkeypatch.setattr(conformance, "by_definition", gemm)

    return make


ALIKE = rf"adds as an H200 does: all bits of {CASES} cases are equal\n"
OTHERWISE = rf"adds in another way: \d+ of {CASES} cases differ\n  "
# How it multiplies, whether it is a GPU, and what is said of it; what adds FP8 otherwise can run all else.
MACHINES = {
    "a CPU": (by_definition, False, rf"this CPU \(\w+\) {ALIKE}"),
    "a CPU of 24 bits": (of_24_bits, False, rf"this CPU \(\w+\) {OTHERWISE}bf16/512_wide: .*"),
    "a GPU": (by_definition, True, rf"GPU 0 \(NVIDIA B300\) {ALIKE}"),
    "a GPU of 24 bits": (of_24_bits, True, rf"GPU 0 \(NVIDIA B300\) {OTHERWISE}bf16/512_wide: .*"),
    "a GPU of other FP8": (other_fp8, True, rf"GPU 0 \(NVIDIA B300\) {OTHERWISE}e\dm\d_(?!.*bf16/).*"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_named_by_how_it_adds(machine, cli, name):
    gemm, gpu, says = MACHINES[name]
    machine(gemm, gpu)
    done = cli("conformance")
    assert done.status == (gemm is not by_definition)
    assert re.fullmatch(f"(?s){says}", done.out), done.out


@pytest.mark.parametrize("name", [name for name in MACHINES if "GPU of other" not in name and name != "a GPU"])
def test_a_recording_is_written_and_checked(machine, monkeypatch, cli, tmp_path, name):
    """Also of a machine that adds in another way: its owner sends the file, and it says so everywhere."""
    gemm, gpu, _ = MACHINES[name]
    file, status = tmp_path / "here.safetensors", int(gemm is not by_definition)
    machine(gemm, gpu)
    done = cli("conformance", "--record", str(file))
    monkeypatch.setattr(conformance, "by_definition", by_definition)
    kind, capability = ("NVIDIA B300", 103) if gpu else (f"a CPU, {platform.machine()}", "00")
    adds = "in another way" if status else "as an H200 does"
    assert done.status == status
    assert f"here.safetensors: {CASES} cases of {kind}" in done.out
    done = cli("conformance", "--check", str(file))
    assert done.status == status
    assert f"(recorded on {kind} (sm_{capability})) adds {adds}" in done.out


@pytest.fixture
def gpu_0(monkeypatch):
    """(product) → GPU 0 is a B300 that multiplies so, and computes functions as this CPU."""
    properties = SimpleNamespace(name="NVIDIA B300", major=10, minor=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, index: tensor)
    definition.require_conformance.cache_clear()
    yield lambda gemm: monkeypatch.setattr(conformance, "on_gpu", lambda index: gemm)
    definition.require_conformance.cache_clear()


def test_a_run_on_a_gpu_that_conforms_starts(gpu_0):
    gpu_0(conformance.by_definition)
    definition.require_conformance(0)
    definition.require_conformance(0, fp8=True)
    MODE.require_machine(None, fp8=True)


AMPERE = "it keeps 24 bits and adds 8 products at once, as Ampere and Ada GPUs do"
GPU_0 = "numerics=portable: GPU 0 (NVIDIA B300, sm_103)"
_WORDS = r"\d+ of \d+ outputs differ, .* recorded 0x\w{8}, computed 0x\w{8}"
# How a GPU multiplies -> whether a run is in FP8, how its refusal begins, the case that it names, and how it ends.
REFUSED = {
    "24 bits": (of_24_bits, False, f"{GPU_0} is not bitwise identical to the definition, so ",  # it names no sum
                rf": bf16/512_wide: {_WORDS}; ", "; or numerics=tree"),
    "ampere": (of_ampere, False, f"{GPU_0} is not bitwise identical to the definition ({AMPERE}), so the run's ledger",
               ": bf16/", "; or numerics=tree"),
    "fp8": (other_fp8, True, f"{GPU_0} adds FP8 GEMMs in another order (Blackwell is expected to)",
            rf": e4m3_e4m3_128x128/\w+: {_WORDS}", " more; precision=bf16 or precision=mxfp8, or numerics=tree"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_on_a_gpu_that_adds_in_another_way_is_refused(gpu_0, name):
    gemm, fp8, beginning, case, end = REFUSED[name]
    gpu_0(gemm)
    if fp8:
        definition.require_conformance(0)  # in bf16 it may run
    with pytest.raises(RunError) as refused:
        definition.require_conformance(0, fp8=fp8)
    message = str(refused.value)
    assert (message.startswith(beginning), message.endswith(end)) == (True, True), message
    assert re.search(case, message)


def test_a_file_of_an_ampere_card_is_named(tmp_path, cli):
    file = tmp_path / "a100.safetensors"
    metadata = {"gpu": "NVIDIA A100", "capability": "8.0", "torch": torch.__version__}
    short = conformance.Recording("", tuple(c for c in conformance.read().cases if "64_" in c.name or "/sub" in c.name))
    conformance.write(file, short, of_ampere, metadata)
    done = cli("conformance", "--check", str(file))
    assert (done.status, done.out.splitlines()[0].endswith(f"cases differ; {AMPERE}")) == (1, True)


def test_a_run_on_a_machine_with_other_functions_is_refused(monkeypatch):
    monkeypatch.setattr(definition, "samples", lambda: np.ones(3, np.float32))
    assert definition.differences(None) == [
        "exp, log, sigmoid, rsqrt or exp2: not bitwise identical to portable/ieee/math.py"
    ]


def test_the_check_at_the_start_is_done_once_a_process(gpu_0):
    calls = []
    gpu_0(lambda a, b: calls.append(0) or conformance.by_definition(a, b))
    definition.require_conformance(0)
    once = len(calls)
    definition.require_conformance(0)
    assert len(calls) == once > 30


RECORDED = {case.name: case for case in conformance.built_in().cases}
BF16 = [name for name in conformance.SCRIPT_CASES if name.startswith("bf16/")]


@pytest.fixture
def card(tmp_path, cli, monkeypatch):
    """The module of the file that tpi wrote, in an empty folder."""
    file = tmp_path / "card.py"
    assert cli("conformance", "--script", str(file)).status == 0
    monkeypatch.chdir(tmp_path)
    spec = spec_from_file_location("card", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(card, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["card.py", *arguments])
    return card.main()


def test_the_file_is_short_and_imports_torch_alone(card):
    text = Path(card.__file__).read_text()
    assert len(text.splitlines()) <= 300
    assert "tp_invariant_recipes" not in text.split('"""', 2)[2]


@pytest.mark.parametrize("case", conformance.SCRIPT_CASES)
def test_its_operands_and_its_first_definition_are_those_of_an_h200(card, case):
    a, b = card.operands(case)
    recorded = RECORDED[case].bits[: a.shape[0], : b.shape[1]]
    rules = list(card.KNOWN["bf16" if case in BF16 else "fp8"].values())
    actual = [card.bits(card.defined(a, b, *rule)).numpy().view(np.uint32) for rule in rules]
    assert (actual[0] == recorded).all()
    if case != "e5m2_e4m3_tensor/tensor_k64_e5m2_18":  # too short for a second accumulator
        assert all((other != recorded).any() for other in actual[1:])


def test_a_cpu_has_no_known_sum(card, monkeypatch, capsys, cli):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(card, monkeypatch, "cpu.json") == 1
    assert "bf16 by torch on the CPU, 128 outputs: no definition known here" in capsys.readouterr().out
    done = cli("conformance", "--check", "cpu.json")
    assert done.status == 1
    assert "cpu.json (recorded on a CPU, " in done.out
    assert "bf16/64_cancel (torch on the CPU): " in done.out


@pytest.mark.parametrize(
    "rule, message, checked, status",
    (
        ((25, 16), "bf16 by torch, 128 outputs: 25 bits, 16 at once: Hopper", "adds as an H200 does", 0),
        ((24, 8), "bf16 by torch, 128 outputs: 24 bits, 8 at once: Ampere", "; it keeps 24 bits and adds 8", 1),
        ((26, 16), "bf16 by torch, 128 outputs: 26 bits, 16 at once", "adds in another way", 1),
    ),
    ids=("hopper", "ampere", "other"),
)
def test_a_gpu_is_named_by_its_sum(card, monkeypatch, capsys, cli, rule, message, checked, status):
    """An sm_80: without FP8. Its products are those of a rule."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(card, "triton", None)
    monkeypatch.setattr(card, "by_torch", lambda a, b: card.defined(a, b, *rule))
    assert run(card, monkeypatch) == 0
    out = capsys.readouterr().out
    assert message in out
    assert "fp8" not in out.replace("nvidia-a100.json", "")
    done = cli("conformance", "--check", "nvidia-a100.json")
    assert (done.status, checked in done.out) == (status, True)


def test_a_card_without_bf16_is_refused_by_name(card, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(SystemExit) as ended:
        run(card, monkeypatch)
    assert ended.value.code == 2
    assert "Tesla T4 (sm_75) has no tensor cores for bf16" in capsys.readouterr().out


DAMAGE = {
    "format": lambda r: r.update(format="tpi conformance 9"),
    "no results": lambda r: r.pop("results"),
    "no case": lambda r: r["cases"].clear(),
    "another size": lambda r: r["cases"]["bf16/64_cancel"].__setitem__(1, 63),
    "a huge size": lambda r: r["cases"]["bf16/64_cancel"].__setitem__(0, 2**40),
    "no number": lambda r: r["cases"]["bf16/64_cancel"].__setitem__(0, "8"),
    "no operands": lambda r: r["cases"]["bf16/64_cancel"].__setitem__(3, 5),
    "no base85": lambda r: r["cases"]["bf16/64_cancel"].__setitem__(3, "\\\\"),
    "short results": lambda r: r["results"]["bf16/64_cancel"].update({"x": base64.b64encode(b"abcd").decode()}),
    "ways": lambda r: r["results"].update({"bf16/64_cancel": [1]}),
    "results": lambda r: r.update(results=[1]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_json_is_no_recording(card, tmp_path, damage):
    bits = base64.b64encode(RECORDED["bf16/64_cancel"].bits[:8, :8].tobytes()).decode()
    cases = {name: [*value] for name, value in card.CASES.items() if name == "bf16/64_cancel"}
    report = {"format": card.FORMAT, "gpu": "x", "capability": "9.0", "cases": cases}
    report["results"] = {"bf16/64_cancel": {"torch": bits}}
    file = tmp_path / "x.json"
    file.write_text(json.dumps(report))
    assert len(conformance.read(file).cases) == 1
    damage(report)
    file.write_text(json.dumps(report))
    with pytest.raises(RunError, match="is no recording of tpi conformance"):
        conformance.read(file)


def test_one_file_at_a_time(cli):
    done = cli("conformance", "--script", "a.py", "--check", "b.json")
    assert (done.status, "give one of them" in done.err) == (2, True)

"""tpi conformance --script: the file that it writes, run as on another machine, and the JSON that --check reads."""

import base64
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.portable import conformance

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


def _changed(report, change):
    change(report)
    return json.dumps(report)


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
    file.write_text(_changed(report, damage))
    with pytest.raises(RunError, match="is no recording of tpi conformance"):
        conformance.read(file)


def test_one_file_at_a_time(cli):
    done = cli("conformance", "--script", "a.py", "--check", "b.json")
    assert (done.status, "give one of them" in done.err) == (2, True)

# SPDX-License-Identifier: Apache-2.0
"""`tpi check`: a linear layer of a dumped step, computed again on this CPU."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from tp_invariant_recipes.features.bisect.recompute import LINEAR, check, names_of

pytestmark = pytest.mark.usefixtures("portable_loops")

SMALL = ("qwen3_toy", "model.num_layers=1", "numerics=portable", "seq=64", "gbs=1", "iters=2")
MODULES = tuple(f"decoder.layers.0.{ending}" for ending in LINEAR)
FC2 = MODULES[-1]


def dump(*modules):
    names = [name for item in map(names_of, modules) for name in (item.weight, *item.operands, *item.results)]
    return ("ledger.trace=1:2", f"ledger.dump=[{','.join(names)}]")


@pytest.fixture(scope="module")
def run(shared):
    """Two steps at tp=2 with dumps of every covered kind of layer."""
    shared("train", *SMALL, "tp=2", *dump(*MODULES), "run.dir=run", status=0)
    return shared.folder / "run"


def test_layers_are_recomputed_with_the_same_bits(shared, run):
    for module in MODULES:
        results = check(run, 2, module).tensors
        assert [(checked.name, checked.identical) for checked in results] == [
            (name, True) for name in names_of(module).results
        ]
    done = shared("check", "run", "--step", "2", "--module", FC2, status=0)
    assert [line.partition(": identical, ")[0] for line in done.stdout.splitlines()[:3]] == list(names_of(FC2).results)
    assert done.stdout.splitlines()[3] == f"identical: step 2 of {FC2}, computed again on this CPU"


@pytest.mark.release
@pytest.mark.parametrize("precision", ("fp8_tensorwise", "fp8_blockwise", "mxfp8"))
def test_a_layer_in_fp8_is_recomputed_with_the_same_bits(shared, precision):
    fp8 = (f"precision={precision}", "seq=128", "model.kv_channels=32", "numerics.virtual_shards=2")
    shared("train", *SMALL, *fp8, "tp=2", *dump(*MODULES), f"run.dir={precision}", status=0)
    for module in MODULES:
        done = shared("check", precision, "--step", "2", "--module", module, status=0)
        assert done.stdout.splitlines()[3] == f"identical: step 2 of {module}, computed again on this CPU"


@pytest.mark.release
@pytest.mark.parametrize("layout", ("dp=2 gbs=4", "tp=4 sp=false", "pp=2 model.num_layers=2"))
def test_any_layout_will_do(shared, layout):
    name = layout.replace(" ", "-").replace(".", "-")
    assert shared("train", *SMALL, *layout.split(), *dump(*MODULES), f"run.dir={name}").status == 0
    for module in MODULES:
        assert shared("check", name, "--step", "2", "--module", module).status == 0


def test_one_flipped_bit_is_detected(shared, run):
    """Of the output, in the file of a rank; the JSON counts it."""
    file = next(
        file
        for file in sorted((run / "dumps" / "step-0000002").iterdir())
        if any(f"forward/{FC2}/output" in text for text in _metadata(file).values())
    )
    before = file.read_bytes()
    metadata, tensors = _metadata(file), load_file(file)
    (key,) = [key for key, text in metadata.items() if f'"forward/{FC2}/output"' in text and '"row": 0,' in text]
    tensors[key][0, 0] ^= 1
    save_file(tensors, file, metadata)
    try:
        done = shared("check", "run", "--step", "2", "--module", FC2, status=1)
        assert f"forward/{FC2}/output: different, 1 of 8192 elements, by at most 1 ULP, the first at (0, 0, 0)" in (
            done.stdout
        )
        assert "different: step 2 of" in done.stdout
        done = shared("check", "run", "--step", "2", "--module", FC2, "--json")
        report = json.loads(done.stdout)
        assert [tensor["identical"] for tensor in report["tensors"]] == [False, True, True]
        assert (done.status, report["exit_status"]) == (1, 1)
    finally:
        file.write_bytes(before)


def _metadata(file):
    from safetensors import safe_open

    with safe_open(file, framework="np") as stream:
        return stream.metadata()


REFUSED = {
    ("run", "1", FC2): "--step must be 2 or more",
    ("run", "2", "decoder.final_layernorm"): "--module decoder.final_layernorm is not covered; these are: decoder.",
    ("run", "2", "decoder.layers.1.mlp.linear_fc2"): (
        "train it with ledger.trace=1:2 'ledger.dump=[weights/decoder.layers.1.mlp.linear_fc2.weight,"
    ),
    ("nowhere", "2", FC2): "nowhere",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_message(shared, run, arguments):
    folder, step, module = arguments
    done = shared("check", folder, "--step", step, "--module", module, status=2)
    assert REFUSED[arguments] in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.release
def test_only_portable_runs_can_be_recomputed(shared):
    assert shared("train", *SMALL[:1], *SMALL[2:], "numerics=tree", "run.dir=tree").status == 0
    done = shared("check", "tree", "--step", "2", "--module", FC2, status=2)
    assert "a run of numerics=tree, whose bits no CPU can compute; numerics=portable specifies them" in done.stderr

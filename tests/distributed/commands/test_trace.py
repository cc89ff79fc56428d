# SPDX-License-Identifier: Apache-2.0
"""Traces and dumps end to end: one trace for all layouts, that changes no bit, of the very tensors."""

import dataclasses

import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.distributed.scenario import STOCK, unequal
from tests.distributed.small_models import RECOMPUTED, small
from tp_invariant_recipes.kernels.digest import lanes
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger.digests import tensor_digest
from tp_invariant_recipes.ledger.dumps import distance, read_step, steps
from tp_invariant_recipes.observe.placement import Site

SMALL = "qwen3_toy seq=32 gbs=2 iters=2 numerics=stock ledger.trace=2:2"

# Each must have the trace of tp=1, every bit of it, as `runs` must. Sequence parallelism is on where tp > 1 unless said
# otherwise.
LAYOUTS = ("tp=2 pp=2", "tp=4", "tp=2 sp=false", f"tp=2 sp=false {RECOMPUTED}")
SINGLE_STEP = "iters=1 ledger.trace=1:1"

FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
# Dumped in every run of `runs`: one of each kind of place.
DUMPED = (
    "forward/embedding.word_embeddings/input", "forward/embedding.word_embeddings/output",
    "forward/decoder.layers.1.self_attention.core_attention/input.1",
    "forward/decoder.layers.1.self_attention.core_attention/output", "forward/decoder.layers.0.mlp.linear_fc1/output",
    "backward/decoder.layers.0.mlp.linear_fc2/output", "backward/decoder.layers.1.pre_mlp_layernorm/output",
    "backward/output_layer/input", f"gradients/{FC1}", f"masters/{FC1}",
)  # fmt: skip
# What to ask for; only these match.
PATTERNS = (
    "forward/embedding.word_embeddings/*", "forward/decoder.layers.1.self_attention.core_attention/input.1",
    "forward/*.1.self_attention.core_attention/output", *DUMPED[4:6], "backward/*s.1.pre_mlp_layernorm/out?ut",
    "backward/output_layer/input", f"gradients/{FC1}", f"?asters/{FC1}",
)  # fmt: skip


# Its embedding looks up tokens a second time, on the last stage, and its output layer has several inputs.
AHEAD = (
    "qwen3_toy seq=32 gbs=2 iters=1 model.mtp_num_layers=1 model.share_embeddings_and_output_weights=false "
    "ledger.trace=1:1"
)


def untraced(steps):
    return [dataclasses.replace(step, trace=None) for step in steps]


def by_name(trace):
    named = {f"{t.direction}/{t.module}/{t.tensor}": t for t in trace}
    assert len(named) == len(trace)
    return named


@pytest.fixture(scope="module")
def tree(scenario):
    """Runs whose traces all layouts must have."""
    return scenario(SMALL, "numerics=tree")


@pytest.fixture(scope="module")
def runs(tree):
    """The run that layouts are compared with, and one of another layout with the same dumps."""
    dump = f"ledger.dump=[{','.join(PATTERNS)}]"
    return {"one": tree(dump), "two": tree("tp=2", RECOMPUTED, dump)}


@pytest.mark.release
def test_a_module_that_reruns_in_a_micro_batch_is_traced_once(scenario):
    traces = [scenario(AHEAD, layout).ledger()[0].trace for layout in ("tp=1", "tp=2", "pp=2")]
    assert traces[0] == traces[1] == traces[2]
    assert by_name(traces[0])["forward/embedding.word_embeddings/output"].digest


def assert_equal_traces(first, other):
    for a, b in zip(first.ledger(), other.ledger(), strict=True):
        assert b.trace == a.trace
        assert (b.gradients, b.weights) == (a.gradients, a.weights)
        assert not b.diverged
    assert [step.trace is not None for step in other.ledger()] == [False, True]


def test_another_layout_with_recomputation_has_one_trace_with_all_digests(runs):
    assert_equal_traces(runs["one"], runs["two"])
    assert "tensors of the trace" in runs["one"].compared(runs["two"], status=0).stdout
    trace = by_name(runs["one"].ledger()[1].trace)
    assert [name for name, traced in trace.items() if traced.digest is None] == []
    assert len(trace) > 120
    assert trace["forward/decoder.layers.1.mlp.linear_fc1/output"].shape == (32, 2, 512)
    assert trace["forward/model/output"].shape == (2, 32)


@pytest.mark.release
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_trace_for_all_layouts(runs, tree, layout):
    assert_equal_traces(runs["one"], tree(layout))


def test_a_header_names_the_attention_backend_that_runs(runs):
    assert runs["one"].header().device["attention"] == "local"


def test_a_trace_is_in_the_order_of_execution(runs):
    names = list(by_name(runs["two"].ledger()[1].trace))
    layer = "decoder.layers.1"
    expected = (
        "forward/embedding/output",
        "forward/decoder.layers.0/output",
        f"forward/{layer}.input_layernorm/output",
        f"forward/{layer}.self_attention.linear_qkv/input",
        f"forward/{layer}.self_attention.linear_qkv/output",
        f"forward/{layer}.mlp.linear_fc2/output",
        f"forward/{layer}/output",
        "forward/output_layer/output",
        "backward/output_layer/input",
        "backward/output_layer/output",
        f"backward/{layer}/input",
        f"backward/{layer}.mlp.linear_fc2/input",
        f"backward/{layer}.mlp.linear_fc2/output",
        f"backward/{layer}.self_attention.linear_qkv/output",
        f"backward/{layer}/output",
        "backward/decoder.layers.0/input",
        "backward/embedding/input",
    )
    assert sorted(expected, key=names.index) == list(expected)


def test_a_module_sends_its_own_gradient_not_the_sum(runs):
    """The residual connection reads the same tensor as the norm does."""
    trace = by_name(runs["one"].ledger()[1].trace)
    norm, layer, before = (
        trace[f"backward/decoder.layers.{name}"].digest for name in ("1.input_layernorm/output", "1/output", "0/input")
    )
    assert norm != layer
    assert layer == before


@pytest.mark.release
def test_a_trace_changes_no_bit(runs, tree):
    plain = tree("ledger.trace=null").ledger()
    for run in runs.values():
        assert unequal(untraced(run.ledger()), plain) == []


def test_stock_numerics_differ_from_the_first_sum_across_ranks_on(scenario):
    """From equal weights; what is before that sum matches, and after the backward pass's, too."""
    short = scenario(SMALL, STOCK, SINGLE_STEP, "gbs=1 model.num_layers=1")
    first, second = (short(f"tp={tp}").ledger()[0] for tp in (1, 2))
    assert not second.diverged
    differs = [name for name, a in by_name(first.trace).items() if by_name(second.trace)[name] != a]
    assert differs[0] == "forward/decoder.layers.0.self_attention.linear_proj/output"
    assert "backward/embedding/input" in differs


@pytest.mark.release
@pytest.mark.parametrize("layout", ("dp=2 tp=2 numerics.data_shards=2", "mbs=2"))
def test_data_parallel_ranks_and_micro_batches_are_one_batch(tree, layout):
    """The forward and the backward pass of a sequence are those of one rank that computes it alone."""
    single, other = (tree(words, SINGLE_STEP).ledger()[0].trace for words in ("", layout))
    assert by_name(other) == by_name(single)


def test_digests_are_those_of_the_dumped_tensors(runs):
    for run in runs.values():
        step, dumps = run.ledger()[1], read_step(run.run, 2)
        digests = {name: traced.digest for name, traced in by_name(step.trace).items()}
        digests |= {f"gradients/{FC1}": step.gradients[FC1], f"masters/{FC1}": step.masters[FC1]}
        assert steps(run.run) == [2]
        assert set(dumps.names) == set(DUMPED)
        for name in dumps.names:
            whole = dumps.read(name)
            bits = torch.from_numpy(whole.bits.view(whole.bits.dtype.str.replace("u", "i")))
            total = lanes([TensorPart(bits, 0, 0)])[0].tolist()
            assert tensor_digest(total, whole.dtype, whole.shape) == digests[name]
    first, second = (read_step(run.run, 2) for run in runs.values())
    for name in DUMPED:
        assert distance(first.read(name), second.read(name)).differing == 0
    assert 0 < first.read("forward/embedding.word_embeddings/input").bits.max() < 512


@pytest.mark.release
def test_a_pattern_that_matches_nothing_ends_the_run_before_the_first_step(tpi):
    wrong = "forward/decoder.layers.0.mlp.linear_fc11/output", "gradients/*.linear_fc3.weight"
    failed = tpi("train", *SMALL.split(), f"ledger.dump=[{','.join(wrong)},weights/*]", "run.dir=run")
    assert failed.status == 2
    assert "ledger.dump: the model has no such tensor:" in failed.stderr
    assert "did you mean 'forward/decoder.layers.0.mlp.linear_fc1/output'?" in failed.stderr
    assert "gradients/*.linear_fc3.weight; did you mean 'gradients/decoder.layers." in failed.stderr
    assert "weights/*" not in failed.stderr
    assert not (tpi.folder / "run/dumps").exists()


@pytest.mark.release
def test_tokens_within_experts_have_no_place(scenario):
    experts, traces = scenario(small("qwen3_moe_toy"), "gbs=2 numerics=stock", SINGLE_STEP), {}
    for name, layout in (("one", "dp=2"), ("two", "dp=2 ep=2"), ("tp2", "tp=2")):
        step = experts(layout).ledger()[0]
        assert not step.diverged
        traces[name] = by_name(step.trace)
    for trace in traces.values():
        assert {traced.digest is None for name, traced in trace.items() if ".experts." in name} == {True}
        assert {traced.digest is None for name, traced in trace.items() if ".experts." not in name} == {False}
        assert trace["forward/decoder.layers.0.mlp.router/output"].shape == (32, 2, 8)
    assert list(traces["one"]) == list(traces["two"])
    # Nothing is summed in another order before the first expert's output.
    router = list(traces["one"]).index("forward/decoder.layers.0.mlp.router/output.1")
    assert list(traces["one"].values())[: router + 1] == list(traces["two"].values())[: router + 1]


def _wrong_on_single_rank():
    """A norm whose second rank adds a bit at step 2, where both should hold the same."""
    from tp_invariant_recipes.observe import trace

    original = trace.Tracing.on_train_step_start

    def start(self, context):
        import torch.distributed as dist

        original(self, context)
        if context.state.train_state.step == 1 and dist.get_rank() == 1:
            norm = trace.unwrapped(context.model[0]).decoder.layers[1].pre_mlp_layernorm
            norm.register_forward_hook(lambda module, args, output: output * 2, prepend=True)

    trace.Tracing.on_train_step_start = start


@pytest.mark.release
def test_replicas_that_disagree_are_named(tpi):
    arguments = (*SMALL.split(), "numerics=tree", "tp=2", "sp=false", "run.dir=run")
    tpi("train", *arguments, before=_wrong_on_single_rank, status=0)
    first, second = tpi.ledger("run")
    assert first.diverged == ()
    assert second.diverged[0] == ("forward", "decoder.layers.1.pre_mlp_layernorm/output", ((0,), (1,)))


def _megatrons_positions(mesh) -> list[int]:
    from megatron.core.utils import get_batch_on_this_cp_rank

    from tp_invariant_recipes.cpu_host import cpu

    with cpu.installed():
        batch = {"tokens": torch.arange(32).view(1, 32), "cu_seqlens": None}
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mesh.group)["tokens"][0].tolist()


@pytest.mark.release
def test_context_parallel_ranks_have_the_positions_that_megatron_gives_them(bridge):
    for rank, held in enumerate(on_ranks(4, 4, _megatrons_positions)):
        parts = Site(None, 32, 1, 1, cp=4, cp_rank=rank).positions(split=False)
        assert [position for first, count in parts for position in range(first, first + count)] == held

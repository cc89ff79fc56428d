"""`tpi bisect` names module, pass and step of a planted fault: additions in another order, in one layer and step."""

import json

import pytest

# In fp32, since bf16 would round most of what another order changes away.
SMALL = ("qwen3_toy", "seq=32", "gbs=1", "numerics=tree", "precision=fp32")
FC2 = "decoder.layers.1.mlp.linear_fc2"
QKV = "decoder.layers.0.self_attention.linear_qkv"


def train(tpi, run, *overrides, before=None):
    tpi("train", *SMALL, *overrides, f"run.dir={run}", before=before, status=0)


def _at(step, module, act):
    """Call act(module, on) as step `step` of training begins (on=True) and ends, on every rank."""

    def plant():
        from tp_invariant_recipes.observe.digests.callback import Digests
        from tp_invariant_recipes.observe.shards import unwrapped

        def around(name, now, on):
            original = getattr(Digests, name)

            def callback(self, context):
                if now(context.state.train_state.step) == step:
                    act(dict(unwrapped(context.model[0]).named_modules())[module], on)
                original(self, context)

            setattr(Digests, name, callback)

        around("on_train_step_start", lambda done: done + 1, True)
        around("on_train_step_end", lambda done: done + 1, False)

    return plant


def _wrong_order(faulty):
    """Add the ranks' partial products of the module's weight one after the other, where faulty(config) says so."""

    def act(module, on):
        import torch.distributed as dist

        from tp_invariant_recipes.numerics.layers.formats import plain
        from tp_invariant_recipes.numerics.sums import tree

        if not faulty(module.config):
            return
        if not on:
            plain.start_contraction = module.original
            return

        def in_rank_order(partials, mesh):
            node = tree.tree_sum(partials)
            dist.all_reduce(node, group=mesh.group)
            return tree.Reducing(tree.Moving(node.chunk(mesh.size)[mesh.rank].unsqueeze(0)))

        original = module.original = plain.start_contraction

        def start(a, b, *others):
            sound = plain.start_reduce_scatter
            if b.data_ptr() == module.weight.data_ptr():
                plain.start_reduce_scatter = in_rank_order
            try:
                return original(a, b, *others)
            finally:
                plain.start_reduce_scatter = sound

        plain.start_contraction = start

    return act


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.release
def test_a_forward_product_added_in_another_order_across_tp(tpi):
    """tp=1 against tp=4, from the checkpoint before; the runs stay as they are."""
    plant = _at(3, FC2, _wrong_order(lambda config: config.tensor_model_parallel_size == 4))
    for tp in (1, 4):
        train(tpi, f"tp{tp}", f"tp={tp}", "iters=4", "save=2", before=plant)
    compared = tpi("compare", "tp1", "tp4", status=1)
    assert "different at step 3: " in compared.stdout
    before = [files(tpi.folder / run) for run in ("tp1", "tp4")]

    completed = tpi("bisect", "tp1", "tp4", "--dir", "bisect", before=plant, status=1)
    assert f"different at step 3: forward of {FC2}: output differs, its inputs and weights matched" in completed.stdout
    assert f"forward/{FC2}/output: " in completed.stdout
    assert "elements differ, by at most" in completed.stdout
    assert "does not repeat" not in completed.stdout
    assert "traced-a: tp1 from step 2" in completed.stderr
    assert [files(tpi.folder / run) for run in ("tp1", "tp4")] == before

    result = json.loads((tpi.folder / "bisect/bisect.json").read_text())
    assert result["placed"]["first_difference"]["name"] == f"forward/{FC2}/output"
    assert result["dumped"] == [f"forward/{FC2}/output", f"forward/{FC2}/input"]
    assert result["distance"]["differing"] > 0
    assert result["same_place"] is True
    traced = tpi("compare", "bisect/traced-a", "bisect/traced-b")
    assert f"step 3: forward of {FC2}: output differs" in traced.stdout


@pytest.mark.release  # in `make test`: the forward product, and the weight gradient
def test_a_backward_product_added_in_another_order_within_one_tp(tpi):
    """tp=4 with and without sequence parallelism, from the start."""
    plant = _at(2, QKV, _wrong_order(lambda config: config.sequence_parallel))
    for sp in ("true", "false"):
        train(tpi, f"sp-{sp}", "tp=4", f"sp={sp}", "iters=3", before=plant)
    completed = tpi("bisect", "sp-true", "sp-false", "--dir", "bisect", "--json", before=plant, status=1)
    result = json.loads(completed.stdout)
    first = result["placed"]["first_difference"]
    assert (first["step"], first["phase"], first["name"]) == (2, "backward", f"backward/{QKV}/output")
    assert first["inputs_matched"] is True
    assert result["dumped"] == [f"backward/{QKV}/output", f"backward/{QKV}/input"]
    assert result["distance"]["max_ulp"] > 0
    assert "traced-a: sp-true from step 0" in completed.stderr

    # What it trained again, from the start and traced, are runs as any other: compare alone names it.
    for side, sp in (("a", "true"), ("b", "false")):
        run = json.loads((tpi.folder / f"bisect/traced-{side}/run.json").read_text())
        assert f"sp={sp}" in run["overrides"]
    assert f"different at step 2: backward of {QKV}" in tpi("compare", "bisect/traced-a", "bisect/traced-b").stdout


def _flipped(module, on):
    """The last bit of one element of each rank's weight gradient, at tp=2, once gradients are reduced over ranks."""
    import torch

    config = module.config
    if config.tensor_model_parallel_size != 2:
        return
    if not on:
        config.finalize_model_grads_func = module.original
        return
    original = module.original = config.finalize_model_grads_func

    def finalize(*args, **kwargs):
        original(*args, **kwargs)
        module.weight.main_grad.view(torch.int32)[0, 0] ^= 1

    config.finalize_model_grads_func = finalize


FC1 = "decoder.layers.1.mlp.linear_fc1"


@pytest.mark.release
def test_a_weight_gradient_is_named_with_its_module(tpi):
    plant = _at(2, FC1, _flipped)
    for tp in (1, 2):
        train(tpi, f"tp{tp}", f"tp={tp}", "iters=2", before=plant)
    completed = tpi("bisect", "tp1", "tp2", "--dir", "bisect", before=plant, status=1)
    assert f"different at step 2: gradient of {FC1}.weight differs, the inputs of {FC1}" in completed.stdout
    assert "and the gradient that arrives at it matched" in completed.stdout
    assert f"gradients/{FC1}.weight: 2 of 65536 elements differ, by at most 1 ULP" in completed.stdout
    repeated = tpi("bisect", "tp1", "tp2", "--dir", "bisect", status=2)
    assert "--dir bisect is there and is not an empty directory" in repeated.stderr


@pytest.mark.release
def test_what_there_is_nothing_to_retrain_for(tpi):
    train(tpi, "a", "tp=1", "iters=1")
    train(tpi, "b", "tp=2", "iters=1")
    train(tpi, "seed", "tp=1", "iters=1", "seed=5")
    train(tpi, "drawn", "tp=2", "iters=1", "numerics=stock", "numerics.initial_weights=megatron")
    equal = tpi("bisect", "a", "b", "--dir", "bisect")
    assert (equal.status, equal.stdout.partition(":")[0]) == (0, "identical")
    other = tpi("bisect", "a", "seed", "--dir", "bisect", status=2)
    assert "rng.seed is 1234 and 5" in other.stderr
    tpi("bisect", "a", "b/ledger.jsonl", "--dir", "bisect", status=0)  # the ledger of a run directory is that run
    (tpi.folder / "copy.jsonl").write_bytes((tpi.folder / "b/ledger.jsonl").read_bytes())
    copied = tpi("bisect", "a", "copy.jsonl", "--dir", "bisect", status=2)
    assert "copy.jsonl: to train a step again takes the run directory" in copied.stderr
    begun = tpi("bisect", "a", "drawn", "--dir", "bisect", status=1)
    assert "initial weight of embedding.word_embeddings.weight differs" in begun.stdout
    assert not (tpi.folder / "bisect").exists()

# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters of linear layers on frozen weights, trained on the CPU on examples, from weights that are there."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests import examples, hf_folders
from tests.distributed.faults import product_per_rank
from tests.distributed.scenario import STOCK, Scenario, agree, stock_differs, unequal
from tests.distributed.small_models import GATHER
from tests.operands import same_bits
from tests.recipe_files import TUNED
from tp_invariant_recipes.ledger.bits import bits_float

pytestmark = pytest.mark.usefixtures("families")

MINE = (
    TUNED
    + """
from megatron.bridge.peft.lora import LoRA


def whole():
    return small(_sft_common())


def adapted():
    cfg = small(_peft_common())
    cfg.peft = LoRA(dim=8, alpha=16)
    return cfg
"""
)
DATA = "dataset.dataset_root=examples tokenizer.tokenizer_model=tokenizer"
BASE = "checkpoint.pretrained_checkpoint=base/checkpoints"
ADAPTED = f"recipe=mine.py:adapted {DATA} {BASE}"
SHARDS = "iters=2 gbs=4 numerics.data_shards=2"
TOY = "qwen3_toy model.num_layers=1 seq=32 gbs=1"


def train(tpi, run, *words):
    """For what follows in the run directory; a ledger alone is a scenario's."""
    tpi("train", *" ".join(words).split(), f"run.dir={run}", status=0)


@pytest.fixture(scope="module")
def base(shared):
    """A folder with a checkpoint of weights to adapt, a recipe and examples."""
    examples.write(shared.folder)
    (shared.folder / "mine.py").write_text(MINE)
    train(
        shared, "base", "recipe=mine.py:whole", DATA, "iters=1 gbs=1 save=1 lr=1e-6 optimizer.min_lr=0 ledger.digests=0"
    )
    return shared.folder


@pytest.fixture(scope="module")
def adapted(base, shared):
    """Trainings of adapters in that folder."""
    return Scenario(shared, base / "runs", tuple(ADAPTED.split()))


@pytest.fixture(scope="module")
def toy(shared):
    """Trainings of adapters on a model of ours. Its data is generated: each token counts."""
    train(shared, "toy", TOY, "iters=1 save=1 ledger.digests=0")
    start = "checkpoint.pretrained_checkpoint=toy/checkpoints"
    return Scenario(shared, shared.folder / "runs")(TOY, "iters=2 peft=lora peft.dim=8", start)


def test_adapters_have_one_result_in_every_layout(toy):
    agree(toy, ("tp=1", "tp=2"))


def test_with_stock_numerics_they_have_not(toy):
    stock_differs(toy("iters=1"), ("tp=1", "tp=2"))


def test_only_adapters_are_trained(toy):
    first, *_, last = toy("tp=1").ledger()
    assert {name.rpartition(".adapter.")[2] for name in first.gradients} == {"linear_in.weight", "linear_out.weight"}
    assert first.gradients.keys() == first.masters.keys()
    assert first.weights == last.weights  # the base, which has no master weights
    assert len(first.weights) == len(toy("tp=1").header().initial) - len(first.gradients)


@pytest.mark.release
def test_adapters_lower_the_loss(adapted):
    results = [bits_float(step.loss) for step in adapted("iters=12 lr=1e-2 ledger.digests=0").ledger()]
    assert results[-1] < 0.8 * results[0], results


@pytest.mark.parametrize("alpha, dim", ((32, 8), (5, 3), (7, 24)))
def test_an_adapter_is_scaled_by_one_number(bridge, monkeypatch, alpha, dim):
    """As Bridge scales and merges it: alpha/dim rounded once, then one product of each element."""
    from tp_invariant_recipes.numerics.megatron import lora

    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(lora, "gathered_linear", lambda x, *_: x)
    weights = SimpleNamespace(weight=None)
    adapter = SimpleNamespace(
        linear_in=weights, linear_out=weights, mesh=None, config=SimpleNamespace(sequence_parallel=False),
        input_is_parallel=False, base_linear_is_parallel=False, alpha=alpha, dim=dim,
    )  # fmt: skip
    assert same_bits(lora.InvariantLinearAdapter.forward(adapter, x), x * (alpha / dim))


def _bridges_adapters() -> None:
    _without("ParallelLinearAdapter")


def _bridges_weights() -> None:
    _without("_apply_peft_transformation")


def _without(target: str) -> None:
    from tp_invariant_recipes.numerics.megatron import lora as adapters

    rows = adapters.replacements
    adapters.replacements = lambda *run: tuple(row for row in rows(*run) if not row.target.endswith(target))


# What is left out. A gradient's last bits show in its digest.
INGREDIENTS = {
    "products of chunks": product_per_rank,
    "sums of adapters": _bridges_adapters,
    "initial weights": _bridges_weights,
}


@pytest.mark.release
@pytest.mark.parametrize("omitted", INGREDIENTS)
def test_each_ingredient_is_needed(toy, omitted):
    first, second = (toy(at).planted(INGREDIENTS[omitted]).ledger() for at in ("tp=1", "tp=2"))
    assert unequal(first, second)


# --- For a release ---

LAYOUTS = ("dp=2", "dp=2 mbs=2 tp=2", "pp=2", "tp=2 pp=2", "tp=4 sp=false", "tp=8", "dp=2 pp=2")
SAME = (
    "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
    "optimizer.use_distributed_optimizer=true ddp.overlap_grad_reduce=false dp=2 tp=2",
    f"dp=2 {GATHER}",
)


@pytest.mark.release
@pytest.mark.parametrize("layout", ("tp=2", *LAYOUTS, *SAME))
def test_of_examples_too(adapted, layout):
    steps = adapted(SHARDS, layout).ledger()
    assert unequal(steps, adapted(SHARDS, "tp=1").ledger()) == []
    assert len(steps[0].masters) == 16


@pytest.mark.release
def test_with_stock_numerics_they_have_not_of_examples(adapted):
    assert "different at step 1" in stock_differs(adapted("iters=1 gbs=1"), ("tp=1", "tp=2"))


@pytest.mark.release
@pytest.mark.parametrize("targets", ("linear_qkv", "linear_proj,linear_fc1", "linear_fc2"))
def test_selected_layers_alone_can_be_adapted(adapted, targets):
    chosen = adapted(f"iters=2 peft.target_modules=[{targets}] peft.lora_A_init_method=kaiming precision=fp32")
    first, second = (chosen(at).ledger() for at in ("tp=1", "tp=2"))
    assert unequal(first, second) == []
    assert {name.split(".")[4] for name in first[0].gradients} == set(targets.split(","))


@pytest.mark.release
def test_a_model_of_tpi_has_adapters_too(tpi):
    """With biases, tied embeddings on two stages, and the weights of a folder."""
    hf_folders.make(tpi.folder / "hf", hf_folders.model_section("qwen25_toy"))
    words = "qwen25_toy seq=64 gbs=2 iters=2 peft=lora peft.dim=8 weights=hf"
    whole = Scenario(tpi, tpi.folder / "runs")(words)
    agree(whole, ("tp=1", "tp=2", "pp=2"))
    train(tpi, "parts", words, "save=1 train.exit_interval=1")
    assert tpi("train", "--resume", "parts", "tp=2").status == 0
    assert tpi("compare", whole("tp=1").run, "parts").status == 0
    assert tpi.ledger("parts")[-1] == whole("tp=1").ledger()[-1]
    shutil.rmtree(tpi.folder / "hf")
    gone = tpi("train", "--resume", "parts", "iters=3", status=2)
    assert "no such folder" in gone.stderr


@pytest.mark.release
def test_a_run_goes_on_from_the_weights_it_began_with(base, tpi):
    """Its checkpoints lack them, and test_lora_kinds.py goes on in other layouts."""
    for name in ("mine.py", "examples", "tokenizer"):
        (tpi.folder / name).symlink_to(base / name)
    shutil.copytree(base / "base", tpi.folder / "base")
    train(tpi, "parts", ADAPTED, "iters=4 save=2 train.exit_interval=2")
    saved, whole = (tpi.folder / f"{run}/checkpoints/iter_000000{n}" for run, n in (("parts", 2), ("base", 1)))
    size, of_whole = (sum(file.stat().st_size for file in folder.rglob("*")) for folder in (saved, whole))
    assert size < of_whole
    shutil.rmtree(tpi.folder / "base")
    train(tpi, "base", "recipe=mine.py:whole", DATA, "iters=1 save=1 seed=9")
    other = tpi("train", "--resume", "parts", status=2)
    assert "the state loaded for step 2 is not the one that the ledger has of it: weights/" in other.stderr


@pytest.mark.release
def test_a_trace_has_the_tensors_of_adapters(toy):
    first, second = (toy("ledger.trace=1", at).ledger() for at in ("tp=1", "tp=4 sp=false"))
    assert unequal(first, second) == []
    placed = {result.module.partition("layers.0.")[2]: result.shape for result in first[0].trace if result.digest}
    layers = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}
    assert placed.keys() >= {f"{layer}{part}" for layer in layers for part in ("", ".to_wrap", ".adapter")}


@pytest.mark.release
def test_a_recipe_of_bridge(base, toy, shared):
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 512,
        "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (shared.folder / "hf").mkdir()
    (shared.folder / "hf" / "config.json").write_text(json.dumps(config))
    recipe = (
        "recipe=qwen3_600m_peft_config recipe.hf_folder=hf checkpoint.pretrained_checkpoint=toy/checkpoints seq=32 "
        "gbs=4 iters=2 scheduler.lr_warmup_iters=0 dataset.num_workers=0 validation.eval_iters=0 "
        "validation.eval_interval=null ddp.grad_reduce_in_fp32=true dataset.enable_offline_packing=false"
    )
    words = (*recipe.split(), *DATA.split(), "tp=1,2", "dp=1,2")
    shared("verify", *words, "--dir", "bridge", status=0)
    shared("verify", *words[:-1], *STOCK.split(), "--dir", "bridge-stock", status=1)


# --- What is refused ---


# Words of a command -> what it says, before ranks start.
REFUSED = {
    "recipe=mine.py:adapted peft.target_modules=[linear_qvk]": "no layer is named linear_qvk; did you mean",
    "recipe=mine.py:adapted peft.target_modules=linear_qkv": "peft.target_modules=linear_qkv: expected",
    "recipe=mine.py:adapted checkpoint.pretrained_checkpoint=examples": "holds no checkpoint of Megatron-Bridge; of",
    "qwen3_moe_toy peft=lora peft.experts_shared_outer_loras=true": "peft.experts_shared_outer_loras",
}


@pytest.mark.release
def test_what_is_not_covered_is_reported_before_ranks_start(cli, base, monkeypatch):
    monkeypatch.chdir(base)
    for words, says in REFUSED.items():
        model, *more = words.split()
        data = DATA.split() if "recipe" in model else ()
        ended = cli("train", model, *data, BASE, *more, "device=cpu", "run.dir=wrong")
        assert (ended.status, ended.out) == (2, ""), words
        assert says in ended.err
        assert "Traceback" not in ended.err
        assert not (base / "wrong").exists()


def test_what_cannot_be_exported_is_reported(toy, cli, shared, monkeypatch):
    monkeypatch.chdir(shared.folder)
    toy("tp=1").ledger()
    for run, option, message in ((toy("tp=1").run, "--masters", "whose base has no master weights"),
                              ("toy", "--merge", "has no adapters to merge")):  # fmt: skip
        ended = cli("export", run, "exported", option)
        assert ended.status == 2
        assert message in ended.err
    assert not (shared.folder / "exported").exists()


# --- Exports ---

PERIOD = (4, 9, 5, 30, 7, 11, 6, 20)  # token ids of tests/examples.py
FP32 = 2e-6  # of the loss: another order of its sums


# What a process without Megatron prints: the loss of a folder, with the adapters of another if there is one, for the
# sequence that each sample of `exports` holds.
LOSS = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
tokens = torch.tensor([[*map(int, sys.argv[1].split(","))]])
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
for adapters in sys.argv[3:]:
    model = PeftModel.from_pretrained(model, adapters)
with torch.no_grad():
    logits = model.eval()(tokens[:, :-1]).logits
print(float(torch.nn.functional.cross_entropy(logits[0].double(), tokens[0, 1:])))
"""


def _loss(*folders) -> float:
    tokens = ",".join(map(str, [*PERIOD * 4, PERIOD[0]]))
    done = subprocess.run([sys.executable, "-c", LOSS, tokens, *folders], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exports(shared):
    """Adapters after a step, exported twice, their base, and the loss that Megatron has with them at the next step.

    Each window of 32 tokens of the text is the same one.
    """
    folder = shared.folder
    hf_folders.make(folder / "hf32", hf_folders.model_section("qwen3_toy"), dtype="F32")
    (folder / "words").mkdir()
    examples.write(folder / "words")
    words = [str(id_ - 4) for id_ in PERIOD]  # the tokenizer has four other words before its numbers
    (folder / "words" / "text.txt").write_text(" ".join(words * 2000))
    train(
        shared, "periodic", "qwen3_toy weights=hf32 precision=fp32 seq=32 gbs=1 iters=2 save=1 lr=1e-2 peft=lora",
        "peft.dim=8 peft.lora_B_init_method=normal data=text data.path=words/text.txt data.tokenizer=words/tokenizer",
    )  # fmt: skip
    shared("export", "periodic", "for-peft", "--step", "1", status=0)
    shared("export", "periodic", "merged", "--step", "1", "--merge", status=0)
    return folder, bits_float(shared.ledger("periodic")[1].loss)


@pytest.mark.release
def test_an_export_has_the_loss_of_megatron_in_transformers(exports):
    """Merged, and as adapters that peft loads. The control is the base."""
    folder, loss = exports
    assert abs(_loss(folder / "hf32") - loss) > 1000 * FP32 * loss
    assert abs(_loss(folder / "merged") - loss) < FP32 * loss
    assert abs(_loss(folder / "hf32", folder / "for-peft") - loss) < FP32 * loss


@pytest.mark.release
@pytest.mark.parametrize("kind", ("true", "false"))
def test_adapters_of_experts_are_merged(exports, shared, kind):
    """One adapter for all experts of a layer, or one for each. The control is the base."""
    folder, base, run, merged = exports[0], f"base-{kind}", f"experts-{kind}", f"merged-{kind}"
    small = (
        "model.num_layers=2 model.hidden_size=128 model.num_attention_heads=4 model.num_query_groups=4 "
        "model.kv_channels=32 model.ffn_hidden_size=128 model.moe_ffn_hidden_size=64 model.num_moe_experts=8"
    )
    hf_folders.make(folder / base, hf_folders.model_section("qwen3_moe_toy", *small.split()), dtype="F32")
    train(
        shared, run, f"qwen3_moe_toy weights={base} precision=fp32 seq=32 gbs=1 iters=2 save=1 lr=1e-2 peft=lora",
        small, "numerics.virtual_shards=2",
        f"peft.share_expert_adapters={kind} peft.dim=8 peft.lora_B_init_method=normal",
        "data=text data.path=words/text.txt data.tokenizer=words/tokenizer",
    )  # fmt: skip
    assert "add --merge" in shared("export", run, "refused", "--step", "1", status=2).stderr
    shared("export", run, merged, "--step", "1", "--merge", status=0)
    loss = bits_float(shared.ledger(run)[1].loss)
    assert abs(_loss(folder / base) - loss) > 1000 * FP32 * loss
    assert abs(_loss(folder / merged) - loss) < FP32 * loss


@pytest.mark.release
def test_changed_base_weights_are_not_merged(exports, shared):
    folder, _ = exports
    hf_folders.make(folder / "other", hf_folders.model_section("qwen3_toy"), dtype="F32", seed=1)
    shutil.move(folder / "hf32", folder / "kept")
    shutil.move(folder / "other", folder / "hf32")
    output = shared("export", "periodic", "again", "--merge", status=2).stderr
    assert "does not hold the weights that the run has adapted" in output
    assert not (folder / "again").exists()


@pytest.mark.release
def test_adapters_of_a_checkpoint_are_merged(base, tpi):
    """The base is a checkpoint of a run; its export differs from the merged one in the adapted weights alone."""
    for name in ("mine.py", "examples", "tokenizer", "base"):
        (tpi.folder / name).symlink_to(base / name)
    train(tpi, "adapted", ADAPTED, "iters=1 save=1 peft.lora_B_init_method=normal peft.target_modules=[linear_proj]")
    assert "LoRA" not in tpi("export", "adapted", "merged", "--merge", status=0).stdout
    from safetensors.torch import load_file

    tpi("export", "base", "whole", status=0)
    merged, whole = (load_file(tpi.folder / name / "model.safetensors") for name in ("merged", "whole"))
    changed = {name for name in whole if not whole[name].equal(merged[name])}
    assert changed == {name for name in whole if name.endswith("o_proj.weight")}

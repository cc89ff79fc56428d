# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: a step has the bits of the same examples in rows of their own, in every layout."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.distributed import small_models
from tests.distributed.finetuning.test_finetuning import not_refused
from tests.distributed.scenario import unequal
from tests.examples import EXAMPLES, example, write
from tests.recipe_files import TUNED

pytestmark = pytest.mark.usefixtures("families")

MINE = (
    TUNED
    + """
def alone(common=_sft_common):
    cfg = small(common())
    cfg.model.calculate_per_token_loss = True
    return cfg


def packed(multiple=32, common=_sft_common):
    from megatron.bridge.data.packing import PackedSequenceSpecs

    cfg = alone(common)
    cfg.model.seq_length = cfg.dataset.seq_length = 64
    cfg.dataset.enable_offline_packing = True
    cfg.dataset.offline_packing_specs = PackedSequenceSpecs(
        packed_sequence_size=64, pad_seq_to_mult=multiple, max_single_sequence_length=32
    )
    return cfg


def short():
    return packed(8)


def adapted():
    cfg = packed(8, _peft_common)
    cfg.peft.target_modules, cfg.peft.dropout = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], 0.0
    cfg.ddp.grad_reduce_in_fp32 = True
    return cfg


def routed(cfg):
    cfg.model.num_moe_experts, cfg.model.moe_router_topk, cfg.model.moe_ffn_hidden_size = 8, 2, 128
    cfg.model.moe_aux_loss_coeff = 0.01
    return cfg


def hybrid(cfg):
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
    from megatron.core.activations import squared_relu

    cfg.model = HybridModelProvider(
        hybrid_layer_pattern="M*", hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=4,
        kv_channels=16, mamba_num_heads=8, mamba_num_groups=4, mamba_head_dim=16, mamba_state_dim=16,
        mtp_num_layers=2, mtp_hybrid_override_pattern="*ME", mtp_use_repeated_layer=True,
        vocab_size=64, seq_length=cfg.model.seq_length, is_hybrid_model=True, calculate_per_token_loss=True,
        activation_func=squared_relu, moe_shared_expert_intermediate_size=128,
    )
    cfg = routed(cfg)
    cfg.model.num_moe_experts = 16
    return cfg


def hybrid_packed():
    return hybrid(packed())


def hybrid_alone():
    return hybrid(alone())


def hybrid_short():
    return hybrid(packed(8))


def experts_packed():
    return routed(packed())


def experts_alone():
    return routed(alone())


def experts_short():
    cfg = routed(packed(8))
    cfg.model.num_moe_experts = 16
    return cfg
"""
)
LONG = (
    "seq=256 dataset.seq_length=256 dataset.offline_packing_specs.packed_sequence_size=256 "
    "dataset.offline_packing_specs.max_single_sequence_length=128"
)
IN_FP8 = f"{LONG} dataset.offline_packing_specs.pad_seq_to_mult=128 model.kv_channels=32 numerics.virtual_shards=2"
TWO = "gbs=2 iters=2"  # rows of two examples
SHORT = "gbs=4 iters=2 numerics.data_shards=4"
EXPERTS = "gbs=8 iters=1 numerics.data_shards=4 numerics.virtual_shards=4"
HYBRID = "gbs=8 iters=1 numerics.data_shards=2"
RECOMPUTED = f"{small_models.RECOMPUTED} dp=2 ep=2"
GPT = (
    "model.normalization=LayerNorm model.position_embedding_type=learned_absolute model.add_bias_linear=true "
    "model.bias_activation_fusion=false"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with recipes, a tokenizer of 34 words and examples."""
    folder = tmp_path_factory.mktemp("packed")
    write(folder)
    (folder / "mine.py").write_text(MINE)
    (folder / "both").mkdir()
    for name, count in {"training": EXAMPLES, "validation": 60}.items():
        (folder / "both" / f"{name}.jsonl").write_text("".join(f"{example(number)}\n" for number in range(count)))
    return folder


@pytest.fixture(scope="module")
def run(files, scenario):
    """The scenario of a recipe: `run("short", "gbs=4")`. examples: their folder."""

    def packed(function, *words, examples="examples"):
        recipe = f"recipe={files}/mine.py:{function}"
        data = f"dataset.dataset_root={files}/{examples} tokenizer.tokenizer_model={files}/tokenizer"
        return scenario(recipe, data, *words)

    return packed


def _in_order() -> None:
    """Let examples come as their file has them."""
    from megatron.bridge.data import samplers

    original = samplers.MegatronPretrainingBatchSampler.__init__

    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs | {"shuffle": False})

    samplers.MegatronPretrainingBatchSampler.__init__ = begin


def _both(run, files, packed, alone, *words, fault=lambda: None):
    """The ledgers of packed rows of two examples, and of the same examples in that order in rows of their own."""

    def planted():
        _in_order()
        fault()

    rows = run(packed, TWO, *words, "tp=2 etp=1").planted(planted)
    results = rows.ledger()
    lines = {_text(line): line for line in map(example, range(EXAMPLES))}
    unpacked = files / rows.run.name
    unpacked.mkdir()
    texts = _packed_texts(rows.run / "index-cache" / "training.idx.parquet", files)
    (unpacked / "training.jsonl").write_text("".join(f"{lines[text]}\n" for text in texts))
    single = run(alone, "gbs=4 iters=2", *words, examples=unpacked.name).planted(planted)
    return results, single.ledger()


def _text(line: str) -> str:
    return " ".join(json.loads(line).values())


def _packed_texts(file: Path, files: Path) -> list[str]:
    """The examples of all rows, in order."""
    import pyarrow.parquet
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(files / "tokenizer").convert_ids_to_tokens
    texts = []
    for row in pyarrow.parquet.read_table(file).to_pylist():
        starts = [*row["seq_start_id"], len(row["input_ids"])]
        for start, stop in pairwise(starts):
            texts.append(" ".join(word for word in words(row["input_ids"][start:stop]) if word != "<eos>"))
    return texts


def _same(results, expected):
    for packed, alone in zip(results, expected, strict=True):
        assert (packed.loss, packed.grad_norm) == (alone.loss, alone.grad_norm)
        assert (packed.gradients, packed.masters) == (alone.gradients, alone.masters)
    assert results[0].gradients


def test_packing_changes_no_bit(run, files):
    _same(*_both(run, files, "packed", "alone"))


@pytest.mark.release
@pytest.mark.parametrize("kind", ("experts", "hybrid"))  # the auxiliary loss of experts counts; layers ahead
def test_packing_changes_no_bit_of_other_kinds(run, files, kind):
    _same(*_both(run, files, f"{kind}_packed", f"{kind}_alone"))


@pytest.mark.release
def test_packing_changes_no_bit_of_learned_positions(run, files):
    """Which all sequences of a row have. Rows are longer, so there are more positions: the norm has their gradients."""
    for packed, alone in zip(*_both(run, files, "packed", "alone", GPT), strict=True):
        assert (packed.loss, packed.grad_norm) == (alone.loss, alone.grad_norm)
        assert {name for name in alone.gradients if packed.gradients[name] != alone.gradients[name]} == {
            "embedding.position_embeddings.weight"
        }


# A recipe whose rows have several numbers of sequences of several lengths, what is held fixed, layouts that must agree.
ROWS = (
    ("short", SHORT, ("tp=1", "tp=2", "pp=2", "dp=2", "dp=4")),
    *(
        ("short", f"{SHORT} {IN_FP8} precision={kind}", ("tp=1", "tp=2", "dp=2"))
        for kind in ("fp8_tensorwise", "fp8_blockwise", "mxfp8")
    ),
    ("short", f"{SHORT} validation.eval_iters=1 validation.eval_interval=1", ("tp=1", "dp=2")),
    (
        "experts_short",
        EXPERTS,
        (*("dp=1", "dp=2 ep=2", "tp=2 etp=1", "tp=2 ep=2 etp=1", "dp=2", "dp=4 ep=4", "pp=2 dp=2 ep=2"), RECOMPUTED),
    ),
    ("experts_short", f"{EXPERTS} model.mtp_num_layers=1", ("dp=1", RECOMPUTED)),
    # Gradients wait for all sequences of a row: Megatron would reduce those of layers that are computed again after as
    # many additions as in the first step.
    ("experts_short", f"{EXPERTS} iters=6 {RECOMPUTED}", ("", "ddp.overlap_grad_reduce=true")),
    # A row of one loss has parts of auxiliary ones.
    *(
        (
            "experts_short",
            f"{EXPERTS} model.moe_router_load_balancing_type={kind} model.calculate_per_token_loss=false",
            ("dp=1", "dp=2 ep=2"),
        )
        for kind in ("seq_aux_loss", "aux_loss")
    ),
    ("hybrid_short", HYBRID, ("dp=1", "pp=2", "dp=2 ep=2", "tp=2 etp=1")),
)


@pytest.mark.release
@pytest.mark.parametrize("function, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(run, function, fixed, layouts):
    packed = run(function, fixed, examples="both" if "validation" in fixed else "examples")
    first, *others = (packed(layout).ledger() for layout in layouts)
    for other in others:
        assert unequal(other, first) == []
    assert first[0].gradients
    assert bool(first[0].evaluations) == ("validation" in fixed)


@pytest.mark.release
def test_adapters_have_one_ledger(run):
    saved = run("alone", "iters=1 save=1")
    saved.ledger()
    adapted = run("adapted", f"checkpoint.pretrained_checkpoint={saved.run}/checkpoints", SHORT)
    first, *others = (adapted(layout).ledger() for layout in ("tp=1", "tp=2", "dp=2"))
    assert [unequal(other, first) for other in others] == [[], []]


# What is wrong with the settings of a run, before anything is read.
SETTINGS = {
    "packed dataset.offline_packing_specs.pad_seq_to_mult=1": "pad_seq_to_mult=1: virtual shards",
    "packed numerics.virtual_shards=4 dataset.offline_packing_specs.pad_seq_to_mult=6": "pad_seq_to_mult=12",
    f"packed precision=fp8_tensorwise {LONG} dataset.offline_packing_specs.pad_seq_to_mult=64": "pad_seq_to_mult=128",
    "packed seq=128": "packed_sequence_size=64: a row has model.seq_length=128 tokens; "
    "dataset.offline_packing_specs.packed_sequence_size=128 or seq=64",
    "packed numerics=gather": "packed sequences are covered by numerics=tree only",
    "packed numerics=stock": "no attention for packed sequences but with numerics=tree",
    "packed cp=2 numerics.context_shards=2": "fine-tuning with context parallelism is not covered",
    "packed model.mtp_num_layers=1 model.calculate_per_token_loss=false": "is covered where each token counts alike",
    "packed ledger.trace=1": "a trace has one entry for the module of a row",
    "packed dataset.offline_packing_specs.packed_metadata_path=a.json": "tpi packs the examples",
    "packed dataset.offline_packing_specs.packed_train_data_path=a.parquet": "a.parquet",
    "experts_packed dataset.offline_packing_specs.pad_seq_to_mult=8": "pad_seq_to_mult / numerics.virtual_shards",
}
# These set what another one sets, or are all that is said.
OWN_RUNS = ("pad_seq_to_mult", "numerics=stock", "context_shards", "_path")


@pytest.mark.release
@pytest.mark.parametrize("separate", (OWN_RUNS, ("",)), ids=("together", "each"))
def test_settings_that_are_refused(files, separate):
    data = ("dataset.dataset_root=examples", "tokenizer.tokenizer_model=tokenizer")
    assert not_refused(files, SETTINGS, separate, data) == {}

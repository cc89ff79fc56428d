"""Packed sequences: a step has the bits of the same examples in rows of their own, in every layout."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.faults import without
from tests.distributed.finetuning.test_finetuning import not_refused
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


def experts():
    return routed(packed())


def experts_alone():
    return routed(alone())


def experts_short():
    cfg = routed(packed(8))
    cfg.model.num_moe_experts = 16
    return cfg
"""
)
FILES = ("dataset.dataset_root=examples", "tokenizer.tokenizer_model=tokenizer")
SHORT = ("recipe=mine.py:short", *FILES, "gbs=4", "iters=2", "numerics.data_shards=4")
PACKED = ("recipe=mine.py:packed", *FILES, "gbs=2", "iters=2")


def _in_order() -> None:
    """Let examples come as their file has them."""
    from megatron.bridge.data import samplers

    original = samplers.MegatronPretrainingBatchSampler.__init__

    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs | {"shuffle": False})

    samplers.MegatronPretrainingBatchSampler.__init__ = begin


def _forwards() -> None:
    """Let sequences be computed in their order, and so their gradients in the other."""
    from tp_invariant_recipes.numerics.megatron.attention import packed

    passes = packed._passes
    packed._passes = lambda *of_row: passes(*of_row)[::-1]


def _of_rows() -> None:
    """Log the loss of a row."""
    from tp_invariant_recipes.numerics.megatron.attention import packed

    packed.loss_of_each = lambda original: original


def _planted(*faults):
    return lambda: [fault() for fault in faults]


@pytest.fixture(scope="module")
def mine(bridge, shared):
    """The folder of the runs, with recipes, a tokenizer of 34 words and examples."""
    write(shared.folder)
    (shared.folder / "mine.py").write_text(MINE)
    return shared.folder


def _both(shared, name, packed, alone, *words, fault=lambda: None):
    """A run of packed rows of two examples, NAME, and NAME-alone with the same examples in that order: both ledgers."""
    of_name = (f"recipe=mine.py:{packed}", *PACKED[1:], *words)
    shared("train", *of_name, "tp=2", "etp=1", f"run.dir={name}", before=_planted(_in_order, fault), status=0)
    lines = {_text(line): line for line in map(example, range(EXAMPLES))}
    unpacked = shared.folder / f"{name}-unpacked"
    unpacked.mkdir()
    rows = shared.folder / name / "index-cache" / "training.idx.parquet"
    (unpacked / "training.jsonl").write_text("".join(f"{lines[text]}\n" for text in _packed_texts(rows)))
    result = (f"recipe=mine.py:{alone}", f"dataset.dataset_root={unpacked.name}", FILES[1], "gbs=4", "iters=2", *words)
    shared("train", *result, f"run.dir={name}-alone", before=_planted(_in_order, fault), status=0)
    return shared.ledger(name), shared.ledger(f"{name}-alone")


@pytest.fixture(scope="module")
def row_by_row(mine, shared):
    return _both(shared, "packed", "packed", "alone")[1]


def _text(line: str) -> str:
    return " ".join(json.loads(line).values())


def _packed_texts(file: Path) -> list[str]:
    """The examples of all rows, in order."""
    import pyarrow.parquet
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(file.parents[2] / "tokenizer").convert_ids_to_tokens
    texts = []
    for row in pyarrow.parquet.read_table(file).to_pylist():
        starts = [*row["seq_start_id"], len(row["input_ids"])]
        for start, stop in pairwise(starts):
            texts.append(" ".join(word for word in words(row["input_ids"][start:stop]) if word != "<eos>"))
    return texts


def test_packing_changes_no_bit(row_by_row, shared):
    _same(shared.ledger("packed"), row_by_row)


def _same(results, expected):
    for packed, alone in zip(results, expected, strict=True):
        assert (packed.loss, packed.grad_norm) == (alone.loss, alone.grad_norm)
        assert (packed.gradients, packed.masters) == (alone.gradients, alone.masters)
    assert results[0].gradients


GPT = (
    *("model.normalization=LayerNorm", "model.position_embedding_type=learned_absolute"),
    *("model.add_bias_linear=true", "model.bias_activation_fusion=false"),
)


@pytest.mark.release
def test_packing_changes_no_bit_of_learned_positions(mine, shared):
    """Which all sequences of a row have. Rows are longer, so there are more positions: the norm has their gradients."""
    for packed, alone in zip(*_both(shared, "learned", "packed", "alone", *GPT), strict=True):
        assert (packed.loss, packed.grad_norm) == (alone.loss, alone.grad_norm)
        assert {name for name in alone.gradients if packed.gradients[name] != alone.gradients[name]} == {
            "embedding.position_embeddings.weight"
        }


@pytest.mark.release
def test_torchs_own_sums_of_learned_positions_depend_on_packing(mine, shared):
    fault = without("LanguageModelEmbedding.__init__")
    packed, alone = _both(shared, "torchs", "packed", "alone", *GPT, fault=fault)
    assert packed[0].loss == alone[0].loss
    assert packed[0].gradients != alone[0].gradients


# What is left out -> what then depends on packing.
INGREDIENTS = {"order of backward passes": (_forwards, "gradients"), "loss of each": (_of_rows, "loss")}


@pytest.mark.release
@pytest.mark.parametrize("omitted", INGREDIENTS)
def test_each_ingredient_is_needed(row_by_row, shared, omitted):
    fault, differs = INGREDIENTS[omitted]
    name = f"without-{differs}"
    shared("train", *PACKED, f"run.dir={name}", before=_planted(_in_order, fault), status=0)
    without, with_it = ([getattr(step, differs) for step in steps] for steps in (shared.ledger(name), row_by_row))
    assert without != with_it  # in a step: of one number a rounding may hide it


@pytest.mark.release
@pytest.mark.parametrize("layouts", (("tp=1,2", "pp=1,2"), ("dp=1,2", "tp=1,2"), ("dp=2,4",)), ids=" ".join)
def test_sequences_of_several_lengths_have_one_result_in_every_layout(mine, shared, layouts):
    shared("verify", *SHORT, *layouts, "--dir", "-".join(layouts).replace("=", "").replace(",", ""), status=0)


# --- In FP8, whose sums are of 128 tokens ---

LONG = (
    "seq=256 dataset.seq_length=256 dataset.offline_packing_specs.packed_sequence_size=256 "
    "dataset.offline_packing_specs.max_single_sequence_length=128"
)
IN_FP8 = f"precision=fp8_tensorwise {LONG} dataset.offline_packing_specs.pad_seq_to_mult=128"


@pytest.mark.release
@pytest.mark.parametrize("precision", ("fp8_tensorwise", "fp8_blockwise", "mxfp8"))
def test_packed_rows_in_fp8_have_one_result_in_every_layout(mine, shared, precision):
    words = (*SHORT, *IN_FP8.split(), "model.kv_channels=32", "numerics.virtual_shards=2", f"precision={precision}")
    shared("verify", *words, "tp=1,2", "dp=1,2", "--dir", precision, status=0)


# --- With experts, whose auxiliary loss counts ---

ROUTED = (
    *("recipe=mine.py:experts_short", *FILES),
    "gbs=8",
    "iters=1",
    "numerics.data_shards=4",
    "numerics.virtual_shards=4",
)
RECOMPUTED = (
    *("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"),
    "dp=2",
    "ep=2",
)


@pytest.fixture(scope="module")
def routed(mine, shared):
    """A run of rows whose numbers of sequences differ, on one rank."""
    shared("train", *ROUTED, "run.dir=routed", status=0)
    return shared.ledger("routed")


@pytest.mark.release
def test_packing_changes_no_bit_of_experts(mine, shared):
    _same(*_both(shared, "experts", "experts", "experts_alone"))


@pytest.mark.release
@pytest.mark.parametrize(
    "layout",
    (
        ("dp=2", "ep=2"),
        ("tp=2", "etp=1"),
        ("tp=2", "ep=2", "etp=1"),
        ("dp=2",),
        ("dp=4", "ep=4"),
        ("pp=2", "dp=2", "ep=2"),
        RECOMPUTED,
    ),
    ids=" ".join,
)
def test_experts_have_one_result_in_every_layout(routed, shared, layout):
    name = f"routed-{len(list(shared.folder.iterdir()))}"
    shared("train", *ROUTED, *layout, f"run.dir={name}", status=0)
    _same(shared.ledger(name), routed)


@pytest.mark.release
def test_layers_ahead_are_recomputed_sequence_by_sequence(mine, shared):
    words = (*ROUTED, "model.mtp_num_layers=1")
    shared("train", *words, "run.dir=ahead", status=0)
    shared("train", *words, *RECOMPUTED, "run.dir=ahead-again", status=0)
    _same(shared.ledger("ahead-again"), shared.ledger("ahead"))


# --- Hybrid models, with multi-token prediction ---

HYBRID = ("recipe=mine.py:hybrid_short", *FILES, "gbs=8", "iters=1", "numerics.data_shards=2")


@pytest.mark.release
def test_packing_changes_no_bit_of_hybrid_models(mine, shared):
    _same(*_both(shared, "hybrid", "hybrid_packed", "hybrid_alone"))


@pytest.fixture(scope="module")
def hybrid(mine, shared):
    shared("train", *HYBRID, "run.dir=short-hybrid", status=0)
    return shared.ledger("short-hybrid")


@pytest.mark.release
@pytest.mark.parametrize("layout", ("pp=2", "dp=2 ep=2", "tp=2 etp=1"))
def test_hybrid_models_have_one_result_in_every_layout(hybrid, shared, layout):
    name = f"hybrid-{layout.replace(' ', '-')}"
    shared("train", *HYBRID, *layout.split(), f"run.dir={name}", status=0)
    _same(shared.ledger(name), hybrid)


def _tokens_of_idle_passes() -> None:
    from tp_invariant_recipes.numerics.megatron.attention import packed

    packed._uncounted = lambda given: given


@pytest.mark.release
def test_tokens_of_idle_passes_must_not_count_ahead(hybrid, shared):
    shared("train", *HYBRID, "dp=2", "ep=2", "run.dir=hybrid-idle", before=_tokens_of_idle_passes)
    assert shared.ledger("hybrid-idle")[0].gradients != hybrid[0].gradients


def _summed_by_autograd() -> None:
    from tp_invariant_recipes.numerics.megatron.families import mamba

    mamba.added_by_itself = lambda weight: weight


@pytest.mark.release
def test_gradients_of_mamba_are_added_sequence_by_sequence(mine, shared):
    with pytest.raises(AssertionError):
        _same(*_both(shared, "summed", "hybrid_packed", "hybrid_alone", fault=_summed_by_autograd))


OVERLAPPED = (*ROUTED, "iters=6", *RECOMPUTED, "ddp.overlap_grad_reduce=true")


def _ready_early() -> None:
    from tp_invariant_recipes.numerics.megatron.attention import packed

    packed.ready_at_the_end = lambda original: original


@pytest.mark.release
def test_gradients_wait_for_all_sequences_of_a_row(mine, shared):
    """Of layers that are computed again: Megatron would reduce them after as many additions as in the first step."""
    shared("train", *OVERLAPPED, "run.dir=overlapped", status=0)
    shared("train", *OVERLAPPED, "ddp.overlap_grad_reduce=false", "run.dir=one-after-the-other", status=0)
    _same(shared.ledger("overlapped"), shared.ledger("one-after-the-other"))
    early = shared("train", *OVERLAPPED, "run.dir=early", before=_ready_early)
    assert "Communication call has not been issued" in early.stderr


def _with_few_groups() -> None:
    """Allow fewer groups of experts than data shards."""
    from tp_invariant_recipes.settings import expert_groups

    expert_groups.adds_several_times = lambda config: None


@pytest.mark.release
def test_packed_rows_need_a_group_for_each_data_shard(mine, shared):
    """The control of a refusal (check/invariant/shards.py): without it, layouts have other bits."""
    ledgers = []
    for name, *layout in (("few-groups",), ("few-groups-two", "dp=2", "ep=2")):
        few = (*ROUTED, *layout, "numerics.expert_groups=1", f"run.dir={name}")
        assert "a backward pass adds to an expert's gradient several times" in shared("train", *few, status=2).stderr
        shared("train", *few, before=_with_few_groups, status=0)
        ledgers.append(shared.ledger(name)[0].gradients)
    assert ledgers[0] != ledgers[1]


def _routing_idle_passes() -> None:
    """Let passes that only take part route tokens."""
    from tp_invariant_recipes.numerics.megatron.moe import router

    router.packed_rows = SimpleNamespace(current=lambda: None)


def _without_marks() -> None:
    """Let backward passes not know which sequence they are of."""
    from tp_invariant_recipes.numerics.megatron.attention import packed

    packed._Marked = type("Unmarked", (), {"apply": staticmethod(lambda output, now: output)})


# What is left out, and the layout that then has other bits.
OF_EXPERTS = {
    "idle passes": (_routing_idle_passes, ("dp=2", "ep=2")),
    "marks": (_without_marks, RECOMPUTED),
}


@pytest.mark.release
@pytest.mark.parametrize("omitted", OF_EXPERTS)
def test_each_ingredient_of_experts_is_needed(routed, shared, omitted):
    fault, layout = OF_EXPERTS[omitted]
    name = f"routed-without-{omitted.replace(' ', '-')}"
    shared("train", *ROUTED, *layout, f"run.dir={name}", before=fault)  # its log may fail at the end
    assert shared.ledger(name)[0].gradients != routed[0].gradients


@pytest.mark.release
@pytest.mark.parametrize(
    "words", ("seq_aux_loss calculate_per_token_loss=false", "aux_loss calculate_per_token_loss=false")
)
def test_a_row_of_one_loss_has_parts_of_auxiliary_ones(mine, shared, words):
    kind, mean = words.split()
    message = (*ROUTED, f"model.moe_router_load_balancing_type={kind}", f"model.{mean}")
    shared("train", *message, f"run.dir={kind}", status=0)
    shared("train", *message, "dp=2", "ep=2", f"run.dir={kind}-two", status=0)
    _same(shared.ledger(f"{kind}-two"), shared.ledger(kind))


@pytest.mark.release
def test_adapters_too(mine, shared):
    adapted = ("recipe=mine.py:adapted", "checkpoint.pretrained_checkpoint=start/checkpoints", *SHORT[1:])
    shared("train", "recipe=mine.py:alone", *FILES, "iters=1", "save=1", "run.dir=start", status=0)
    shared("verify", *adapted, "tp=1,2", "dp=1,2", "--dir", "adapters", status=0)


@pytest.mark.release
def test_validation_too(mine, shared):
    (mine / "both").mkdir()
    for name, lines in {"training": range(EXAMPLES), "validation": range(60)}.items():
        (mine / "both" / f"{name}.jsonl").write_text("".join(f"{example(number)}\n" for number in lines))
    words = (*SHORT, "dataset.dataset_root=both", "validation.eval_iters=1", "validation.eval_interval=1")
    for name, layout in {"one": "tp=1", "pair": "dp=2"}.items():
        shared("train", *words, layout, f"run.dir=validated-{name}", status=0)
    output = shared("compare", "validated-one", "validated-pair", status=0).stdout
    assert "validation loss" in output


# What is wrong with the settings of a run, before anything is read.
SETTINGS = {
    "packed dataset.offline_packing_specs.pad_seq_to_mult=1": "pad_seq_to_mult=8, or another multiple",
    "packed numerics.virtual_shards=4 dataset.offline_packing_specs.pad_seq_to_mult=6": "pad_seq_to_mult=8, or another",
    f"packed precision=fp8_tensorwise {LONG} dataset.offline_packing_specs.pad_seq_to_mult=64": "in FP8 of 128",
    "packed seq=128": "packed_sequence_size=64: a row has model.seq_length=128 tokens; "
    "dataset.offline_packing_specs.packed_sequence_size=128 or seq=64",
    "packed numerics=gather": "packed sequences are covered by numerics=tree only",
    "packed numerics=stock": "no attention for packed sequences but with numerics=tree",
    "packed cp=2 numerics.context_shards=2": "fine-tuning with context parallelism is not covered",
    "packed model.mtp_num_layers=1 model.calculate_per_token_loss=false": "is covered where each token counts alike",
    "packed ledger.trace=1": "a trace has one place for the module of a row",
    "packed dataset.offline_packing_specs.packed_metadata_path=a.json": "tpi packs the examples",
    "packed dataset.offline_packing_specs.packed_train_data_path=a.parquet": "a.parquet",
    "experts dataset.offline_packing_specs.pad_seq_to_mult=8": "pad_seq_to_mult / numerics.virtual_shards",
}
# These set what another one sets, or are all that is said.
OWN_RUNS = ("pad_seq_to_mult", "numerics=stock", "context_shards", "_path")


@pytest.mark.release
@pytest.mark.parametrize("separate", (OWN_RUNS, ("",)), ids=("together", "each"))
def test_settings_that_are_refused(mine, separate):
    assert not_refused(mine, SETTINGS, separate, FILES) == {}

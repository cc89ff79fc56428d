# SPDX-License-Identifier: Apache-2.0
"""`weights=FOLDER` and `tpi export`: the same bits in every layout, and back again. `weights=FOLDER` and `tpi export`
of every family: in, out, the same bits in every layout. The model that `tpi score FOLDER` composes from a folder's
config.json. Some of the fields are Bridge's.
"""

import json
import shutil

import pytest

from tests import hf_folders
from tp_invariant_recipes.sources import hf_family, hf_models, weights

pytestmark = pytest.mark.usefixtures("modelopt")

SHORT = ("seq=32", "gbs=1")
FROZEN = ("lr=0", "optimizer.min_lr=0", "scheduler.lr_decay_iters=9")  # the step changes no weight

# Class of transformers -> what its configuration has beside sizes.
CLASSES = {
    "Llama": {
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 32.0} | hf_family.LLAMA3_ROPE
    },
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "Gemma3": {"head_dim": 16},
    "Glm4Moe": {
        **{"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0},
    },
}
_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 8192,
}  # fmt: skip


def made(shared, name, model="qwen3_toy", *overrides, **how):
    return hf_folders.make(shared.folder / name, hf_folders.model_section(model, *overrides), **how)


def train(shared, run, folder, *overrides, model="qwen3_toy"):
    shared("train", model, *SHORT, f"weights={folder}", f"run.dir={run}", *overrides, status=0)
    return shared.folder / run


def bits(folder):
    results = weights.read(folder).tensors
    return {name: (result.dtype, result.shape, result.file.read_bytes()[result.start : result.start + result.size])
            for name, result in results.items()}  # fmt: skip


@pytest.fixture(scope="module")
def runs(shared):
    """Two layouts from copies of one folder, the second of which is then removed, and one run of other weights."""
    made(shared, "hf")
    made(shared, "copy", files=2)
    made(shared, "other", seed=1)
    train(shared, "tp1", "hf", "iters=1", "save=1", *FROZEN)
    train(shared, "tp2", "copy", "iters=1", "save=1", "tp=2", *FROZEN)
    train(shared, "of-other", "other", "iters=1", *FROZEN)
    shutil.rmtree(shared.folder / "copy")
    return shared.folder


def test_every_layout_starts_from_the_same_bits(shared, runs):
    assert shared.ledger("tp1") == shared.ledger("tp2")
    shared("compare", "tp1", "tp2", status=0)


def test_other_weights_compute_other_bits(shared, runs):
    """The control: weights are those of the folder."""
    first, other = shared.ledger("tp1")[0], shared.ledger("of-other")[0]
    assert first.loss != other.loss
    assert not {*first.masters.values()} & {*other.masters.values()}
    compared = shared("compare", "tp1", "of-other", status=2)
    assert "weights.digest" in compared.stdout + compared.stderr


def test_stock_layouts_differ_from_equal_weights(shared, runs):
    done = shared("verify", "qwen3_toy", *SHORT, "tp=1,2", "iters=1", "numerics=stock", "weights=hf", "--dir", "stock")
    assert done.status == 1, done.stdout + done.stderr
    assert "different: tp=2 is not bitwise identical to tp=1 at step 1" in done.stdout


def test_import_and_export_are_a_round_trip(shared, runs):
    done = shared("export", "tp1", "out", status=0)
    words = ("verifying the checkpoint", "loading and writing the weights of step", "reading the weights again")
    assert [line for line in words if line not in done.stderr] == []
    assert bits(runs / "out") == bits(runs / "hf")
    assert f"weights digest {weights.read(runs / 'hf').digest()}" in done.stdout


@pytest.mark.release  # in `make test`: the round trip of an import and an export
def test_what_is_exported_is_reimported(shared, runs):
    """Of a run that has changed its weights; the control is the folder that it started from."""
    train(shared, "trained", "hf", "iters=2", "save=2", "tp=2")
    done = shared("export", "trained", "trained-out", "--step", "2", "--json", status=0)
    output = json.loads(done.stdout)
    assert (output["step"], output["architecture"], output["dtype"]) == (2, "Qwen3ForCausalLM", "bfloat16")
    assert bits(runs / "trained-out") != bits(runs / "hf")
    run = train(shared, "again", "trained-out", "iters=1", "save=1", *FROZEN)
    assert json.loads((run / "run.json").read_text())["identity"]["weights.digest"] == output["digest"]
    shared("export", "again", "again-out", status=0)
    assert bits(runs / "again-out") == bits(runs / "trained-out")


def test_an_export_overwrites_nothing(shared, runs):
    before = bits(runs / "hf")
    done = shared("export", "tp1", "hf", status=2)
    assert "hf is there and is no empty folder: nothing is overwritten, choose another" in done.stderr
    assert bits(runs / "hf") == before


def test_an_export_that_fails_leaves_nothing(shared, runs):
    before = {path.name for path in runs.iterdir()}

    def full():
        import safetensors.torch

        def fail(*_, **__):
            raise OSError(28, "No space left on device")

        safetensors.torch.save_file = fail

    shared("export", "tp1", "never", before=full, status=2)
    assert {path.name for path in runs.iterdir() if path.name[0] != "." or path.name.endswith(".new")} == {
        name for name in before if name[0] != "."
    }
    assert shared("export", "tp1", "never", "--step", "9").status == 2
    assert not (runs / "never").exists()


@pytest.mark.release
def test_a_resume_takes_the_checkpoint_and_not_the_folder(shared, runs):
    assert not (runs / "copy").exists()
    shared("train", "--resume", "tp2", "iters=2", status=0)
    assert [step.step for step in shared.ledger("tp2")] == [1, 2]


def test_a_resume_with_other_weights_is_refused(shared, runs):
    done = shared("train", "--resume", "tp1", "iters=3", "weights=other", status=2)
    assert "weights.digest was " in done.stderr
    assert "weights must name a folder with the same tensors" in done.stderr


def test_a_folder_that_does_not_fit_is_one_message(shared, runs):
    done = shared("train", "qwen3_toy", "weights=hf", "model.num_layers=4", "run.dir=refused", status=2)
    assert "its num_hidden_layers is 2; model.num_layers=2, not 4" in done.stderr
    assert not (runs / "refused").exists()


def test_a_weight_that_bridge_passes_over_ends_the_run(shared):
    """Bridge warns of a tensor that is missing and goes on; the check before the start is switched off here."""

    def missing(config, tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    def unchecked():
        hf_models.problems = lambda *_: []

    made(shared, "lacking", change=missing)
    done = shared("train", "qwen3_toy", *SHORT, "iters=1", "weights=lacking", "run.dir=lacks", before=unchecked)
    assert done.status == 2
    assert "Megatron-Bridge set no finite values of decoder.layers.1.mlp.linear_fc1.weight" in done.stderr


def test_a_tokenizer_beyond_the_vocabulary_is_refused(shared, runs, text):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(600)} | {"<eos>": 600}
    made_of = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    folder = made(shared, "with-tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made_of, eos_token="<eos>").save_pretrained(folder)
    done = shared("train", "qwen3_toy", "data=text", f"data.path={text}", f"weights={folder}", "run.dir=refused")
    assert done.status == 2
    assert "holds 601 token ids but model.vocab_size=512" in done.stderr


@pytest.mark.parametrize("name", CLASSES)
def test_the_tensors_are_those_of_transformers(bridge, tmp_path, name):
    """The table of names and shapes, against what transformers writes of the same model."""
    import transformers

    kind = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    tied = name == "Gemma3"  # Bridge has no other
    config = getattr(transformers, kind)(**(_SIZES | {"tie_word_embeddings": tied} | CLASSES[name]))
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    result = weights.read(tmp_path)
    family = next(family for family in hf_models.FAMILIES if result.config["architectures"] == [family.architecture])
    wanted = dict(family.tensors(hf_models._sizes(family, hf_models._config(tmp_path))))
    assert {tensor: item.shape for tensor, item in result.tensors.items()} == wanted


@pytest.mark.release
@pytest.mark.parametrize("layout", ("tp=2", "dp=2 gbs=2 optimizer.use_distributed_optimizer=true"))
def test_master_weights_have_the_bits_of_fp32(shared, layout):
    """Weights in fp32, a run in bf16: its master weights are those of the folder, its weights are rounded."""
    name = layout.partition(" ")[0]
    folder = made(shared, f"hf32-{name}", dtype="F32")
    train(shared, f"fp32-{name}", folder, "iters=1", "save=1", *layout.split(), *FROZEN)
    for out, option in (("masters", ("--masters",)), ("rounded", ())):
        shared("export", f"fp32-{name}", f"{out}-{name}", *option, status=0)
    assert bits(shared.folder / f"masters-{name}") == bits(folder)
    assert {dtype for dtype, *_ in bits(shared.folder / f"rounded-{name}").values()} == {"BF16"}


@pytest.mark.release
def test_a_recipe_of_bridge_starts_from_a_folder(tpi):
    made(tpi, "hf", "qwen3_toy")
    recipe = ("recipe=qwen3_600m_pretrain_config", "recipe.hf_folder=hf", "weights=hf", "seq=64", "gbs=2", "iters=2")
    more = "scheduler.lr_warmup_iters=0 dataset.num_workers=0 validation.eval_iters=0 validation.eval_interval=null"
    tpi("verify", *recipe, *more.split(), "ddp.grad_reduce_in_fp32=true", "tp=1,2", "--dir", "recipe", status=0)
    assert json.loads((tpi.folder / "recipe/tp1/run.json").read_text())["identity"]["weights.digest"]


def test_invariant_layers_are_split_as_the_stock_layers():
    """Bridge knows the stock layers by their names, and no other layer's."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    from tp_invariant_recipes.numerics import mode
    from tp_invariant_recipes.numerics.megatron import local, spec
    from tp_invariant_recipes.replacement import resolve_own

    split = AutoMapping("a.weight", "b.weight")._detect_parallelism_type
    expected = {name: kind for kind, names in AutoMapping._MODULE_TYPE_REGISTRY.items() for name in names}
    tables = (spec.SUBSTITUTES, *(numerics.layers for numerics in mode.every()))
    of_stock = [(name, path) for table in tables for name, path in table.items() if name in expected]
    layers = [(name, resolve_own(path)) for name, path in of_stock if "TE" not in name]  # no CPU has these classes
    layers = [(name, layer) for name, layer in layers if name != "WrappedTorchNorm"]  # what makes a layer
    layers += [
        ("WrappedTorchNorm", local.InvariantRMSNorm),
        ("VocabParallelEmbedding", local.InvariantVocabParallelEmbedding),
    ]
    layers += [(name, spec._in_fp8(layer)) for name, layer in layers if name in spec.FP8]
    assert len(layers) > 8
    assert {(name, layer.__name__): split(layer.__new__(layer)) for name, layer in layers} == {
        (name, layer.__name__): expected[name] for name, layer in layers
    }


SHARDED = "gbs=4 numerics.data_shards=2"
_EXPERTS = "model.num_layers=2 model.hidden_size=128 model.num_attention_heads=8 model.num_query_groups=8 "
_EXPERTS += "model.kv_channels=16 model.moe_ffn_hidden_size=256 model.ffn_hidden_size=256 model.vocab_size=512"
_SMALL = "model.hidden_size=128 model.ffn_hidden_size=256 model.kv_channels=16 model.vocab_size=512"
_GLM = f"{_SMALL} model.moe_ffn_hidden_size=256 model.moe_shared_expert_intermediate_size=256"
_QWEN3_NEXT = f"{_GLM} model.linear_key_head_dim=16 model.linear_value_head_dim=16"
# Sinks, experts of one tensor a layer, gate and up row by row.
_GPT_OSS = "model.window_size=[7,0] model.hidden_size=64 model.moe_ffn_hidden_size=128 model.kv_channels=16"
# Model, overrides of all its runs -> the layouts that must start from the same bits as tp=1.
ROWS = {
    ("llama32_toy", SHARDED): ("tp=2", "dp=2"),
    ("qwen25_toy", ""): ("tp=4",),
    ("qwen3_toy", "model.share_embeddings_and_output_weights=false"): ("pp=2", "tp=2 pp=2"),
    ("qwen3_toy", "precision=fp32"): ("tp=2",),
    ("qwen3_toy", "precision=mxfp8"): ("tp=2",),
    ("qwen3_moe_toy", f"{_EXPERTS} {SHARDED} numerics.expert_groups=2"): ("ep=2 dp=2 tp=2", "tp=2 pp=2"),
    ("gpt_oss_toy", f"{_GPT_OSS} model.vocab_size=512"): ("tp=2 ep=2",),
    ("olmoe_toy", f"{_SMALL} model.moe_ffn_hidden_size=256"): ("tp=2 ep=2",),
    ("gemma3_toy", "model.interleaved_attn_pattern=[5,1]"): ("tp=2",),
    ("glm45_toy", f"{_GLM} model.mtp_num_layers=null"): ("tp=2 ep=2",),
    ("glm45_toy", f"{_GLM} model.num_layers=2 model.moe_layer_freq=[0,1]"): ("tp=2 pp=2",),
    ("qwen3_next_toy", f"{_QWEN3_NEXT} model.mtp_num_layers=null"): ("tp=2 ep=2",),
}


@pytest.mark.release
@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_it_goes_in_and_out(tpi, row):
    model, fixed = row
    sizes = [word for word in fixed.split() if word.startswith("model.")]
    for name, seed in (("hf", 0), ("other", 1)):
        made(tpi, name, model, *sizes, seed=seed, dtype="F32" if "precision=fp32" in fixed else "BF16")
    words = ("seq=64", "gbs=2", "iters=1", "save=1", *FROZEN, *fixed.split())
    train(tpi, "of-other", "other", *words, model=model)
    ledgers = []
    for number, layout in enumerate(("tp=1", *ROWS[row])):
        train(tpi, f"run-{number}", "hf", *words, *layout.split(), model=model)
        ledgers.append(tpi.ledger(f"run-{number}"))
        assert ledgers[-1] == ledgers[0], layout
        tpi("export", f"run-{number}", f"out-{number}", status=0)
        assert bits(tpi.folder / f"out-{number}") == bits(tpi.folder / "hf"), layout
    assert ledgers[0][0].loss != tpi.ledger("of-other")[0].loss


@pytest.mark.parametrize("family", hf_models.FAMILIES, ids=lambda family: family.architecture)
def test_it_has_the_sizes_of_the_folder(tmp_path, family):
    """Here twice the layers, and half the vocabulary, of the model that it is like."""
    like = hf_folders.model_section(family.like, *family.without)
    assert hf_models.family_of(like) == family
    config = hf_models.config_of(family, like, "bfloat16")
    changed = {"num_hidden_layers": 2 * config["num_hidden_layers"], "vocab_size": config["vocab_size"] // 2}
    if "layer_types" in config:
        changed["layer_types"] = config["layer_types"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    (tmp_path / "model.safetensors").write_bytes(hf_folders.file({}))
    name, sizes = hf_models.model_of(weights.read(tmp_path))
    result = hf_folders.model_section(name, *sizes)
    assert hf_models.family_of(result) == family
    read = family.sizes(result)
    assert {key: read[key] for key in ("num_hidden_layers", "vocab_size")} == {
        key: changed[key] for key in ("num_hidden_layers", "vocab_size")
    }
    assert read == hf_models._sizes(family, hf_models._config(tmp_path))

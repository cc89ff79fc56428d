"""Settings that would change nothing are refused, and defaults take what is legal."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import changed, latest, parse_all, texts
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.verify import workflow as verify

REFUSED = {
    "logging=wandb project=y logger.wandb_project=x": "beside logging.project=y; project=x sets both",
    "logging=mlflow logger.mlflow_experiment=x": "logging.project=tp-invariant-recipes; project=x sets both",
    "tp=2 model.tensor_model_parallel_size=4": "set the same field, model.tensor_model_parallel_size; leave one out",
    "dp=2 gbs=2 parallel.data_parallel_size=1": "set the same field, parallel.data_parallel_size; leave one out",
    "numerics=tree numerics.mode=stock": "set the same field, numerics.mode; leave one out",
    "numerics=stock model.make_vocab_size_divisible_by=384": "pads no vocabulary whose size is set; "
    "model.vocab_size=768",
    "numerics=stock model.vocab_size=500 tokenizer.vocab_size=500 model.should_pad_vocab=true": "model.vocab_size=512",
    "tp=2 numerics=stock model.vocab_size=501 tokenizer.vocab_size=501": "or model.vocab_size=502",
    "pp=2 gbs=2 model.virtual_pipeline_model_parallel_size=1": "one virtual stage a rank is not interleaved",
    "numerics=stock checkpoint.save_optim=false": "a run could not be resumed; checkpoint.save_optim=true",
    "numerics=stock checkpoint.save_rng=false": "a run could not be resumed; checkpoint.save_rng=true",
    "numerics=stock checkpoint.async_save=true checkpoint.async_strategy=nvrx": "the one that sends the hashes",
    "numerics=stock optimizer.optimizer_cpu_offload=true": "the optimizer is on the CPU already",
    "numerics=stock pp=2 gbs=2 model.mtp_num_layers=1 model.share_embeddings_and_output_weights=true": "pp=1, or "
    "model.share_embeddings_and_output_weights=false",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_setting_without_effect_is_refused(overrides):
    with pytest.raises(ConfigError) as refused:
        compose("qwen3_toy", overrides.split(), device="cpu")
    assert REFUSED[overrides] in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    (
        "logging=wandb project=y",
        "logging=wandb logger.wandb_project=y project=y",
        "tp=2 model.tensor_model_parallel_size=2",
        "tp=2 tp=4",
        "numerics=stock model.make_vocab_size_divisible_by=128",
    ),
)
def test_what_has_an_effect_is_not(overrides):
    compose("qwen3_toy", overrides.split(), device="cpu")


def test_experts_that_are_not_grouped_share_no_adapter(tmp_path):
    words = ["numerics=stock", "peft=lora", f"checkpoint.pretrained_checkpoint={tmp_path}"]
    says = "peft.share_expert_adapters=true: experts that are not grouped have an adapter each"
    with pytest.raises(ConfigError, match=says):
        compose("qwen3_moe_toy", [*words, "peft.share_expert_adapters=true"], device="cpu")
    compose("qwen3_moe_toy", [*words, "peft.share_expert_adapters=false"], device="cpu")


def test_a_resumed_run_may_spell_a_key_in_another_way():
    kept = latest(parse_all(["parallel.data_parallel_size=2", "seq=32", "dp=4"]))
    assert texts(kept) == ("seq=32", "dp=4")


def test_a_command_that_changes_a_run_counts_however_a_key_is_spelled():
    words = ["dp=2", "seq=32", "model.tensor_model_parallel_size=4"]
    assert texts(changed(words, ["tp=2", "parallel.data_parallel_size=1"])) == (
        "seq=32",
        "tp=2",
        "parallel.data_parallel_size=1",
    )


@pytest.mark.parametrize(
    "model, overrides, shards",
    (
        ("qwen3_toy", "precision=fp8_tensorwise seq=128", 8),
        ("qwen3_toy", "cp=2 seq=8", 4),  # a context shard is two chunks, and V of them
        ("qwen3_toy", "model.ffn_hidden_size=64", 2),  # rows of 32 numbers on a CPU
        ("gpt_oss_20b", "", 2),
        ("moonlight_toy", "precision=fp8_tensorwise seq=128", 8),
    ),
)
def test_v_is_the_largest_that_every_rule_takes(model, overrides, shards):
    words = overrides.split()
    assert compose(model, words, device="cpu").config.numerics.virtual_shards == shards
    if shards < 8:
        with pytest.raises(ConfigError):
            compose(model, [*words, f"numerics.virtual_shards={2 * shards}"], device="cpu")


def cells(tmp_path, *words: str) -> dict[str, int]:
    """V of each cell of a matrix."""
    planned = verify.new("qwen3_toy", ["device=cpu", *words], against=None, directory=tmp_path / "matrix")
    return {cell.label: cell.numerics["virtual_shards"] for cell in planned.cells}


def test_verify_gives_all_cells_the_shards_that_the_largest_needs(tmp_path, no_gpus):
    assert cells(tmp_path, "tp=1,2", "precision=fp8_tensorwise", "seq=128") == {"tp=1": 8, "tp=2": 8}
    wide = ("model.num_attention_heads=16", "model.num_query_groups=16", "model.ffn_hidden_size=512", "seq=512")
    assert cells(tmp_path, "tp=1,16", *wide) == {"tp=1": 16, "tp=16": 16}
    assert cells(tmp_path, "cp=1,2", "seq=8") == {"cp=1": 4, "cp=2": 4}


def test_an_optimizer_on_the_cpu_has_no_digests():
    words = ["numerics=stock", "optimizer.optimizer_cpu_offload=true"]
    with pytest.raises(ConfigError, match="digests: an optimizer on the CPU keeps master weights and moments there"):
        compose("qwen3_toy", words, device="gpu")
    assert compose("qwen3_toy", [*words, "ledger.digests=0"], device="gpu").config.ledger.digests == 0

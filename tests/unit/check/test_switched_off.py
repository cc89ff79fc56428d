"""A setting of a feature that is off would change nothing: it is refused with what switches the feature on."""

from functools import cache

import pytest
import yaml

from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse
from tp_invariant_recipes.errors import ConfigError, lines
from tp_invariant_recipes.settings.run_config import RunConfig

# What is typed beside a model, and what switches on the feature that reads it.
UNREAD = {
    "qwen3_toy model.moe_router_topk=4": "the model has no experts, so nothing reads it; model.num_moe_experts=N",
    "qwen3_toy model.moe_shared_expert_intermediate_size=64": "the model has no experts",
    "qwen3_moe_toy model.num_moe_experts=null model.moe_ffn_hidden_size=64": "the model has no experts",
    "qwen3_toy model.mtp_loss_scaling_factor=0.3": "model.mtp_num_layers=N, or leave it out",
    "qwen3_toy model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=E": "it has no pattern of layers",
    "qwen3_toy model.linear_num_value_heads=4": "model.experimental_attention_variant=gated_delta_net",
    "qwen3_toy model.mamba_num_heads=8": "it has no Mamba layers",
    "qwen3_toy model.window_attn_skip_freq=2": "attention has no window, so nothing reads it; model.window_size=[N,0]",
    "qwen3_toy model.recompute_num_layers=1": "model.recompute_granularity=full, or leave it out",
    "qwen3_toy model.position_embedding_type=learned_absolute model.rotary_base=5": "model.position_embedding_type=ro",
    "qwen3_moe_toy model.moe_router_bias_update_rate=0.1": "model.moe_router_enable_expert_bias=true",
    "qwen3_moe_toy model.moe_router_group_topk=2": "model.moe_router_num_groups=N",
    "qwen3_toy optimizer.optimizer=sgd optimizer.adam_beta1=0.8": "optimizer.optimizer=adam",
    "qwen3_toy optimizer.sgd_momentum=0.8": "optimizer.optimizer=sgd",
    "qwen3_toy numerics=stock optimizer.muon_momentum=0.8": "optimizer.optimizer=muon",
    "qwen3_toy checkpoint.async_strategy=mcore": "checkpoint.async_save=true",
    "qwen3_toy numerics=stock numerics.virtual_shards=4": "stock numerics have sums of their own, so nothing reads it",
    "qwen3_toy numerics=stock numerics.grad_norm=fp64": "numerics=tree, or leave it out",
    "qwen3_toy numerics=stock numerics.clip_rounding=pow2": "numerics=tree, or leave it out",
    "qwen3_toy data.json_key=body": "no text is prepared, so nothing reads it; data=text data.path=PATH",
    "qwen3_toy data.tokenizer=byte": "data=text data.path=PATH",
    "qwen3_toy data.cache=there": "data=text data.path=PATH",
    "qwen3_toy validation.eval_global_batch_size=4": "nothing is validated, so nothing reads it; validation.eval_iters",
    "qwen3_toy model.rope_scaling_factor=4.0": "model.rope_scaling=true",
    "qwen3_toy model.yarn_beta_fast=16.0": "model.position_embedding_type=yarn",
    "qwen3_toy ledger.digests=0 ledger.state_digests=5": "nothing has digests, so nothing reads it; ledger.digests=1",
    "qwen3_toy ledger.experts=each": "the model has no experts",
    "qwen3_toy profiling.profile_step_start=3": "profiling.use_pytorch_profiler=true",
    "qwen3_toy scheduler.lr_wsd_decay_iters=5": "scheduler.lr_decay_style=WSD",
}
# The same beside what switches it on, or switched off itself.
READ = (
    "qwen3_moe_toy model.moe_router_topk=4",
    "qwen3_toy model.moe_aux_loss_coeff=0",
    "qwen3_toy model.moe_grouped_gemm=false",
    "qwen3_toy model.mtp_num_layers=1 model.mtp_loss_scaling_factor=0.3",
    "qwen3_toy model.mtp_num_layers=null",
    "nemotron3_nano_toy numerics=stock model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=E",
    "qwen3_next_toy model.linear_num_value_heads=4",
    "nemotron3_nano_toy model.mamba_num_heads=64",
    "gpt_oss_toy model.window_attn_skip_freq=2",
    "qwen3_toy model.rotary_base=5",
    "qwen3_toy optimizer.adam_beta1=0.8",
    "qwen3_toy numerics.virtual_shards=4",
    "qwen3_toy numerics=stock numerics.virtual_shards=null",
    "qwen3_toy ledger.state_digests=5",
    "qwen3_toy data=text data.path=there data.json_key=body",
    "qwen3_toy validation.eval_iters=2 validation.eval_global_batch_size=4",
    "llama32_toy model.rope_scaling_factor=4.0",
    "gpt_oss_toy model.yarn_beta_fast=16.0",
    "qwen3_moe_toy ledger.experts=each",
    "qwen3_toy profiling.use_pytorch_profiler=true profiling.profile_step_start=3",
    "qwen3_toy scheduler.lr_decay_style=WSD scheduler.lr_wsd_decay_iters=5",
    "qwen3_toy optimizer.optimizer=sgd optimizer.sgd_momentum=0.8",
    "qwen3_toy numerics=stock optimizer.optimizer=muon optimizer.use_distributed_optimizer=false "
    "optimizer.muon_momentum=0.8",
    "qwen3_toy optimizer.muon_momentum=0.9",  # a row of invariant numerics says what it may be
    "qwen3_toy checkpoint.async_strategy=mcore checkpoint.async_save=true checkpoint.async_strategy=mcore",
)


@cache
def composed(model: str, *overrides: str) -> RunConfig:
    return compose(model, overrides, device="cpu").config


def idle(words: str) -> list[str]:
    """What is said of the last of the words. Bridge alone knows the types of some."""
    model, *overrides, last = words.split()
    path, value = parse(last).path, parse(last).value
    config = composed(model, *overrides)
    section, _, name = path.partition(".")
    return lines(typed_rules.idle(config.with_fields(section, **{name: yaml.safe_load(value)}), [path]))


@pytest.mark.parametrize("words", UNREAD)
def test_a_setting_that_nothing_reads_is_refused(words):
    (problem,) = idle(words)
    assert problem.startswith(f"{words.split()[-1]}: ")
    assert UNREAD[words] in problem


@pytest.mark.parametrize("words", READ)
def test_a_setting_that_is_read_is_not(words):
    assert idle(words) == []


def test_each_feature_has_a_row():
    typed = [words.split()[-1] for words in UNREAD]
    assert [f.fields for f in typed_rules.FEATURES if not any(word.startswith(f.fields) for word in typed)] == []


def test_the_command_line_is_refused_and_a_recipe_is_not():
    with pytest.raises(ConfigError, match=r"model\.moe_router_topk=4: the model has no experts, so nothing reads it"):
        compose("qwen3_toy", ["model.moe_router_topk=4"], device="cpu")
    config = compose("qwen3_toy", (), device="cpu").config
    assert typed_rules.idle(config.with_fields("model", moe_router_topk=4), []) == []

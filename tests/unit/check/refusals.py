# SPDX-License-Identifier: Apache-2.0
"""What composing refuses: one table of families, with the name of the rule that refuses each setting.

A family is a run, the settings that are refused in it, and neighbours of these that compose without a problem.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.config.adjusted import complete
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse
from tp_invariant_recipes.errors import OR_STOCK, ConfigError
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Family:
    """One run and what it must not be asked.

    run:      the model and overrides, as typed.
    refused:  settings -> the names of the rules that refuse them, and of no other.
    taken:    overrides that this run may have.
    taken_fields: single fields of its tree that may be replaced.
    typed:    whether refused settings are overrides that Hydra composes. If not, they replace single fields of the
              tree of `run`, which takes a tenth of the time, and no other field follows them.
    or_stock: whether the message offers numerics=stock, which meets no other problem.
    """

    run: str
    refused: dict[str, tuple[str, ...]]
    taken: tuple[str, ...]
    taken_fields: tuple[str, ...]
    typed: bool
    or_stock: bool


def problems(run: str, changes: str = "") -> list[str]:
    """What is wrong with a run when single fields of its tree are changed, OR_STOCK left out. On a CPU by default."""
    return [problem for problem in message(run, changes) if problem != OR_STOCK]


def message(run: str, changes: str = "") -> list[str]:
    """The same with OR_STOCK."""
    model, *overrides = run.split()
    own = hydra_tree.resolved

    def changed(*arguments: Any) -> dict[str, Any]:
        tree = dict(complete(RunConfig(own(*arguments))).sections)
        for item in map(parse, changes.split()):
            section, _, name = item.path.partition(".")
            value = item.data
            if name:
                tree.setdefault(section, {})[name] = value
            else:
                tree[section] = value
        return tree

    with mock.patch.object(hydra_tree, "resolved", changed if changes else own):
        try:
            compose(model, overrides, device="cpu")
        except ConfigError as error:
            return list(error.problems)
    return []


def problems_of(*overrides: str, model: str = "qwen3_toy", device: str = "cpu") -> list[str]:
    """The problems of overrides that Hydra composes, each a part of the one message. It fails where there is none."""
    with pytest.raises(ConfigError) as refused:
        compose(model, overrides, device=device)
    assert all(problem in str(refused.value) for problem in refused.value.problems)
    return list(refused.value.problems)


def _families(table: str) -> Iterator[tuple[str, Family]]:
    """Read a table: a name, flags and the run; below them `RULE: SETTINGS | SETTINGS`, of several rules RULE+RULE.

    `own`: of settings whose rule has the name of their field.
    """
    for family in table.replace("\n        ", " ").replace("\n    ", "\t").strip().splitlines():
        head, *rows = family.split("\t")
        flags, run = head.split(": ", 1)
        name, *flags = flags.split(", ")
        lines = {rule: tuple(settings.split(" | ")) for rule, settings in (row.split(": ", 1) for row in rows)}
        neighbours = [lines.pop(kind, ()) for kind in ("taken", "taken_fields")]
        refused = {words: (words.partition("=")[0].rpartition(".")[2],) for words in lines.pop("own", ())}
        refused |= {words: tuple(rules.split("+")) for rules, settings in lines.items() for words in settings}
        yield name, Family(run, refused, *neighbours, typed="typed" in flags, or_stock="or_stock" in flags)


FAMILIES = dict(
    _families(
        r"""
NUMBERS: qwen3_toy numerics=stock
    range: tokenizer.vocab_size=-1 | seq=0 | slurm.tries=0 | optimizer.clip_grad=-1 | save=-1 |
        model.attention_dropout=2 | optimizer.adam_beta2=1.0 | optimizer.clip_grad=nan | lr=inf | lr=1e400 | seed=0
    aligned: model.hidden_size=7
    taken: optimizer.clip_grad=0 | model.hidden_size=136 | seed=1 | lr=0.001 | model.attention_dropout=0.99 | save=0
        | optimizer.adam_beta2=0.0 | optimizer.grad_norm_skip_threshold=inf | checkpoint.most_recent_k=-1 |
        tokenizer.null_tokenizer_pad_id=-1
RELATIONS: qwen3_toy numerics=stock
    multiple: model.num_attention_heads=3 | model.num_attention_heads=6 model.num_query_groups=6
        model.kv_channels=null
    replaced: checkpoint.load=nope | checkpoint.save=x | dataset.path_to_cache=x | logger.tensorboard_dir=x
        logging.kind=tensorboard | logger.wandb_exp_name=x logging.kind=wandb
    warmup: scheduler.lr_warmup_iters=50
    batch: mbs=8
    validation: validation.eval_interval=5
    at_most: tokenizer.vocab_size=513
    async_save: checkpoint.async_save=true | checkpoint.async_save=true checkpoint.async_strategy=mcore
        checkpoint.use_persistent_ckpt_worker=false
    Megatron_Bridge_trains_without: dataset.reset_attention_mask=true
    use_precision_aware_optimizer: optimizer.use_precision_aware_optimizer=true
    layernorm_zero_centered_gamma: device.kind=cpu model.normalization=LayerNorm
        model.layernorm_zero_centered_gamma=true
    undistributed: optimizer.optimizer=sgd optimizer.use_distributed_optimizer=true | optimizer.optimizer=sgd
        ddp.use_distributed_optimizer=true
    taken: model.num_attention_heads=16 | model.num_query_groups=4 | scheduler.lr_warmup_iters=49 |
        validation.eval_iters=1 | tokenizer.vocab_size=512 | model.num_attention_heads=6 model.num_query_groups=6
        model.kv_channels=16 | logger.tensorboard_dir=x
EACH_LAYER: qwen3_toy numerics=stock
    per_layer: model.no_rope_freq=[1] | model.no_rope_freq=[2,0] | model.num_moe_experts=8
        model.moe_layer_freq=[0,1,1] | model.num_moe_experts=8 model.moe_layer_freq=0 | model.window_size=[8,0]
        model.window_attn_skip_freq=0 | model.experimental_attention_variant=gated_delta_net
        model.linear_attention_freq=[1]
    without_rotary: model.no_rope_freq=2 model.position_embedding_type=learned_absolute | model.no_rope_freq=2
        model.multi_latent_attention=true
    no_window: model.window_size=[16,-5] | model.window_size=[16] | model.window_size=[-2,0]
    repeats_a_delta_net: model.experimental_attention_variant=gated_delta_net model.linear_attention_freq=[0,1]
        model.mtp_num_layers=1 | model.experimental_attention_variant=gated_delta_net model.linear_attention_freq=4
        model.mtp_num_layers=1
    taken_fields: model.no_rope_freq=[0,1] | model.no_rope_freq=0 | model.moe_layer_freq=[0,1,1] |
        model.experimental_attention_variant=gated_delta_net model.linear_attention_freq=[1,0]
        model.mtp_num_layers=1
GEMMA3: gemma3_toy numerics=stock
    own: model.position_embedding_type=none | model.position_embedding_type=yarn |
        model.position_embedding_type=learned_absolute
SHARED_EXPERTS: glm45_toy numerics=stock
    add_bias_linear: model.add_bias_linear=true
SHARED_EXPERTS_OF_MAMBA: nemotron3_nano_toy numerics=stock
    add_bias_linear: model.add_bias_linear=true
GROUPED_EXPERTS: qwen3_moe_toy numerics=stock device=gpu cuda_graph=off
    bias_dropout_fusion: model.add_bias_linear=true model.bias_dropout_fusion=true
    taken_fields: model.add_bias_linear=true model.bias_dropout_fusion=false
IGNORED: qwen3_toy numerics=stock
    replaced: train.rampup_batch_size=[1,1,4] | train.step_batch_size_schedule='0:1' | train.iterations_to_skip=[2]
        | train.skip_train=true | validation.skip_train=true | train.train_samples=8 | train.num_epochs=1.0
    own: profiling.use_nsys_profiler=true | profiling.record_memory_history=true | logger.log_energy=true
    taken_fields: train.iterations_to_skip=[] | validation.skip_train=false
BLEND: qwen3_toy numerics=stock data=text data.path=a.txt
    replaced: dataset.blend=[[a],null]
    validation: validation.eval_iters=1 | validation.eval_iters=1 dataset.split='9,0,1'
    taken: validation.eval_iters=1 dataset.split='9,1'
NUMBERS_OF_EXPERTS: qwen3_moe_toy numerics=stock
    at_most: model.moe_router_topk=9
    range: model.num_moe_experts=0
    taken: model.moe_router_topk=8
WITHOUT_EFFECT, typed: qwen3_toy
    loggers: logging=wandb project=y logger.wandb_project=x | logging=mlflow logger.mlflow_experiment=x |
        project=ours | logging=tensorboard name=a | logger.wandb_project=ours | logging=mlflow
        logger.comet_project=a
    two_keys: tp=2 model.tensor_model_parallel_size=4 | dp=2 gbs=2 parallel.data_parallel_size=1 | numerics=tree
        numerics.mode=stock
    unpadded: numerics=stock model.make_vocab_size_divisible_by=384 | numerics=stock model.vocab_size=500
        tokenizer.vocab_size=500 model.should_pad_vocab=true
    tp_divides: tp=2 numerics=stock model.vocab_size=501 tokenizer.vocab_size=501
    interleaved: pp=2 gbs=2 model.virtual_pipeline_model_parallel_size=1
    save_optim: numerics=stock checkpoint.save_optim=false
    save_rng: numerics=stock checkpoint.save_rng=false
    optimizer_cpu_offload: numerics=stock optimizer.optimizer_cpu_offload=true ledger.digests=0 | numerics=stock
        optimizer.optimizer_cpu_offload=true device=gpu
    replaced: logging=comet logger.comet_experiment_name=a
    taken: logging=wandb project=y | logging=wandb logger.wandb_project=y project=y | tp=2
        model.tensor_model_parallel_size=2 | tp=2 tp=4 | numerics=stock model.make_vocab_size_divisible_by=128 |
        numerics=stock optimizer.optimizer_cpu_offload=true device=gpu ledger.digests=0
INVARIANCE, or_stock: qwen3_toy numerics=tree
    own: model.normalization=L2Norm | numerics.initial_weights=megatron |
        numerics.grad_norm=fp64 | optimizer.muon_nesterov=true | optimizer.muon_tp_mode=duplicated |
        optimizer.use_layer_wise_distributed_optimizer=true | dataset.dataloader_type=cyclic
    bias_activation_fusion: model.add_bias_linear=true model.bias_activation_fusion=true
        model.gated_linear_unit=false
    field: ddp.delay_wgrad_compute=true | ddp.grad_reduce_in_fp32=false | optimizer.optimizer=adaptive_muon |
        dist.use_sharp=true | model.use_mamba_mem_eff_path=false | model.experimental_attention_variant=dsa |
        model.attention_backend=flash | model.softmax_type=off-by-one
    field+gtp_weight_remat_size: model.gtp_weight_remat_size=2
    precision: mixed_precision=fp16_mixed
    taken: tp=8 | tp=4 sp=false | tp=2 pp=2 dp=2 gbs=4 | model.num_layers=3 | optimizer.optimizer=sgd | precision=fp32
        | optimizer.use_distributed_optimizer=true
GPT, or_stock: qwen3_toy numerics=tree
    qk_layernorm: model.normalization=LayerNorm
    other_layers: model.normalization=LayerNorm model.qk_layernorm=false model.mtp_num_layers=1
        model.share_embeddings_and_output_weights=false
    position_embedding_type: model.position_embedding_type=learned_absolute model.mtp_num_layers=1
        model.share_embeddings_and_output_weights=false
    taken_fields: model.normalization=LayerNorm model.qk_layernorm=false |
        model.position_embedding_type=learned_absolute
SECTIONS, or_stock: qwen3_toy numerics=tree
    field: tokenizer.use_tokenizer_vocab_size=true | train.exit_signal=SIGINT | checkpoint.ckpt_format=torch |
        straggler.enable_straggler_on_startup=false | ft.enable_ft_package=true
    own: model.should_pad_vocab=true | model.perform_initialization=false
    taken_fields: tokenizer.use_tokenizer_vocab_size=false | model.perform_initialization=true |
        train.exit_signal=SIGTERM | train.empty_unused_memory_level=2 train.train_sync_interval=1 |
        checkpoint.async_save=true checkpoint.async_strategy=mcore checkpoint.dist_ckpt_strictness=log_all |
        profiling.use_pytorch_profiler=true straggler.log_straggler=true logger.log_params_norm=true
EXPERTS, or_stock: qwen3_moe_toy numerics=tree
    experts+etp: model.expert_tensor_parallel_size=2
    experts+num_moe_experts: model.expert_model_parallel_size=3 | model.num_moe_experts=12
        model.expert_model_parallel_size=8
    own: model.moe_ffn_hidden_size=48
    field: model.moe_input_jitter_eps=0.5 | model.moe_router_force_biased=1 | model.moe_shared_expert_overlap=true |
        model.moe_router_load_balancing_type=[aux_loss]
    at_most+virtual_shards: model.num_moe_experts=1 model.seq_length=64
    activation_func: model.activation_func=torch.nn.functional.gelu | model.gated_linear_unit=false
    taken: model.moe_z_loss_coeff=0.1 | model.moe_expert_capacity_factor=1.0
    taken_fields: model.moe_router_force_load_balancing=false model.moe_router_fusion=false
        model.moe_router_padding_for_quantization=false model.moe_router_padding_for_fp8=false
        model.moe_shared_expert_overlap=false model.moe_paged_stash=false model.moe_single_grouped_weight=false
        model.use_grouped_gemm_for_shared_expert=false model.use_te_activation_func=false | model.moe_layer_freq=2 |
        model.moe_layer_freq=[0,1,1,1] |
        model.moe_shared_expert_intermediate_size=128
COMBINED, typed: qwen3_moe_toy numerics=stock dp=2 ep=2 gbs=4 model.overlap_moe_expert_parallel_comm=true
    ep: ep=1
    precision: precision=fp32
    moe_token_dispatcher_type: model.moe_token_dispatcher_type=allgather
    pp: pp=2
    recomputed: model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1
    moe_shared_expert_overlap: model.moe_shared_expert_overlap=true
    mtp_num_layers: model.mtp_num_layers=2 model.share_embeddings_and_output_weights=false
    overlap_moe_expert_parallel_comm: comm_overlap.tp_comm_overlap=false
    tp_comm_overlap: comm_overlap.overlap_moe_expert_parallel_comm=true
    delay_wgrad_compute: comm_overlap.tp_comm_overlap=false comm_overlap.overlap_moe_expert_parallel_comm=true
        model.delay_wgrad_compute=true
    trace: ledger.trace=1 iters=1
    taken: model.mtp_num_layers=1 model.share_embeddings_and_output_weights=false | model.delay_wgrad_compute=true |
        comm_overlap.tp_comm_overlap=false comm_overlap.overlap_moe_expert_parallel_comm=true
        comm_overlap.delay_wgrad_compute=true | model.moe_token_dispatcher_type=flex | pp=2
        model.virtual_pipeline_model_parallel_size=2 | tp=2 device=gpu cuda_graph=off
COMBINED_FIELDS: qwen3_moe_toy numerics=stock dp=2 ep=2 gbs=4 model.overlap_moe_expert_parallel_comm=true
    recomputed: model.recompute_granularity=selective model.recompute_modules=[core_attn,moe] |
        model.recompute_granularity=full | model.recompute_method=uniform | model.recompute_num_layers=1
    enable_offline_packing: dataset.enable_offline_packing=true data.kind=recipe device.kind=gpu
        dataset.offline_packing_specs={packed_sequence_size:256} dataset.dataset_root=x
        dataset.dataloader_type=batch tokenizer.tokenizer_type=HuggingFaceTokenizer tokenizer.tokenizer_model=x
        dataset._target_=megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig
    taken_fields: mixed_precision=null model.bf16=true
COMBINED_HYBRID: nemotron3_nano_toy numerics=stock dp=2 ep=2 gbs=4
    hybrid: model.overlap_moe_expert_parallel_comm=true
INVARIANT_COMBINED, typed: qwen3_moe_toy dp=2 ep=2 gbs=4 model.overlap_moe_expert_parallel_comm=true
    use_megatron_fsdp: ddp.use_megatron_fsdp=true ddp.data_parallel_sharding_strategy=optim ledger.digests=0
    guard: guard=products
    adapts: peft=lora checkpoint.pretrained_checkpoint=base
    peer_memory: tp=2 device=gpu cuda_graph=off
    taken: tp=2 device=gpu device.peer_memory=never cuda_graph=full | comm_overlap.tp_comm_overlap=false
        comm_overlap.overlap_moe_expert_parallel_comm=true | tp=2 | device=gpu cuda_graph=off
LATENT_EXPERTS, typed: qwen3_moe_toy model.moe_latent_size=32
    enabled: precision=fp8_tensorwise
AHEAD, or_stock: qwen3_toy numerics=tree model.mtp_num_layers=1 model.share_embeddings_and_output_weights=false
    cuts_sequences: numerics.context_shards=2
    pipeline_model_parallel_layout: model.pipeline_model_parallel_layout=Et*2|m|L pp=3 gbs=4
    recomputes_several_layers: model.recompute_granularity=full model.recompute_method=uniform
        model.recompute_num_layers=2 | model.recompute_granularity=full model.recompute_method=uniform
        model.recompute_num_layers=1 model.recompute_method=block
    own: model.mtp_use_repeated_layer=true
    taken: tp=2 pp=2 gbs=4 | model.mtp_num_layers=2 | model.recompute_granularity=full
        model.recompute_method=uniform model.recompute_num_layers=1
AHEAD_TYPED, typed: qwen3_toy model.mtp_num_layers=1
    mtp_num_layers: numerics=gather
    pp: pp=2
    taken: pp=2 gbs=4 model.share_embeddings_and_output_weights=false
HYBRID_AHEAD, or_stock: nemotron3_nano_toy numerics=tree
    mtp_hybrid_override_pattern: model.mtp_num_layers=1 | model.mtp_num_layers=1
        model.mtp_hybrid_override_pattern=*G | model.mtp_hybrid_override_pattern=*E
    moe_z_loss_coeff: model.mtp_num_layers=2 model.mtp_hybrid_override_pattern=*E model.mtp_use_repeated_layer=true
        model.moe_z_loss_coeff=0.1
    recompute_granularity: model.mtp_num_layers=2 model.mtp_hybrid_override_pattern=*E
        model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1
    taken: model.mtp_num_layers=2 model.mtp_hybrid_override_pattern=*E | model.mtp_num_layers=2
        model.mtp_hybrid_override_pattern=*E model.mtp_use_repeated_layer=true tp=2
SINKS, or_stock: gpt_oss_toy numerics=tree
    fused_sinks: model.attention_backend=fused
    taken: tp=2 | model.num_layers=4
SINKS_TYPED, typed, or_stock: gpt_oss_toy model.position_embedding_type=rope
    cuts_sequences: cp=2 numerics.context_shards=2
OWN_LAYERS, typed: gemma3_toy
    cuts_sequences: numerics.context_shards=2
    enabled: precision=fp8_tensorwise
    numerics+window_size+activation_func: numerics=portable
    taken: tp=2 sp=false
YARN, typed, or_stock: qwen3_toy model.position_embedding_type=yarn model.yarn_rotary_scaling_factor=32.0
        model.yarn_original_max_position_embeddings=16 model.yarn_beta_fast=32.0 model.yarn_beta_slow=1.0
        model.yarn_correction_range_round_to_int=false
    cuts_sequences: numerics.context_shards=2
LATENT, or_stock: deepseek_v3_toy numerics=tree
    own: model.multi_latent_attention=false | model.qk_layernorm=false | model.apply_rope_fusion=true |
        model.recompute_granularity=selective
    field: model.moe_shared_expert_overlap=true | model.cache_mla_latents=true
    split: model.tensor_model_parallel_size=2 model.num_moe_experts=null numerics.expert_groups=null
    multiple+num_query_groups: model.num_query_groups=16
    add_bias_linear: model.add_qkv_bias=true
    is_mla: model.attention_output_gate=true
DELTA_NET, or_stock: qwen3_next_toy numerics=tree model.mtp_num_layers=null
    own: model.linear_conv_kernel_dim=3 | model.linear_attention_freq=null |
        model.transformer_layer_spec=megatron.bridge.models.gpt_provider.local_layer_spec
    recompute_modules: model.recompute_granularity=selective model.recompute_modules=[gdn_norm_out]
    taken: tp=2 ep=2 | tp=2 pp=2 gbs=4 mbs=2
DELTA_NET_TYPED, typed: qwen3_next_toy model.mtp_num_layers=null
    split: tp=2 sp=false model.num_moe_experts=null
    cuts_sequences: numerics.context_shards=2
    counts_captured_sequences: cuda_graph=te device=gpu
    other_layers: model.normalization=LayerNorm model.qk_layernorm=false
    position_embedding_type: model.position_embedding_type=learned_absolute model.qk_layernorm=false
    borders: precision=fp8_blockwise device=gpu
    virtual_shards: seq=8 model.kv_channels=10 model.num_moe_experts=32 numerics.virtual_shards=8
    taken: precision=fp8_tensorwise device=gpu
LATENT_SHARDS, typed, or_stock: deepseek_v3_toy
    cuts_sequences: numerics.context_shards=2
    taken: numerics.context_shards=1
LORA, or_stock: qwen3_toy numerics=tree peft=lora checkpoint.pretrained_checkpoint=base
    field: peft.normalize_moe_lora=true | peft.experts_shared_outer_loras=true | peft.dropout=0.1 |
        peft.exclude_modules=[x]
    own: peft.target_modules=[router] | peft.target_modules=['*.layers.0.*.linear_qkv'] | peft.target_modules=[] |
        model.pipeline_model_parallel_layout=Et*2L
    cuda_graph+device: model.cuda_graph_impl=full_iteration
LORA_SETTINGS, typed: qwen3_toy peft=lora checkpoint.pretrained_checkpoint=base
    divided: peft.dim=6 tp=4
    range: peft.dim=0 | peft.dropout=2
    no_such_field: peft.dimension=8
    methods: peft.lora_A_init_method=uniform
    wrong_word: peft=dora
    weights: checkpoint.pretrained_checkpoint=null
    taken: peft.dim=8 tp=4 | peft.dim=16 tp=2
LORA_TARGETS: qwen3_toy tp=4 numerics=stock peft=lora checkpoint.pretrained_checkpoint=base
    unknown: peft.target_modules=[linear_qvk]
    divided: peft.dim=6
    taken: peft.dropout=0.0
    taken_fields: peft.target_modules=[linear_qkv] | peft.dim=6 peft.target_modules=[linear_proj]
LORA_OF_EXPERTS: qwen3_moe_toy tp=4 numerics=stock peft=lora checkpoint.pretrained_checkpoint=base
    divided: peft.dim=6 peft.target_modules=[linear_fc2]
LORA_OF_LATENTS: deepseek_v3_toy tp=4 numerics=stock model.moe_router_bias_update_rate=0 peft=lora
        checkpoint.pretrained_checkpoint=base
    latents:
        peft.target_modules=[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj,linear_proj]
        model.qk_pos_emb_head_dim=30
    taken_fields:
        peft.target_modules=[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj,linear_proj]
LORA_IN_OTHER_MODES, typed, or_stock: qwen3_toy peft=lora checkpoint.pretrained_checkpoint=base numerics=tree
    own: numerics=gather | numerics=portable
    cuts_sequences: numerics.context_shards=2
    taken: numerics=stock
GRAPHS, typed, or_stock: qwen3_toy device=gpu
    cuda_graph: cuda_graph=full numerics=gather | cuda_graph=te numerics=gather | cuda_graph=te numerics=portable |
        cuda_graph=te cp=2 | cuda_graph=te numerics.context_shards=2 | cuda_graph=full
        cluster.environment.TPI_CHECK_PRODUCTS=1
    pp: cuda_graph=full pp=2
    taken: cuda_graph=full tp=2 dp=2 gbs=4 | cuda_graph=full cp=2 | cuda_graph=te pp=2 | cuda_graph=full
        numerics=portable
GRAPHS_OF_EXPERTS, typed: qwen3_moe_toy device=gpu cuda_graph=full
    captured_experts: numerics=portable
    sampled_experts: guard=products
    waiting_experts: precision=fp8_tensorwise | model.add_bias_linear=true
    pp: pp=2
    moe_expert_capacity_factor: numerics=stock
    taken: dp=2 ep=2 gbs=2 | cp=2 seq=256 | cuda_graph=te tp=2 ep=2
UNGROUPED_EXPERTS: qwen3_moe_toy numerics=stock peft=lora checkpoint.pretrained_checkpoint=base
    shares_adapter: peft.share_expert_adapters=true
    draws_others: numerics.initial_weights=invariant
    taken_fields: peft.share_expert_adapters=false
MAMBA, or_stock: nemotron3_nano_toy numerics=tree numerics.virtual_shards=2
    own: model.hybrid_layer_pattern='MG' | model.hybrid_layer_pattern='MD' | model.hybrid_layer_pattern='M*/M*'
    multiple+virtual_shards: model.mamba_num_groups=9 | model.mamba_num_heads=9
    taken_fields: model.hybrid_layer_pattern='M*-EM' | model.mamba_num_groups=8
VIRTUAL_SHARDS, or_stock: qwen3_toy numerics=tree
    virtual_shards: numerics.virtual_shards=0 | numerics.virtual_shards=-2 | numerics.virtual_shards=3 |
        numerics.virtual_shards=6 | numerics.virtual_shards=12 | model.ffn_hidden_size=192 |
        model.ffn_hidden_size=40
    taken_fields: model.ffn_hidden_size=192 device.kind=gpu | model.ffn_hidden_size=192 numerics.virtual_shards=2
SHARDS_OF_SHARED_EXPERTS, or_stock: qwen3_moe_toy numerics=tree
    virtual_shards: model.moe_shared_expert_intermediate_size=64
DATA_SHARDS, typed: qwen3_toy gbs=8
    data_shards: dp=3 gbs=6 | numerics.data_shards=3 | numerics.data_shards=0 | dp=4 numerics.data_shards=2 | gbs=24
        numerics.data_shards=16 | numerics.data_shards=4 validation.eval_iters=1 validation.eval_global_batch_size=2
    unread: numerics=stock numerics.data_shards=4
    gathers_whole_weights: ddp.overlap_param_gather=true
    taken: dp=2 | dp=4 numerics.data_shards=4 | gbs=24 numerics.data_shards=8 | ddp.overlap_param_gather=true
        optimizer.use_distributed_optimizer=true
CONTEXT_SHARDS, typed: qwen3_toy
    context_shards: numerics.context_shards=3 | numerics.context_shards=0 | cp=3 seq=96 | cp=4
        numerics.context_shards=2 | tp=4 cp=4 | seq=64 numerics.context_shards=16 numerics.virtual_shards=8 |
        numerics.context_shards=null
    cp: cp=2 numerics=gather | numerics.context_shards=2 numerics=portable
    unread: numerics.context_shards=2 numerics=stock
    taken: tp=4 cp=2 | seq=64 numerics.context_shards=8 | cp=2 numerics.context_shards=4
EXCHANGES, or_stock: qwen3_toy cp=2
    field: model.cp_comm_type=p2p | model.cp_comm_type=all_gather | model.cp_comm_type='a2a+p2p' |
        model.cp_comm_type=[a2a,p2p]
    taken_fields: model.cp_comm_type=a2a
MUON, typed: qwen3_toy optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated
    muon_tp_mode: optimizer.muon_tp_mode=blockwise
    muon_tp_mode+field: optimizer.muon_tp_mode=distributed
    field: optimizer.muon_scalar_optimizer=lion
    undistributed: optimizer.use_distributed_optimizer=true | optimizer.use_layer_wise_distributed_optimizer=true
        precision=fp32
    optimizer: peft=lora checkpoint.pretrained_checkpoint=base | guard=products | numerics=portable
    taken: tp=2 dp=2 gbs=2 | optimizer.use_layer_wise_distributed_optimizer=true dp=2 gbs=2 | numerics=gather |
        numerics=stock optimizer.muon_tp_mode=blockwise | optimizer.muon_nesterov=true optimizer.muon_momentum=0.9
        optimizer.muon_num_ns_steps=8 | optimizer.muon_coefficient_type=polar_express
        optimizer.muon_fp32_matmul_prec=highest
MUON_OF_EXPERTS, typed, or_stock: qwen3_moe_toy gbs=2 optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated
        optimizer.use_layer_wise_distributed_optimizer=true
    use_layer_wise_distributed_optimizer: tp=2
    taken: tp=2 ep=2 | tp=2 dp=2
PORTABLE_RUN, typed, or_stock: qwen3_toy numerics=portable
    own: model.transformer_impl=transformer_engine | precision=fp32 |
        model.add_bias_linear=true | model.softmax_type=learnable | model.activation_func_clamp_value=7.0 |
        model.glu_linear_offset=1.0 | optimizer.optimizer=sgd | numerics.grad_norm=fp64 |
        scheduler.lr_decay_style=inverse-square-root
    cp: cp=2
    position_embedding_type: model.rotary_interleaved=true
    use_precision_aware_optimizer+use_precision_aware_optimizer: optimizer.use_precision_aware_optimizer=true
    taken: tp=1 | tp=4 sp=false | tp=2 pp=2 dp=2 gbs=4
PORTABLE_FIELDS, or_stock: qwen3_toy numerics=portable
    activation_func: model.activation_func=torch.nn.functional.gelu | model.gated_linear_unit=false
    attention_backend: model.attention_backend=unfused
    normalization: model.normalization=LayerNorm model.qk_layernorm=false
PORTABLE_EXPERTS, or_stock: qwen3_moe_toy numerics=portable
    own: model.moe_router_score_function=sqrtsoftplus | model.moe_expert_capacity_factor=1.0 |
        model.moe_router_enable_expert_bias=true | model.moe_router_group_topk=2 | model.moe_router_num_groups=2 |
        model.moe_router_pre_softmax=true | model.moe_router_topk_scaling_factor=2.5 | model.moe_z_loss_coeff=0.1 |
        model.moe_latent_size=32
    taken: tp=1 | tp=2 | tp=2 ep=2 | pp=2
    taken_fields: model.moe_layer_freq=[1,1,1,1] | model.moe_layer_freq=1 | model.moe_layer_freq=[0,1,1,1] |
        model.moe_router_score_function=sigmoid | model.moe_router_load_balancing_type=seq_aux_loss |
        model.moe_router_dtype=fp32 | model.moe_shared_expert_intermediate_size=256
PORTABLE_LATENT, or_stock: moonlight_toy numerics=portable
    concentrated: model.rotary_scaling_factor=4.0 model.mscale=0.5
    taken: tp=2 ep=2 | pp=2 | model.rotary_scaling_factor=4.0
IN_FP8, typed: qwen3_toy numerics=tree precision=fp8_tensorwise
    other_recipe: mixed_precision=fp16_with_mxfp8_mixed | mixed_precision.fp8_recipe=custom |
        mixed_precision=fp16_with_fp8_subchannel_scaling_mixed
    precision: mixed_precision=bf16_with_nvfp4_mixed | mixed_precision=bf16_with_fp8_delayed_scaling_mixed |
        mixed_precision.fp8_recipe=delayed | numerics=stock
    borders: precision=mxfp8 numerics.virtual_shards=8 | precision=mxfp8 model.hidden_size=80 | precision=mxfp8
        seq=48 | precision=fp8_blockwise numerics.virtual_shards=2 | precision=fp8_blockwise
        numerics.virtual_shards=2 model.kv_channels=32 model.ffn_hidden_size=384 | precision=fp8_blockwise
        model.hidden_size=192 | model.hidden_size=200 device=gpu | seq=64 | numerics.context_shards=2
    reuse_grad_buf_for_mxfp8_param_ag: precision=mxfp8 mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true
    numerics: precision=mxfp8 numerics=gather | numerics=gather
    fp8: precision=bf16 model.fp8=hybrid
    own: mixed_precision.fp8_param_gather=true | mixed_precision.fp8_wgrad=false | mixed_precision.bf16=false
    fp8_dot_product_attention: mixed_precision.fp8_dot_product_attention=true |
        mixed_precision.fp8_multi_head_attention=true
    taken: numerics=portable | precision=fp8_blockwise | mixed_precision.fp8=e4m3 |
        mixed_precision=bf16_with_fp8_current_scaling_mixed | mixed_precision=bf16-with-fp8-current-scaling-mixed |
        mixed_precision=bf16_with_fp8_subchannel_scaling_mixed |
        mixed_precision=nemotron_h_bf16_with_fp8_current_scaling_mixed | model.hidden_size=192 |
        numerics.virtual_shards=2 tp=2 | seq=256 numerics.context_shards=2
RECORDING: qwen3_toy numerics=stock
    must_be_0_never: ledger.digests=-1
    range: ledger.state_digests=-1
    own: ledger.trace=99:101 | ledger.trace='50:51' | ledger.trace='' | ledger.trace='3:' | ledger.trace=':3' |
        ledger.trace='0:3' | ledger.trace='3:2' | ledger.trace='a:b' | ledger.trace='1:2:3' | ledger.trace='-1:2' |
        ledger.trace='1.0:2' | model.gtp_weight_remat_size=2
    dump: ledger.dump=[weights/x] | ledger.dump=[weights/x,loss,forward/x] ledger.trace='1:1' |
        ledger.dump=[weight/*,loss*,w?ights/x,forward*] ledger.trace='1:1'
    taken: ledger.digests=0 ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor | ledger.trace='49:50' |
        ledger.dump=[forward/decoder.layers.0.mlp/output] ledger.trace='1:1' | ledger.dump=[backward/model/input.1]
        ledger.trace='1:1' | ledger.dump=[gradients/a.b] ledger.trace='1:1' | ledger.dump=[weights/a.b]
        ledger.trace='1:1' | ledger.dump=[*] ledger.trace='1:1' | ledger.dump=[?orward/*/input] ledger.trace='1:1' |
        ledger.dump=[masters/*.linear_fc?.weight] ledger.trace='1:1'
FSDP, typed: qwen3_toy gbs=4 dp=2 numerics=stock ledger.digests=0 ddp.use_megatron_fsdp=true
    fields: ddp.data_parallel_sharding_strategy=full | ddp.outer_dp_sharding_strategy=optim | pp=2 |
        ddp.num_distributed_optimizer_instances=2 | ddp.grad_reduce_in_fp32=false |
        ddp.nccl_ub=true | ddp.fsdp_double_buffer=true |
        ddp.average_in_collective=true |
        checkpoint.ckpt_format=torch_dist | model.init_model_with_meta_device=true | optimizer.optimizer=sgd
    unsaved: save=2
    others+weights: peft=lora
    taken: ddp.data_parallel_sharding_strategy=no_shard | ddp.data_parallel_sharding_strategy=optim | tp=2 |
        ddp.data_parallel_sharding_strategy=optim_grads | ddp.data_parallel_sharding_strategy=optim_grads_params |
        numerics=deterministic
INVARIANT_FSDP, typed: qwen3_toy gbs=4 dp=2 ddp.use_megatron_fsdp=true ledger.digests=0
        optimizer.use_distributed_optimizer=true numerics.data_shards=4
        ddp.data_parallel_sharding_strategy=optim_grads
    limits: ddp.data_parallel_sharding_strategy=no_shard | numerics.context_shards=2 | guard=products |
        ddp.overlap_param_gather=true
    passes: numerics.data_shards=2 | gbs=8 | gbs=12
    taken: gbs=8 numerics.data_shards=8 | ddp.data_parallel_sharding_strategy=optim_grads_params |
        ddp.data_parallel_sharding_strategy=optim gbs=8 | numerics=portable | tp=2 |
        ddp.data_parallel_sharding_strategy=optim ddp.overlap_grad_reduce=true
INVARIANT_FSDP_FIELDS: qwen3_toy gbs=4 dp=2 ddp.use_megatron_fsdp=true optimizer.use_distributed_optimizer=true
        ddp.data_parallel_sharding_strategy=optim
    limits: ddp.megatron_fsdp_main_grads_dtype=null
INVARIANT_FSDP_EXPERTS, typed: qwen3_moe_toy gbs=4 dp=2 ddp.use_megatron_fsdp=true ledger.digests=0
        optimizer.use_distributed_optimizer=true numerics.data_shards=4
        ddp.data_parallel_sharding_strategy=optim_grads numerics.expert_groups=4
    passes: numerics.expert_groups=2
    taken: ddp.data_parallel_sharding_strategy=optim_grads_params ep=2 | tp=2 ep=4 |
        ddp.data_parallel_sharding_strategy=optim numerics.expert_groups=2
INVARIANT_DDP, typed: qwen3_toy dp=2 gbs=2
    without: ddp.data_parallel_sharding_strategy=optim | ddp.data_parallel_sharding_strategy=optim_grads_params
    taken: ddp.data_parallel_sharding_strategy=no_shard
FSDP_GPU, typed: qwen3_toy gbs=4 dp=2 numerics=stock device=gpu ddp.use_megatron_fsdp=true cuda_graph=off
    others: cuda_graph=te seq=128 | precision=fp8_tensorwise
    taken: tp=2
WITHOUT_FSDP, typed: qwen3_toy numerics=stock
    alone: checkpoint.ckpt_format=fsdp_dtensor | dist.use_megatron_fsdp=true | dist.use_torch_fsdp2=true
GUARD, typed: qwen3_toy gbs=4 dp=2 guard=shadow
    guard: dp=1 | ledger.trace='1:1' | numerics=stock | numerics=gather
    overlap_grad_reduce: ddp.overlap_grad_reduce=true
    changed: guard=off guard.every=5 | guard=off guard.exclude=true | guard=off guard.collectives=all
    type: guard.collectives=some
    range: guard.every=0 | guard.products=0
    optimizer: optimizer.optimizer=sgd numerics=tree
    taken: guard=products dp=1 | guard=products ledger.trace='1:1' | guard=off | ddp.overlap_grad_reduce=true
        numerics.data_shards=4 | guard.exclude=true | numerics=portable | guard.collectives=all
GUARDED_EXPERTS, typed: qwen3_moe_toy gbs=4 guard=shadow dp=2
    experts_on_all_replicas: ep=2
    taken: tp=2 ep=2 | dp=4 ep=2
PEER_MEMORY, typed: qwen3_toy device=gpu tp=2 device.peer_memory=always
    type: device.peer_memory=yes
    peer_memory: device=cpu | numerics=stock | tp=1 | tp=16 numerics.virtual_shards=16 model.num_attention_heads=16
        model.num_query_groups=16 | tp=4 launcher=slurm cluster.gpus_per_node=2 slurm.time=5
    taken: tp=4 | numerics=portable | numerics=gather | tp=1 device.peer_memory=auto | numerics=stock
        device.peer_memory=never | device=cpu device.peer_memory=auto | tp=4 launcher=slurm cluster.gpus_per_node=4
        slurm.time=5
IDLE_QWEN3_TOY, typed: qwen3_toy
    idle: model.moe_router_topk=4 | model.moe_shared_expert_intermediate_size=64 | model.mtp_loss_scaling_factor=0.3
        | model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=E | model.linear_num_value_heads=4 |
        model.mamba_num_heads=8 | model.recompute_num_layers=1 | model.position_embedding_type=learned_absolute
        model.rotary_base=5 | optimizer.optimizer=sgd optimizer.adam_beta1=0.8 | optimizer.sgd_momentum=0.8 |
        numerics=stock optimizer.muon_momentum=0.8 | checkpoint.async_strategy=mcore | numerics=stock
        numerics.virtual_shards=4 | numerics=stock numerics.grad_norm=fp64 | numerics=stock
        numerics.clip_rounding=pow2 | data.json_key=body | data.tokenizer=byte | data.cache=there |
        validation.eval_global_batch_size=4 | model.rope_scaling_factor=4.0 | model.yarn_beta_fast=16.0 |
        ledger.digests=0 ledger.state_digests=5 | ledger.experts=each | profiling.profile_step_start=3 |
        scheduler.lr_wsd_decay_iters=5
    taken: model.moe_grouped_gemm=false | model.mtp_num_layers=1 model.mtp_loss_scaling_factor=0.3 |
        model.mtp_num_layers=null | model.rotary_base=5 | optimizer.adam_beta1=0.8 | numerics.virtual_shards=4 |
        numerics=stock numerics.virtual_shards=null | ledger.state_digests=5 | data=text data.path=there
        data.json_key=body | validation.eval_iters=2 validation.eval_global_batch_size=4 |
        profiling.use_pytorch_profiler=true profiling.profile_step_start=3 | scheduler.lr_decay_style=WSD
        scheduler.lr_wsd_decay_iters=5 | optimizer.optimizer=sgd optimizer.sgd_momentum=0.8 | numerics=stock
        optimizer.optimizer=muon optimizer.use_distributed_optimizer=false optimizer.muon_momentum=0.8 |
        checkpoint.async_strategy=mcore checkpoint.async_save=true checkpoint.async_strategy=mcore
IDLE_QWEN3_MOE_TOY, typed: qwen3_moe_toy
    idle: model.num_moe_experts=null model.moe_ffn_hidden_size=64 | model.moe_router_bias_update_rate=0.1 |
        model.moe_router_group_topk=2
    taken: model.moe_router_topk=4 | ledger.experts=each
IDLE_NEMOTRON3_NANO_TOY, typed: nemotron3_nano_toy
    taken: numerics=stock model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=E | model.mamba_num_heads=64
IDLE_QWEN3_NEXT_TOY, typed: qwen3_next_toy
    taken: model.linear_num_value_heads=4
IDLE_LLAMA32_TOY, typed: llama32_toy
    taken: model.rope_scaling_factor=4.0
IDLE_GPT_OSS_TOY, typed: gpt_oss_toy
    taken: model.yarn_beta_fast=16.0
"""
    )
)

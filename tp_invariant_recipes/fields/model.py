# SPDX-License-Identifier: Apache-2.0
"""The fields of a model. Somebody has read what each of these does to the order of sums.

With ANY any value is as good as another, unless a rule of check/invariant/ says otherwise. tpi refuses a run that sets
a field that nobody has read. A ~ is before fields that are no part of a run's fingerprint, as in the other sections:
they say how a model is cut, which code computes it and when, or where something lies.
"""

from tp_invariant_recipes.fields.field import (
    ANY,
    BELOW_1,
    COUNT,
    NONE,
    NULL,
    ON,
    PART,
    POSITIVE,
    SHARE,
    SIGNED,
    UNKNOWN,
    only,
    row,
    section,
)

_OFF = only(False, None)
_ROOM = "experts have room for all of their tokens"

MODEL = section(
    row(ANY, "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size "
        "make_vocab_size_divisible_by mamba_chunk_size mamba_head_dim mamba_num_groups mamba_num_heads "
        "mamba_state_dim num_moe_experts moe_ffn_hidden_size moe_latent_size "
        "moe_shared_expert_intermediate_size", "sizes", COUNT),
    row(ANY, "kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim should_pad_vocab seq_length "
        "is_hybrid_model hybrid_layer_pattern moe_layer_freq", "sizes"),
    row(ANY, "linear_attention_freq", "sizes of gated delta nets"),
    row(ANY, "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
        "linear_value_head_dim", "sizes of gated delta nets", COUNT),
    row(ANY, "activation_func activation_func_clamp_value add_bias_linear add_qkv_bias attention_output_gate "
        "~attention_softmax_in_fp32 calculate_per_token_loss "
        "gated_linear_unit interleaved_attn_pattern "
        "is_vision_language layernorm_zero_centered_gamma mtp_num_layers mtp_use_repeated_layer "
        "multi_latent_attention normalization qk_layernorm mtp_hybrid_override_pattern "
        "scatter_embedding_sequence_parallel share_embeddings_and_output_weights", "mathematics"),
    row(only(None, "gated_delta_net"), "experimental_attention_variant",
        "of variants of attention only gated delta nets are covered"),
    row(only("learnable", "vanilla"), "softmax_type", "of attention sinks only those of each head are covered"),
    row(only(0.0), "attention_dropout hidden_dropout", "dropout draws other numbers in every layout", BELOW_1),
    row(ANY, "glu_linear_offset", "mathematics", SIGNED),
    row(ANY, "layernorm_epsilon softmax_scale", "mathematics", POSITIVE),
    row(only("rope", "yarn", "none", "learned_absolute"), "position_embedding_type",
        "of positions rotary and learned ones are covered"),
    row(ANY, "rope_scaling rotary_interleaved yarn_beta_fast yarn_beta_slow "
        "yarn_correction_range_round_to_int yarn_original_max_position_embeddings yarn_rotary_scaling_factor",
        "positions, each by itself"),
    row(ANY, "rope_scaling_factor", "positions, each by itself", POSITIVE),
    row(ANY, "rotary_base", "positions, each by itself", COUNT),
    row(ANY, "rotary_percent", "positions, each by itself", PART),
    row(ANY, "yarn_mscale yarn_mscale_all_dim", "positions, each by itself", SIGNED),
    row(ANY, "beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings rope_type",
        "positions of multi-latent attention"),
    row(ANY, "rotary_scaling_factor", "positions of multi-latent attention", POSITIVE),
    row(ANY, "no_rope_freq window_attn_skip_freq", "each layer, by its number in the whole model"),
    row(ANY, "window_size", "each layer, by its number in the whole model", SIGNED),
    row(ANY, "moe_aux_loss_coeff moe_pad_expert_input_to_capacity moe_token_drop_policy moe_z_loss_coeff "
        "moe_router_bias_update_rate moe_router_enable_expert_bias moe_router_pre_softmax moe_router_score_function "
        "moe_shared_expert_gate", "experts"),
    row(only(None, "fp32"), "moe_router_dtype", "a router in another dtype has no invariant version"),
    row(only("aux_loss", "seq_aux_loss", "global_aux_loss", "none"), "moe_router_load_balancing_type",
        "that loss of the router has no invariant version"),
    row(only("alltoall", "allgather"), "~moe_token_dispatcher_type", "the flex dispatcher has no invariant version",
        adjust_to="alltoall"),
    row(ANY, "moe_expert_capacity_factor moe_router_topk_scaling_factor", "experts", POSITIVE),
    row(ANY, "moe_router_group_topk moe_router_num_groups moe_router_topk", "experts", COUNT),
    row(ANY, "init_method embedding_init_method output_layer_init_method "
        "perform_initialization use_cpu_initialization", "weights"),
    row(ANY, "init_method_std embedding_init_method_std", "weights", POSITIVE),
    row(ANY, "autocast_dtype bf16 first_last_layers_bf16 fp4 fp8 params_dtype ~pipeline_dtype", "precision"),
    row(ANY, "fp4_recipe fp8_amax_compute_algo disable_parameter_transpose_cache fp8_output_proj fp8_recipe "
        "fp8_wgrad tp_only_amax_red num_layers_at_end_in_bf16 num_layers_at_start_in_bf16",
        "read with fp8 or fp4 alone"),
    row(ANY, "fp8_amax_history_len", "read with fp8 or fp4 alone", COUNT),
    row(ANY, "fp8_margin", "read with fp8 or fp4 alone", SIGNED),
    row(ANY, "~tensor_model_parallel_size ~pipeline_model_parallel_size ~context_parallel_size "
        "~expert_model_parallel_size ~expert_tensor_parallel_size ~sequence_parallel "
        "~pipeline_model_parallel_layout ~account_for_embedding_in_pipeline_split "
        "~account_for_loss_in_pipeline_split ~batch_p2p_comm deallocate_pipeline_outputs "
        "~overlap_p2p_comm variable_seq_lengths", "layout"),
    row(only(None, "a2a"), "~cp_comm_type", "only the exchange of heads keeps attention whole", adjust_to="a2a"),
    row(ANY, "~virtual_pipeline_model_parallel_size ~num_layers_in_first_pipeline_stage "
        "~num_layers_in_last_pipeline_stage ~microbatch_group_size_per_vp_stage", "layout", COUNT),
    row(only(None, 1), "gtp_weight_remat_size", "weights spread over more ranks are not covered", COUNT),
    row(ANY, "~apply_rope_fusion ~bias_activation_fusion ~bias_dropout_fusion "
        "~cuda_graph_impl ~cuda_graph_modules ~cuda_graph_scope "
        "~deterministic_mode ~gradient_accumulation_fusion ~hybrid_stack_spec ~masked_softmax_fusion "
        "~moe_grouped_gemm ~moe_permute_fusion ~persist_layer_norm "
        "~recompute_granularity ~recompute_method ~recompute_modules ~transformer_impl "
        "~transformer_layer_spec ~use_fused_weighted_squared_relu ~use_te_rng_tracker", "code"),
    # By source, flash-attn's backward groups sums by the number of heads on a rank.
    row(only("auto", "fused", "unfused", "local", None), "~attention_backend", "it has no invariant version",
        adjust_to="auto"),
    row(ON, "use_mamba_mem_eff_path", "Megatron's other path through a Mamba layer is not covered", adjust_to=True),
    row(ANY, "~cuda_graph_warmup_steps", "code", SIGNED),
    row(ANY, "~recompute_num_layers", "code", COUNT),
    row(ANY, "mtp_loss_scaling_factor", "read with mtp_num_layers alone"),
    row(ANY, "~cross_entropy_fusion_impl", "read with cross_entropy_loss_fusion alone"),
    row(ANY, "moe_flex_dispatcher_backend moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_sms "
        "moe_hybridep_num_sms_preprocessing ~moe_permute_fusion_into_hybridep", "the flex dispatcher alone reads them"),
    row(ANY, "moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda "
        "moe_paged_stash_page_size", "read with moe_paged_stash alone"),
    row(ANY, "~cpu_offloading_num_layers ~delay_offload_until_cuda_graph "
        "~fine_grained_offloading_max_inflight_offloads ~min_offloaded_tensor_size ~offload_modules",
        "read with cpu_offloading or fine_grained_activation_offloading alone"),
    row(ANY, "~overlap_moe_expert_parallel_comm", "layers add in the same order in Megatron's combined schedule"),
    row(ANY, "high_priority_a2a_comm_stream", "read with overlap_moe_expert_parallel_comm alone"),
    row(ANY, "keep_mtp_spec_in_bf16", "neither Bridge nor Megatron-Core reads it"),
    row(ANY, "inference_cuda_graph_scope ~inference_grouped_gemm_backend moe_pad_experts_for_cuda_graph_inference",
        "inference"),
    row(ANY, "config_logger_dir finalize_model_grads_func grad_scale_func grad_sync_func no_sync_func "
        "param_sync_func timers", "what training loops set"),
    row(ANY, "~hf_model_id ~hf_model_revision", "where weights come from"),
    row(ANY, "hetereogenous_dist_checkpoint", "how checkpoints name layers"),
    row(NONE, "moe_router_topk_limited_devices fp8_interval expert_gtp_weight_remat_size "
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards mlp_chunks_for_training",
        UNKNOWN, COUNT),
    row(NONE, "seq_len_interpolation_factor", UNKNOWN, POSITIVE),
    row(NONE, "~activation_offload_fraction hybrid_attention_ratio hybrid_mlp_ratio", UNKNOWN, SHARE),
    row(NONE, "mup_attn_scale_power ~delta_offload_bytes_across_pp_ranks", UNKNOWN, SIGNED),
    row(_OFF, "qk_l2_norm ~dense_grouped_gemm use_kitchen heterogeneous_block_specs fp32_residual_connection "
        "symmetric_ar_type inference_fuse_tp_communication fp16 qk_clip log_max_attention_logit "
        "moe_enable_routing_replay moe_apply_probs_on_input cache_mla_latents", "the invariant layers lack it"),
    row(only(None, 0.0), "moe_input_jitter_eps", "noise has other numbers in every layout", BELOW_1),
    row(NULL, "moe_router_force_biased", "it is a benchmark's: the model's own router decides", SIGNED),
    # Another value of a recipe becomes this one.
    row(_OFF, "~moe_router_fusion", "the invariant router has no fused version", adjust_to=False),
    row(_OFF, "moe_router_force_load_balancing", "it is a benchmark's: the model's own router decides",
        adjust_to=False),
    row(_OFF, "~tp_comm_overlap delay_wgrad_compute "
        "~overlap_dispatch_backward_with_experts_wgrad ~moe_shared_expert_overlap defer_embedding_wgrad_compute",
        "the invariant sums have an exchange of their own", adjust_to=False),
    row(_OFF, "~cross_entropy_loss_fusion ~use_grouped_gemm_for_shared_expert moe_single_grouped_weight "
        "use_te_activation_func use_transformer_engine_op_fuser fused_residual_rmsnorm "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 use_transformer_engine_full_layer_spec "
        "~mla_down_proj_fusion fused_single_qkv_rope", "the invariant layers replace it", adjust_to=False),
    # Where tokens exceed the room, Megatron's PagedStashRunner computes the step again without both: it drops none.
    row(NULL, "moe_expert_rank_capacity_factor", _ROOM, adjust_to=None),
    row(_OFF, "moe_paged_stash", _ROOM, adjust_to=False),
    row(_OFF, "init_model_with_meta_device", "only FSDP gives it memory later", adjust_to=False),
    row(NULL, "moe_mlp_glu_interleave_size", "gate and up stay one after the other", adjust_to=None),
    row(ON, "~disable_bf16_reduced_precision_matmul", "cuBLAS may add partial sums of a GEMM in bf16", adjust_to=True),
    row(_OFF, "~cpu_offloading ~fine_grained_activation_offloading", "activations stay where they are",
        adjust_to=False),
    # Refused unless they have their default, since nobody has read them.
    row(NONE, "~_target_ ~batch_invariant_mode ~cpu_offloading_activations ~cpu_offloading_double_buffering "
        "~cpu_offloading_retain_pinned_cpu_buffers ~cpu_offloading_weights ~cuda_graph_retain_backward_graph "
        "~cuda_graph_use_single_mempool ~ep_overlap_early_attn_memory_release "
        "~inference_moe_token_dispatcher_type ~overlap_p2p_comm_warmup_flush ~tp_comm_overlap_ag "
        "~tp_comm_overlap_cfg ~tp_comm_overlap_disable_fc1 ~tp_comm_overlap_disable_qkv ~tp_comm_overlap_rs "
        "~tp_comm_overlap_rs_dgrad ~use_grouped_gemm_for_dense_mlp", UNKNOWN),
)  # fmt: skip
KNOWN = frozenset(name for name, field in MODEL.named.items() if field.allowed is not NONE)

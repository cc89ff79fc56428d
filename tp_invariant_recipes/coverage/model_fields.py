"""The fields of a model that the invariant numerics know. tpi refuses a run that sets another one.

Somebody has read what each of these does to the order of sums. Any value is as good as another, unless a rule of
`invariance.py`, `experts.py` or `latent.py` says otherwise.
"""

from collections.abc import Iterable

# What fields say, or who reads them -> their names.
FIELDS = {
    "sizes": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels kv_lora_rank "
    "q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim vocab_size should_pad_vocab make_vocab_size_divisible_by "
    "seq_length is_hybrid_model hybrid_layer_pattern mamba_chunk_size mamba_head_dim mamba_num_groups mamba_num_heads "
    "mamba_state_dim num_moe_experts moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size "
    "moe_layer_freq",
    "sizes of gated delta nets": "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim",
    "mathematics": "activation_func activation_func_clamp_value add_bias_linear add_qkv_bias attention_dropout "
    "attention_output_gate attention_softmax_in_fp32 attn_logit_softcapping calculate_per_token_loss "
    "experimental_attention_variant final_logit_softcapping gated_linear_unit glu_linear_offset hidden_dropout "
    "interleaved_attn_pattern is_vision_language layernorm_epsilon layernorm_zero_centered_gamma mtp_num_layers "
    "mtp_use_repeated_layer multi_latent_attention normalization qk_layernorm query_pre_attn_scalar "
    "scatter_embedding_sequence_parallel share_embeddings_and_output_weights softmax_scale softmax_type",
    "positions, each by itself": "position_embedding_type rope_scaling rope_scaling_factor rotary_base "
    "rotary_interleaved rotary_percent yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int yarn_mscale "
    "yarn_mscale_all_dim yarn_original_max_position_embeddings yarn_rotary_scaling_factor",
    "positions of multi-latent attention": "beta_fast beta_slow mscale mscale_all_dim "
    "original_max_position_embeddings rope_type rotary_scaling_factor",
    "each layer, by its number in the whole model": "no_rope_freq window_attn_skip_freq window_size",
    "experts": "moe_aux_loss_coeff moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
    "moe_z_loss_coeff moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias "
    "moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax "
    "moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate",
    "weights": "init_method init_method_std embedding_init_method embedding_init_method_std output_layer_init_method "
    "init_model_with_meta_device perform_initialization use_cpu_initialization",
    "precision": "autocast_dtype bf16 disable_bf16_reduced_precision_matmul first_last_layers_bf16 fp4 fp8 "
    "params_dtype pipeline_dtype",
    # Bridge's bf16_mixed sets them.
    "read with fp8 or fp4 alone": "fp4_recipe fp8_amax_compute_algo fp8_amax_history_len fp8_margin "
    "disable_parameter_transpose_cache fp8_output_proj fp8_recipe fp8_wgrad tp_only_amax_red "
    "num_layers_at_end_in_bf16 num_layers_at_start_in_bf16",
    "layout": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel virtual_pipeline_model_parallel_size "
    "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split gtp_weight_remat_size "
    "microbatch_group_size_per_vp_stage batch_p2p_comm cp_comm_type deallocate_pipeline_outputs overlap_p2p_comm "
    "variable_seq_lengths",
    "code": "apply_rope_fusion attention_backend bias_activation_fusion bias_dropout_fusion cross_entropy_loss_fusion "
    "cuda_graph_impl cuda_graph_modules cuda_graph_scope cuda_graph_warmup_steps delay_wgrad_compute "
    "deterministic_mode gradient_accumulation_fusion hybrid_stack_spec masked_softmax_fusion moe_grouped_gemm "
    "moe_permute_fusion moe_token_dispatcher_type persist_layer_norm recompute_granularity recompute_method "
    "recompute_modules recompute_num_layers tp_comm_overlap transformer_impl transformer_layer_spec "
    "use_fused_weighted_squared_relu use_mamba_mem_eff_path use_te_rng_tracker",
    "read with mtp_num_layers alone": "mtp_loss_scaling_factor",
    "read with cross_entropy_loss_fusion alone": "cross_entropy_fusion_impl",
    "the flex dispatcher alone reads them": "moe_flex_dispatcher_backend moe_deepep_num_sms "
    "moe_flex_dispatcher_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing "
    "moe_permute_fusion_into_hybridep",
    "read with moe_paged_stash alone": "moe_paged_stash_buffer_size_factor_cpu "
    "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size",
    "read with cpu_offloading or fine_grained_activation_offloading alone": "cpu_offloading_num_layers "
    "delay_offload_until_cuda_graph fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size "
    "offload_modules",
    "read with overlap_moe_expert_parallel_comm alone": "high_priority_a2a_comm_stream",
    "neither Bridge nor Megatron-Core reads it": "keep_mtp_spec_in_bf16",
    "inference": "inference_cuda_graph_scope inference_grouped_gemm_backend moe_pad_experts_for_cuda_graph_inference",
    "what training loops set": "config_logger_dir finalize_model_grads_func grad_scale_func grad_sync_func "
    "no_sync_func param_sync_func timers",
    "where weights come from": "hf_model_id hf_model_revision",
    "how checkpoints name layers": "hetereogenous_dist_checkpoint",
}
KNOWN = frozenset(name for names in FIELDS.values() for name in names.split())


def unknown(given: Iterable[str], refused_elsewhere: Iterable[str]) -> list[str]:
    """One line for every field that no rule knows.

    given: the fields that a run sets. refused_elsewhere: fields that a rule of its own refuses.
    """
    names = set(given) - KNOWN - set(refused_elsewhere) - {"_target_"}
    return [f"model.{name}: the invariant numerics do not know this field; leave it unset" for name in sorted(names)]

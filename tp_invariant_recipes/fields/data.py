"""Data, tokens, and adapters (check/finetuning.py and check/invariant/training.py have rules for most of these)."""

from tp_invariant_recipes.fields.field import (
    ANY,
    BOOL,
    BYTES,
    NONE,
    NULL,
    NUMBER,
    OFF,
    ON,
    PLACE,
    READS,
    UNKNOWN,
    only,
    row,
    section,
)
from tp_invariant_recipes.fields.ranges import COUNT, SHARE, SIGNED

_OTHER_RULE = "another rule says which values, under any numerics"
_UNREAD = "Megatron-Bridge does not read it"
_DIGEST = "a digest of the data says what is in it"
_SEQUENCE = "it says what is in a sequence, whoever computes it"
_IDS = "it says how text becomes token ids, before a sequence is cut"
_HYBRID = "hybrid context parallelism is not covered"
_CACHE = "a new run has no index of its data yet"
_PADDING = "Megatron pads the vocabulary to a multiple of tp, and model.vocab_size decides it"

# Of GPTDatasetConfig and of GPTSFTDatasetConfig.
DATASET = section(
    row(ANY, "~blend ~blend_per_split data_path ~dataset_root", _DIGEST),
    row(ANY, "split preprocessing dataset_kwargs max_train_samples mid_level_dataset_surplus tokenizer random_seed "
        "seed sequence_length seq_length", _SEQUENCE),
    row(BOOL, "eod_mask_loss ~create_attention_mask add_extra_token_to_sequence "
        "drop_last_partial_validation_sequence allow_ambiguous_pad_tokens do_validation do_test", _SEQUENCE),
    row(ANY, "dataloader_type reset_attention_mask enable_offline_packing offline_packing_specs hf_dataset "
        "hf_validation_dataset hf_test_dataset hf_output_root hf_validation_proportion hf_rewrite", _OTHER_RULE),
    row(ANY, "path_to_cache", PLACE),
    row(NUMBER, "num_workers memmap_workers", BYTES),
    row(NUMBER, "num_dataset_builder_threads", BYTES, COUNT),
    row(BOOL, "pin_memory persistent_workers mmap_bin_files", BYTES),
    row(ON, "drop_last", "a step of fewer examples has other data shards"),
    row(ON, "data_sharding", "which sequences a rank computes depends on dp"),
    row(OFF, "reset_position_ids", "rotary positions go through a whole sequence"),
    row(OFF, "inter_document_masking", "packed sequences are not covered"),
    row(only(None, False), "multiple_validation_sets full_validation", "one set of sequences is validated"),
    row(OFF, "hybrid_context_parallel", _HYBRID),
    row(only(1), "data_parallel_size", _HYBRID, COUNT),
    row(only(0), "sequence_parallel_size", _HYBRID),
    row(NULL, "context_parallel_size", _HYBRID, COUNT),
    row(OFF, "fast_cache_load defer_npy_index_mmap", _CACHE, adjust_to=False),
    row(NULL, "sequences_per_dataset per_dataset_sequences_path object_storage_cache_path", _CACHE),
    row(NULL, "dataloader_save dataloader_load trust_remote_code", "no data that tpi reads needs it"),
    row(NONE, "offline_packing_specs.packed_sequence_size offline_packing_specs.max_single_sequence_length "
        "offline_packing_specs.pad_seq_to_mult", UNKNOWN, COUNT),
    row(NONE, "offline_packing_specs.num_tokenizer_workers", UNKNOWN, SIGNED),
)  # fmt: skip

TOKENIZER = section(
    row(ANY, "vocab_size", _IDS, COUNT),
    row(ANY, "tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens tiktoken_pattern "
        "tiktoken_num_special_tokens tokenizer_sentencepiece_legacy "
        "tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast "
        "tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id chat_template "
        "chat_template_path hf_tokenizer_kwargs sp_tokenizer_kwargs", _IDS),
    row(ANY, "null_tokenizer_pad_id", _IDS, SIGNED),
    row(BOOL, "pad_vocab_size", READS),
    row(OFF, "use_tokenizer_vocab_size", _PADDING),
    row(NULL, "padded_vocab_size", _PADDING, COUNT),
    row(only(1), "make_vocab_size_divisible_by tensor_model_parallel_size", _PADDING, COUNT),
    row(only(0), "rank", _PADDING),
    row(only(0), "vocab_extra_ids", _UNREAD),
    row(NULL, "tokenizer_prompt_format image_tag_type", "images are not covered"),
    row(OFF, "force_system_message", "images are not covered"),
)  # fmt: skip


# Adapters (LoRA). check/finetuning.py and check/invariant/training.py have rules for most of these.

_OTHER_RULE = "another rule says which values, under any numerics"

PEFT = section(
    row(ANY, "target_modules exclude_modules canonical_mapping alpha dropout_position "
        "sequence_parallel_input_regather lora_A_init_method lora_B_init_method a2a_experimental lora_dtype",
        _OTHER_RULE),
    row(ANY, "dim", _OTHER_RULE, COUNT),
    row(ANY, "dropout", _OTHER_RULE, SHARE),
    row(ANY, "share_expert_adapters", "each kind is covered (numerics/megatron/adapters/expert_lora.py)"),
    row(OFF, "normalize_moe_lora", "experts with fewer features than the other layers are not covered"),
    row(OFF, "experts_shared_outer_loras", "adapters with one matrix for all experts and one for each are not covered"),
)  # fmt: skip

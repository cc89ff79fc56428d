"""What composing refuses: one table of families, each with the words that a message must have.

A family is a run, the settings that are refused in it, and neighbours of these that compose without a problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from tp_invariant_recipes.check.invariant import training as training_rules
from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.config.adjusted import complete
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse
from tp_invariant_recipes.errors import OR_STOCK, ConfigError
from tp_invariant_recipes.fields.model import EXPERTS_HOW, EXPERTS_OFF, LATENT_OFF, LAYERS_OFF, MULTI_TOKEN_OFF
from tp_invariant_recipes.settings.run_config import RunConfig

ANYWHERE = "…"


@dataclass(frozen=True)
class Family:
    """One run and what it must not be asked.

    run:      the model and overrides, as typed.
    refused:  settings, separated by spaces -> how the only problem begins, after `begins`; or, after ANYWHERE, what it
              contains.
    taken:    overrides that this run may have.
    taken_fields: single fields of its tree that may be replaced.
    typed:    whether refused settings are overrides that Hydra composes. If not, they replace single fields of the
              tree of `run`, which takes a tenth of the time, and no other field follows them.
    beside:   refused settings -> how the problems begin that they have under any numerics, beside the one of the row.
    or_stock: whether the message offers numerics=stock, which meets no other problem.
    """

    run: str
    refused: dict[str, str]
    begins: str = ""
    taken: Sequence[str] = ()
    taken_fields: Sequence[str] = ()
    typed: bool = False
    beside: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    or_stock: bool = False


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


def fits(problem: str, says: str, begins: str = "") -> bool:
    """Whether a problem has the words of a row."""
    if says.startswith(ANYWHERE):
        return problem.startswith(begins) and says.removeprefix(ANYWHERE) in problem
    return problem.startswith(begins + says)


def each(names: Sequence[str], value: str, says: str, **others: str) -> dict[str, str]:
    """A row for each of several fields, `says` with the field's path in it. others: values of fields of other types."""
    return {f"{path}={others.get(path.rpartition('.')[2], value)}": says.format(path) for path in names}


def own_words(says: str, settings: str) -> dict[str, str]:
    """A row for each of several settings that a message begins with, followed by `says`."""
    return {word: f"{word}: {says}" for word in settings.split()}


def paths_in(section: str, names: Sequence[str]) -> list[str]:
    return [f"{section}.{name}" for name in names]


TREE = "numerics=tree: "
PORTABLE = "numerics=portable: "
PRECISION_AWARE = "optimizer.use_precision_aware_optimizer"
OTHER_MODES = ("gather", "portable")

NUMBERS = Family(
    "qwen3_toy numerics=stock",
    {
        **own_words(
            "must be at least 1",
            "tokenizer.vocab_size=-1 seq=0 model.num_layers=0 model.num_query_groups=0 logger.log_interval=0 "
            "train.exit_interval=0 dist.distributed_timeout_minutes=0 slurm.tries=0",
        ),
        **own_words(
            "must be at least 0",
            "optimizer.clip_grad=-1 save=-1 optimizer.weight_decay=-0.1 scheduler.lr_warmup_iters=-1 "
            "validation.eval_iters=-1",
        ),
        **own_words("must be at least 0 and below 1", "model.attention_dropout=2 optimizer.adam_beta2=1.0"),
        **own_words("must be a finite number", "optimizer.clip_grad=nan lr=inf"),
        "lr=1e400": "lr=inf: must be a finite number",
        **own_words("must be above 0", "optimizer.adam_eps=0"),
        **own_words("must be a multiple of 8; the next that is: 8", "model.hidden_size=7"),
        **own_words("must be from 1 to 4278190080", "seed=0"),
        "rng.seed=-5": "seed=-5: must be from 1 to 4278190080",
    },
    taken=(
        "optimizer.clip_grad=0",
        "model.hidden_size=136",
        "seed=1",
        "lr=0.001",
        "model.attention_dropout=0.99",
        "save=0",
        "optimizer.adam_beta2=0.0",
        "optimizer.grad_norm_skip_threshold=inf",
        "checkpoint.most_recent_k=-1",
        "tokenizer.null_tokenizer_pad_id=-1",
    ),
)

ASYNC_SAVE = "checkpoint.async_save=true checkpoint.async_strategy=mcore"
CENTRED = "model.layernorm_zero_centered_gamma"
RELATIONS = Family(
    "qwen3_toy numerics=stock",
    {
        "model.num_attention_heads=3": "model.num_attention_heads=3 is not a multiple of model.num_query_gr",
        "checkpoint.load=nope": "checkpoint.load=nope: tpi train --resume RUN continues a run",
        "scheduler.lr_warmup_iters=50": "scheduler.lr_warmup_iters=50 is not below iters=50; scheduler.lr_",
        "mbs=8": "gbs=4 is not a multiple of mbs * dp = 8 * 1",
        "validation.eval_interval=5": "validation.eval_interval without validation.eval_iters",
        "tokenizer.vocab_size=513": "tokenizer.vocab_size=513 is more than model.vocab_size=512",
        "checkpoint.save=x": "checkpoint.save=x: checkpoints go to run.dir/checkpoints",
        "dataset.path_to_cache=x": "dataset.path_to_cache=x: the index of the data goes to run.dir",
        "checkpoint.async_save=true": "checkpoint.async_save=true: Megatron-Core's persistent writer is the one that "
        "sends the hashes of what it writes; checkpoint.async_strategy=mcore",
        f"{ASYNC_SAVE} checkpoint.use_persistent_ckpt_worker=false": "checkpoint.async_save=true: Megatron-Core's "
        "persistent writer is the one that sends the hashes of what it writes; "
        "checkpoint.use_persistent_ckpt_worker=true",
        "dataset.reset_attention_mask=true": "dataset.reset_attention_mask=true: Megatron-Bridge trains wit",
        f"{PRECISION_AWARE}=true": f"{PRECISION_AWARE}=true: it is Transformer Engine's Adam; ",
        "model.num_attention_heads=6 model.num_query_groups=6 model.kv_channels=null": "model.hidden_size=128 is not "
        "a multiple of model.num_attention_heads=6",
        "logger.tensorboard_dir=x logging.kind=tensorboard": "logger.tensorboard_dir=x",
        "logger.wandb_exp_name=x logging.kind=wandb": "logger.wandb_exp_name=x",
        f"device.kind=cpu model.normalization=LayerNorm {CENTRED}=true": f"{CENTRED}=true: torch's LayerNorm has none",
        **{
            f"optimizer.optimizer=sgd {section}.use_distributed_optimizer=true": "optimizer.optimizer=sgd: "
            "Megatron-Core's distributed optimizer has no SGD; optimizer.use_distributed_optimizer=false"
            for section in ("optimizer", "ddp")
        },
    },
    taken=(
        "model.num_attention_heads=16",
        "model.num_query_groups=4",
        "scheduler.lr_warmup_iters=49",
        "validation.eval_iters=1",
        "tokenizer.vocab_size=512",
        "model.num_attention_heads=6 model.num_query_groups=6 model.kv_channels=16",
        "logger.tensorboard_dir=x",
    ),
)

EACH = "model.num_layers=2 layers need a 0 or a 1 each"
_NETS = "model.experimental_attention_variant=gated_delta_net model.linear_attention_freq"
_WINDOW = "must be the tokens before and after, each at least 0, or -1 for all; model.window_size=[N,0]"
EACH_LAYER = Family(
    "qwen3_toy numerics=stock",
    {
        "model.no_rope_freq=[1]": f"model.no_rope_freq=[1]: {EACH}",
        "model.no_rope_freq=[2,0]": f"model.no_rope_freq=[2, 0]: {EACH}",
        "model.no_rope_freq=2 model.position_embedding_type=learned_absolute": "model.no_rope_freq: "
        "model.position_embedding_type=learned_absolute has no rotary positions; leave it unset",
        "model.no_rope_freq=2 model.multi_latent_attention=true": "model.no_rope_freq: multi-latent attention turns",
        "model.num_moe_experts=8 model.moe_layer_freq=[0,1,1]": f"model.moe_layer_freq=[0, 1, 1]: {EACH}",
        "model.num_moe_experts=8 model.moe_layer_freq=0": "model.moe_layer_freq=0: must be at least 1",
        **{f"model.window_size=[{ends}]": f"…: {_WINDOW}" for ends in ("16,-5", "16", "-2,0")},
        "model.window_size=[8,0] model.window_attn_skip_freq=0": "model.window_attn_skip_freq=0: must be at least 1",
        f"{_NETS}=[1]": f"model.linear_attention_freq=[1]: {EACH}",
        f"{_NETS}=[0,1] model.mtp_num_layers=1": "model.mtp_num_layers=1: multi-token prediction repeats the last",
        f"{_NETS}=4 model.mtp_num_layers=1": "model.mtp_num_layers=1: multi-token prediction repeats the last",
    },
    taken_fields=(
        "model.no_rope_freq=[0,1]",
        "model.no_rope_freq=0",
        "model.moe_layer_freq=[0,1,1]",  # it has no experts
        f"{_NETS}=[1,0] model.mtp_num_layers=1",
    ),
)

_POSITIONS = [f"model.position_embedding_type={kind}" for kind in ("none", "yarn", "learned_absolute")]
GEMMA3 = Family(
    "gemma3_toy numerics=stock",
    own_words("Gemma 3 has rotary positions of two bases; model.position_embedding_type=rope", " ".join(_POSITIONS)),
)

_BIASES = "model.add_bias_linear=true"
SHARED_EXPERTS, SHARED_EXPERTS_OF_MAMBA = (
    Family(
        f"{model} numerics=stock",
        own_words("Megatron-Core's shared experts have no biases; model.add_bias_linear=false", _BIASES),
    )
    for model in ("glm45_toy", "nemotron3_nano_toy")
)
GROUPED_EXPERTS = Family(
    "qwen3_moe_toy numerics=stock device=gpu cuda_graph=off",
    {
        f"{_BIASES} model.bias_dropout_fusion=true": f"{_BIASES}: Megatron-Core adds the bias of grouped experts by "
        "itself; model.bias_dropout_fusion=false"
    },
    taken_fields=(f"{_BIASES} model.bias_dropout_fusion=false",),
)

# What Megatron-Bridge would ignore, or fail by after the start.
IGNORED = Family(
    "qwen3_toy numerics=stock",
    {
        "train.rampup_batch_size=[1,1,4]": "train.rampup_batch_size=[1, 1, 4]: Megatron-Core ignores it; leave it out",
        "train.step_batch_size_schedule='0:1'": "train.step_batch_size_schedule=0:1: Megatron-Bridge ignores",
        "train.iterations_to_skip=[2]": "train.iterations_to_skip=[2]: the ledger has every step; leave it out",
        "train.skip_train=true": "train.skip_train=True: a run trains; leave it out",
        "validation.skip_train=true": "validation.skip_train=True: a run trains; leave it out",
        "train.train_samples=8": "train.train_samples=8: tpi counts steps; leave it unset, iters=N",
        "train.num_epochs=1.0": "train.num_epochs=1.0: tpi counts steps; leave it unset, iters=N",
        **{
            f"{path}=true": f"{path}=true: it reads a GPU; {path}=false, or device=gpu"
            for path in ("profiling.use_nsys_profiler", "profiling.record_memory_history", "logger.log_energy")
        },
    },
    taken_fields=("train.iterations_to_skip=[]", "validation.skip_train=false"),
)

BLEND = Family(
    "qwen3_toy numerics=stock data=text data.path=a.txt",
    {
        "dataset.blend=[[a],null]": "dataset.blend=",
        "validation.eval_iters=1": "validation.eval_iters=1: dataset.split=1,0,0 has no text for it",
        "validation.eval_iters=1 dataset.split='9,0,1'": "…dataset.split=9,0,1 has no text for it",
    },
    taken=("validation.eval_iters=1 dataset.split='9,1'",),
)

NUMBERS_OF_EXPERTS = Family(
    "qwen3_moe_toy numerics=stock",
    {
        "model.moe_router_topk=9": "model.moe_router_topk=9 is more than model.num_moe_experts=8",
        "model.num_moe_experts=0": "model.num_moe_experts=0: must be at least 1",
    },
    taken=("model.moe_router_topk=8",),
)

# Settings that would change nothing.
WITHOUT_EFFECT = Family(
    "qwen3_toy",
    {
        "logging=wandb project=y logger.wandb_project=x": "…beside logging.project=y; project=x sets both",
        "logging=mlflow logger.mlflow_experiment=x": "…logging.project=tp-invariant-recipes; project=x sets both",
        "tp=2 model.tensor_model_parallel_size=4": "…set the same field, model.tensor_model_parallel_size; leave one",
        "dp=2 gbs=2 parallel.data_parallel_size=1": "…set the same field, parallel.data_parallel_size; leave one out",
        "numerics=tree numerics.mode=stock": "…set the same field, numerics.mode; leave one out",
        "numerics=stock model.make_vocab_size_divisible_by=384": "…pads no vocabulary whose size is set; "
        "model.vocab_size=768",
        "numerics=stock model.vocab_size=500 tokenizer.vocab_size=500 model.should_pad_vocab=true": "…_size=512",
        "tp=2 numerics=stock model.vocab_size=501 tokenizer.vocab_size=501": "…or model.vocab_size=502",
        "pp=2 gbs=2 model.virtual_pipeline_model_parallel_size=1": "…one virtual stage a rank is not interleaved",
        "numerics=stock checkpoint.save_optim=false": "…a run could not be resumed; checkpoint.save_optim=true",
        "numerics=stock checkpoint.save_rng=false": "…a run could not be resumed; checkpoint.save_rng=true",
        "numerics=stock optimizer.optimizer_cpu_offload=true ledger.digests=0": "…the optimizer is on the CPU already",
        "numerics=stock optimizer.optimizer_cpu_offload=true device=gpu": "digests: an optimizer on the CPU keeps "
        "master weights and moments there",
        # Of services that nothing chooses.
        "project=ours": "project=ours: is for logging=wandb, mlflow, comet",
        "logging=tensorboard name=a": "name=a: is for logging=wandb, mlflow, comet",
        "logger.wandb_project=ours": "logger.wandb_project: without logging=wandb nothing reads it",
        "logging=mlflow logger.comet_project=a": "logger.comet_project: without logging=comet",
        "logging=comet logger.comet_experiment_name=a": "logger.comet_experiment_name=a: the run has the name",
    },
    taken=(
        "logging=wandb project=y",
        "logging=wandb logger.wandb_project=y project=y",
        "tp=2 model.tensor_model_parallel_size=2",
        "tp=2 tp=4",
        "numerics=stock model.make_vocab_size_divisible_by=128",
        "numerics=stock optimizer.optimizer_cpu_offload=true device=gpu ledger.digests=0",
    ),
    typed=True,
)

INVARIANCE = Family(
    "qwen3_toy numerics=tree",
    {
        "model.use_mamba_mem_eff_path=false": "Megatron's other path through a Mamba layer",
        "model.normalization=L2Norm": "of norms only RMSNorm and LayerNorm",
        "numerics.initial_weights=megatron": "Megatron draws other weights",
        "numerics.grad_norm=fp64": "an fp64 sum still depends on its order",
        "model.add_bias_linear=true model.bias_activation_fusion=true model.gated_linear_unit=false": "a bias fused "
        "into an ungated activation",
        "ddp.delay_wgrad_compute=true": "ddp.delay_wgrad_compute=true: norm weight gradients are complete only",
        "ddp.grad_reduce_in_fp32=false": "ddp.grad_reduce_in_fp32=false: gradients are accumulated in fp32",
        "optimizer.optimizer=adaptive_muon": "optimizer.optimizer=adaptive_muon: only Adam, SGD and Muon",
        "optimizer.muon_nesterov=true": "optimizer.muon_nesterov: only Muon reads it; leave it unset",
        "optimizer.muon_tp_mode=duplicated": "optimizer.muon_tp_mode: only Muon reads it",
        "optimizer.use_layer_wise_distributed_optimizer=true": "optimizer.use_layer_wise_distributed_optimizer: only "
        "Muon reads it",
        "dist.use_sharp=true": "dist.use_sharp=true: sums inside a switch",
        "model.gtp_weight_remat_size=2": "weights spread over more ranks",
        **each(
            paths_in("model", LAYERS_OFF),
            "true",
            "{} is not covered",
            symmetric_ar_type="two_shot",
        ),
        "model.experimental_attention_variant=dsa": "of attention's variants only gated delta nets",
        "model.attention_backend=flash": "model.attention_backend=flash: of attention only",
        "model.softmax_type=off-by-one": "model.softmax_type=off-by-one: of attention sinks",
        "mixed_precision=fp16_mixed": "mixed_precision=fp16_mixed: that precision has no",
        "model.tp_comm_overlap=true": "overlapped collectives",
        "model.delay_wgrad_compute=true": "delayed weight gradients",
        "model.cross_entropy_loss_fusion=true": "the fused cross entropy",
        "model.disable_bf16_reduced_precision_matmul=false": "cuBLAS may add parts of a product in bf16",
        "model.hidden_dropout=0.1": "dropout",
        "model.attention_dropout=0.1": "dropout",
        "model.cp_comm_type=p2p": "model.cp_comm_type=p2p: of context parallelism only",
        "dataset.dataloader_type=cyclic": "which sequences a rank computes depends on dp",
    },
    begins=TREE,
    taken=("tp=8", "tp=4 sp=false", "tp=2 pp=2 dp=2 gbs=4", "model.num_layers=3"),
    beside={
        "model.gtp_weight_remat_size=2": "digests: weights spread over more ranks",
    },
    or_stock=True,
)

_LAYER_NORM = "model.normalization=LayerNorm model.qk_layernorm=false"
_LEARNED = "model.position_embedding_type=learned_absolute"
_DEPTH = "model.mtp_num_layers=1 model.share_embeddings_and_output_weights=false"

GPT = Family(
    "qwen3_toy numerics=tree",
    {
        "model.normalization=LayerNorm": "of norms of queries and keys only RMSNorm is covered",
        f"{_LAYER_NORM} {_DEPTH}": "LayerNorm is covered for GPT models without multi-token prediction",
        f"{_LEARNED} {_DEPTH}": "learned positions are covered for GPT models of numerics=tree",
    },
    begins=TREE,
    taken_fields=(_LAYER_NORM, _LEARNED),
)

# Of every section one field that depends on the layout, that nothing reads, or that tpi was not shown with.
SECTIONS = Family(
    "qwen3_toy numerics=tree",
    {
        "tokenizer.use_tokenizer_vocab_size=true": "tokenizer.use_tokenizer_vocab_size=true: Megatron pads the "
        "vocabulary to a multiple of tp, and model.vocab_size decides it; tokenizer.use_tokenizer_vocab_size=false",
        "tokenizer.make_vocab_size_divisible_by=128": "tokenizer.make_vocab_size_divisible_by=128: Megatron pads",
        "model.should_pad_vocab=true": "Megatron pads the vocabulary to a multiple of tp; model.should_pad_vocab=false",
        "model.perform_initialization=false": "tpi draws the initial weights, whatever it says",
        "train.decrease_batch_size_if_needed=true": "train.decrease_batch_size_if_needed=true: a step has gbs",
        "train.gpu_sniff_test_interval=2": "train.gpu_sniff_test_interval=2: Megatron-Bridge does not read it; "
        "train.gpu_sniff_test_interval=null",
        "train.exit_signal=SIGINT": "…; train.exit_signal=SIGTERM",
        "scheduler.no_weight_decay_cond_type=qwen3_next": "scheduler.no_weight_decay_cond_type=qwen3_next: Megatron-Br",
        "dataset.data_sharding=false": "dataset.data_sharding=false: which sequences a rank computes depends on dp",
        "dataset.reset_position_ids=true": "dataset.reset_position_ids=true: rotary positions",
        "dataset.inter_document_masking=true": "dataset.inter_document_masking=true: packed sequences",
        "checkpoint.ckpt_format=torch": "checkpoint.ckpt_format=torch: a run could not be resumed",
        "checkpoint.dist_ckpt_strictness=ignore_all": "checkpoint.dist_ckpt_strictness=ignore_all: a run could",
        "validation.full_validation=true": "validation.full_validation=true: one set of sequences",
        "logger.log_device_memory_used=true": "logger.log_device_memory_used=true: Megatron-Bridge does not read it",
        "rng.data_parallel_random_init=true": "rng.data_parallel_random_init=true: every data-parallel rank",
        "rerun_state_machine.error_injection_rate=1": "rerun_state_machine.error_injection_rate=1: an injected error",
        "rerun_state_machine.rerun_mode=validate_results": "rerun_state_machine.rerun_mode=validate_results: a step",
        "straggler.enable_straggler_on_startup=false": "straggler.enable_straggler_on_startup=false: Megatron-Bridge",
        **{
            f"{name}=true": f"{name}=true: tpi starts and watches the ranks itself; {name}=false"
            for name in ("nvrx_straggler.enabled", "ft.enable_ft_package", "inprocess_restart.enabled")
        },
        "tensor_inspect.enabled=true": "tensor_inspect.enabled=true: what it inspects it may compute otherwise",
        "comm_overlap.tp_comm_overlap=true": "comm_overlap.tp_comm_overlap=true: overlapped collectives",
    },
    begins=TREE,
    or_stock=True,
    taken_fields=(
        "tokenizer.use_tokenizer_vocab_size=false",
        "model.perform_initialization=true",
        "train.exit_signal=SIGTERM",
        "train.empty_unused_memory_level=2 train.train_sync_interval=1",
        "checkpoint.async_save=true checkpoint.async_strategy=mcore checkpoint.dist_ckpt_strictness=log_all",
        "dataset.num_workers=2 dataset.pin_memory=false dataset.mmap_bin_files=false",
        "profiling.use_pytorch_profiler=true straggler.log_straggler=true logger.log_params_norm=true",
        "nvrx_straggler.enabled=false ft.enable_ft_package=false inprocess_restart.enabled=false",
        "comm_overlap.tp_comm_overlap=false",  # of many of Bridge's recipes
    ),
)

EXPERTS = Family(
    "qwen3_moe_toy numerics=tree",
    {
        "model.expert_tensor_parallel_size=2": "experts split over ranks",
        "model.expert_model_parallel_size=3": "each expert needs one rank that computes it",
        "model.num_moe_experts=12 model.expert_model_parallel_size=8": "each expert needs one rank",
        "model.moe_ffn_hidden_size=48": "on a CPU model.moe_ffn_hidden_size must be a multiple of 32",
        "model.num_moe_experts=1 model.seq_length=64": "on a CPU seq / numerics.virtual_shards / "
        "numerics.context_shards * model.num_moe_experts",
        "model.activation_func=torch.nn.functional.gelu": "…=torch.nn.functional.gelu: of the experts",
        "model.gated_linear_unit=false": "…of the experts' activations",
        "model.moe_router_load_balancing_type=sinkhorn": "…sinkhorn: that loss of the router has no",
        "model.moe_router_load_balancing_type=[aux_loss]": "…that loss of the router has no invariant version",
        "model.moe_router_dtype=fp64": "only model.moe_router_dtype=fp32 or null",
        "model.moe_token_dispatcher_type=flex": "the flex dispatcher",
        **each(paths_in("model", EXPERTS_HOW), "1", "{0} is not covered; {0}=false"),
        **each(
            paths_in("model", [name for name in EXPERTS_OFF if name not in EXPERTS_HOW]),
            "1",
            "{} is not covered; leave it unset",
            moe_input_jitter_eps="0.5",
        ),
    },
    begins=TREE,
    taken_fields=(
        " ".join(f"model.{name}=false" for name in EXPERTS_HOW),
        "model.moe_layer_freq=2",
        "model.moe_layer_freq=[0,1,1,1]",
        "model.moe_shared_expert_intermediate_size=128",
    ),
    beside={
        "model.expert_tensor_parallel_size=2": "etp * ep * pp = 2 does not divide the 1 ranks",
        "model.expert_model_parallel_size=3": "ep=3 does not divide model.num_moe_experts=8",
        "model.num_moe_experts=12 model.expert_model_parallel_size=8": "ep=8 does not divide model.num_moe_experts=12",
        "model.num_moe_experts=1 model.seq_length=64": "model.moe_router_topk=2 is more than model.num_moe_experts=1",
    },
    or_stock=True,
)

LATENT_EXPERTS = Family(
    "qwen3_moe_toy model.moe_latent_size=32",
    {"precision=fp8_tensorwise": "experts of latents have no invariant version in FP8; precision=bf16"},
    begins=TREE,
    typed=True,
)

_WHOLE_LAYERS = "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers"

AHEAD = Family(
    "qwen3_toy numerics=tree model.mtp_num_layers=1 model.share_embeddings_and_output_weights=false",
    {
        "numerics.context_shards=2": "multi-token prediction has no version with context shards",
        "model.pipeline_model_parallel_layout=Et*2|m|L pp=3 gbs=4": "the layers of multi-token prediction are on the",
        f"{_WHOLE_LAYERS}=2": "Megatron-Core recomputes the layers of multi-token prediction one by one",
        f"{_WHOLE_LAYERS}=1 model.recompute_method=block": "Megatron-Core recomputes the layers of multi-token",
        "model.mtp_use_repeated_layer=true": "one layer for all depths is covered for hybrid models alone",
        **each(paths_in("model", MULTI_TOKEN_OFF), "true", "{} is not covered"),
    },
    begins=TREE,
    taken=("tp=2 pp=2 gbs=4", "model.mtp_num_layers=2", f"{_WHOLE_LAYERS}=1"),
)

AHEAD_TYPED = Family(
    "qwen3_toy model.mtp_num_layers=1",
    {
        "numerics=gather": "numerics=gather: multi-token prediction is covered by numerics=tree only",
        "pp=2": "Megatron-Core cannot save a tied embedding beside multi-token prediction; pp=1, or",
    },
    taken=("pp=2 gbs=4 model.share_embeddings_and_output_weights=false",),
    typed=True,
)

_HYBRID_AHEAD = "model.mtp_num_layers=2 model.mtp_hybrid_override_pattern=*E"

HYBRID_AHEAD = Family(
    "nemotron3_nano_toy numerics=tree",
    {
        "model.mtp_num_layers=1": "multi-token prediction of a hybrid model has no layers",
        "model.mtp_num_layers=1 model.mtp_hybrid_override_pattern=*G": "of hybrid layers only M * - E have",
        "model.mtp_hybrid_override_pattern=*E": "model.mtp_hybrid_override_pattern adds layers",
        f"{_HYBRID_AHEAD} model.mtp_use_repeated_layer=true model.moe_z_loss_coeff=0.1": "one layer for all depths of "
        "multi-token prediction has no z-loss",
        f"{_HYBRID_AHEAD} {_WHOLE_LAYERS}=1": "multi-token prediction of a hybrid model was not shown to have the same",
    },
    begins=TREE,
    taken=(_HYBRID_AHEAD, f"{_HYBRID_AHEAD} model.mtp_use_repeated_layer=true tp=2"),
)

SINKS = Family(
    "gpt_oss_toy numerics=tree",
    {"model.attention_backend=fused": "…no deterministic fused attention with sinks; model.attention_backend=auto"},
    begins=TREE,
    taken=("tp=2", "model.num_layers=4"),
)

SINKS_TYPED = Family(
    "gpt_oss_toy model.position_embedding_type=rope",
    {"cp=2 numerics.context_shards=2": "attention sinks have no version with context shards"},
    begins=TREE,
    typed=True,
)

OWN_LAYERS = Family(
    "gemma3_toy",
    {
        "numerics.context_shards=2": f"{TREE}a family with layers of its own has no version with context shards; cp=1",
        "precision=fp8_tensorwise": f"{TREE}a family with layers of its own has no version in FP8; precision=bf16",
        "numerics=portable": f"{PORTABLE}families with own layers are covered by numerics=tree only; numerics=tree",
    },
    taken=("tp=2 sp=false",),
    beside={
        "numerics=portable": tuple(
            f"{PORTABLE}{words}" for words in ("windows of", "of activations only SwiGLU", "zero-centred norm weights")
        )
    },
    typed=True,
)

YARN = Family(
    "qwen3_toy model.position_embedding_type=yarn model.yarn_rotary_scaling_factor=32.0 "
    "model.yarn_original_max_position_embeddings=16 model.yarn_beta_fast=32.0 model.yarn_beta_slow=1.0 "
    "model.yarn_correction_range_round_to_int=false",
    {"numerics.context_shards=2": "YaRN has no version with context shards; cp=1"},
    begins=TREE,
    typed=True,
)

LATENT = Family(
    "deepseek_v3_toy numerics=tree",
    {
        "model.multi_latent_attention=false": "multi-latent attention is covered for MLAModelProvider with",
        "model.tensor_model_parallel_size=2 model.num_moe_experts=null numerics.expert_groups=null": "multi-latent "
        "attention under tensor",
        "model.num_query_groups=16": "multi-latent attention has keys and values for every head",
        "model.qk_layernorm=false": "multi-latent attention is covered with its norms",
        "model.add_qkv_bias=true": "multi-latent attention with biases",
        "model.apply_rope_fusion=true": "the fused rotation of multi-latent attention",
        "model.recompute_granularity=selective": "recomputation of multi-latent attention was not shown",
        "model.moe_shared_expert_overlap=true": "model.moe_shared_expert_overlap is not covered",
        "model.attention_output_gate=true": "multi-latent attention has no gate",
        **each(paths_in("model", LATENT_OFF), "true", "{} is not covered"),
    },
    begins=TREE,
    beside={
        "model.num_query_groups=16": "model.num_attention_heads=8 is not a multiple of model.num_query_groups=16",
    },
    or_stock=True,
)

DELTA_NET = Family(
    "qwen3_next_toy numerics=tree model.mtp_num_layers=null",
    {
        "model.linear_conv_kernel_dim=3": "the convolution takes four tokens; model.linear_conv_kernel_dim=4",
        "model.linear_attention_freq=null": "how often attention comes among gated delta nets is not said",
        "model.recompute_granularity=selective model.recompute_modules=[gdn_norm_out]": "gated delta nets keep what",
        "model.transformer_layer_spec=megatron.bridge.models.gpt_provider.local_layer_spec": "gated delta nets have "
        "layers of tpi's; model.transformer_layer_spec=null",
    },
    begins=TREE,
    taken=("tp=2 ep=2", "tp=2 pp=2 gbs=4 mbs=2"),
    or_stock=True,
)

DELTA_NET_TYPED = Family(
    "qwen3_next_toy model.mtp_num_layers=null",
    {
        "tp=2 sp=false model.num_moe_experts=null": f"{TREE}gated delta nets under tensor parallelism need sequence",
        "numerics.context_shards=2": f"{TREE}gated delta nets and gates have no version with context shards",
        "cuda_graph=te device=gpu": f"{TREE}global_aux_loss counts sequences where a captured layer cannot",
        _LAYER_NORM: f"{TREE}LayerNorm is covered for GPT models without multi-token prediction or layers of their own",
        f"{_LEARNED} model.qk_layernorm=false": f"{TREE}learned positions are covered for GPT models",
        "precision=fp8_blockwise device=gpu": "the width of gated delta nets' alpha (model.linear_num_value_heads) is",
        "seq=8 model.kv_channels=10 model.num_moe_experts=32 numerics.virtual_shards=8": "model.attention_output_gate="
        "true: on a CPU seq * model.num_attention_heads * model.kv_channels",
    },
    taken=("precision=fp8_tensorwise device=gpu",),
    typed=True,
)

LATENT_SHARDS = Family(
    "deepseek_v3_toy",
    {"numerics.context_shards=2": "multi-latent attention has no version with context shards"},
    begins=TREE,
    taken=("numerics.context_shards=1",),
    typed=True,
)

LORA = Family(
    "qwen3_toy numerics=tree peft=lora checkpoint.pretrained_checkpoint=base",
    {
        "peft.normalize_moe_lora=true": "peft.normalize_moe_lora",
        "peft.experts_shared_outer_loras=true": "peft.experts_shared_outer_loras",
        "peft.target_modules=[router]": "of layers only linear_qkv, linear_fc1, linear_q_proj",
        "peft.target_modules=['*.layers.0.*.linear_qkv']": "of layers only linear_qkv",
        "peft.target_modules=[]": "of layers only linear_qkv",
        "peft.dropout=0.1": "dropout of adapters draws other numbers in every layout; peft.dropout=0",
        "model.cuda_graph_impl=full_iteration": "adapters have not been captured in CUDA graphs; cuda_graph=off",
        "model.pipeline_model_parallel_layout=Et*2L": "a stage without layers has no adapter",
        **each(
            paths_in("peft", training_rules.OFF),
            "[x]",
            "{} is not covered; leave it unset",
            a2a_experimental="true",
            sequence_parallel_input_regather="true",
        ),
    },
    begins=TREE,
    beside={"model.cuda_graph_impl=full_iteration": "cuda_graph=full: CUDA graphs need a GPU"},
    or_stock=True,
)

LORA_SETTINGS = Family(
    "qwen3_toy peft=lora checkpoint.pretrained_checkpoint=base",
    {
        "peft.dim=6 tp=4": "tp=4 does not divide peft.dim=6, whose rows the ranks share; peft.dim=8",
        "peft.dim=0": "peft.dim=0: must be at least 1",
        "peft.dropout=2": "peft.dropout=2: must be from 0 to 1",
        "peft.dimension=8": "peft.dimension: no such field of LoRA",
        "peft.lora_A_init_method=uniform": "…adapters begin with xavier, normal, kaiming, zero only",
        "peft=dora": "…unknown peft 'dora'",
        "checkpoint.pretrained_checkpoint=null": "…LoRA adapts weights that are there: weights=FOLDER "
        "of Hugging Face, or",
    },
    taken=("peft.dim=8 tp=4", "peft.dim=16 tp=2"),
    typed=True,
)

LORA_TARGETS = Family(
    "qwen3_toy tp=4 numerics=stock peft=lora checkpoint.pretrained_checkpoint=base",
    {
        "peft.target_modules=[linear_qvk]": "peft.target_modules: no layer is named linear_qvk; "
        "did you mean 'linear_qkv'",
        "peft.dim=6": "tp=4 does not divide peft.dim=6",
    },
    taken=("peft.dropout=0.0",),
    taken_fields=("peft.target_modules=[linear_qkv]", "peft.dim=6 peft.target_modules=[linear_proj]"),
)

LORA_OF_EXPERTS = Family(
    "qwen3_moe_toy tp=4 numerics=stock peft=lora checkpoint.pretrained_checkpoint=base",
    {
        "peft.dim=6 peft.target_modules=[linear_fc2]": "tp=4 does not divide peft.dim=6, whose rows the ranks share; "
        "peft.dim=8"
    },
)

_DOWN = "peft.target_modules=[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj,linear_proj]"
LORA_OF_LATENTS = Family(
    "deepseek_v3_toy tp=4 numerics=stock model.moe_router_bias_update_rate=0 peft=lora "
    "checkpoint.pretrained_checkpoint=base",
    {
        f"{_DOWN} model.qk_pos_emb_head_dim=30": "tp=4 does not divide the 542 rows of an adapter of "
        "linear_kv_down_proj; leave it out of peft.target_modules"
    },
    taken_fields=(_DOWN,),
)

LORA_IN_OTHER_MODES = Family(
    "qwen3_toy peft=lora checkpoint.pretrained_checkpoint=base numerics=tree",
    {
        "numerics=gather": "…numerics=gather: LoRA is covered by numerics=tree only",
        "numerics=portable": "…numerics=portable: LoRA is covered by numerics=tree only",
        "numerics.context_shards=2": "…LoRA has no version with context shards; cp=1",
    },
    taken=("numerics=stock",),
    typed=True,
)

GRAPHS = Family(
    "qwen3_toy device=gpu",
    {
        "cuda_graph=full numerics=gather": "…its layers have not been captured; cuda_graph=off",
        "cuda_graph=te numerics=gather": "…its layers have not been captured; cuda_graph=off",
        "cuda_graph=te numerics=portable": "…captured with the whole step only; cuda_graph=full, or off",
        "cuda_graph=te cp=2": "…a captured layer gets a mask",
        "cuda_graph=te numerics.context_shards=2": "…a captured layer gets a mask",
        "cuda_graph=full pp=2": "…stages wait for each other where a captured step cannot; pp=1",
        "cuda_graph=full cluster.environment.TPI_CHECK_PRODUCTS=1": "…TPI_CHECK_PRODUCTS=1 compares products",
    },
    begins="numerics=",
    taken=(
        "cuda_graph=full tp=2 dp=2 gbs=4",
        "cuda_graph=full cp=2",
        "cuda_graph=te pp=2",
        "cuda_graph=full numerics=portable",
    ),
    typed=True,
)

GRAPHS_OF_EXPERTS = Family(
    "qwen3_moe_toy device=gpu cuda_graph=full",
    {
        "numerics=portable": f"{PORTABLE}experts have not been captured",
        "pp=2": f"{TREE}stages wait for each other",
        "guard=products": f"{TREE}guard=products samples no product of experts",
        "precision=fp8_tensorwise": f"{TREE}experts in FP8 or with biases wait",
        "model.add_bias_linear=true": f"{TREE}experts in FP8 or with biases wait",
        "numerics=stock": "cuda_graph=full: experts get another number of tokens at every step; "
        "model.moe_expert_capacity_factor=1.0",
    },
    taken=("dp=2 ep=2 gbs=2", "cp=2 seq=256", "cuda_graph=te tp=2 ep=2"),
    typed=True,
)

UNGROUPED_EXPERTS = Family(
    "qwen3_moe_toy numerics=stock peft=lora checkpoint.pretrained_checkpoint=base",
    {
        "peft.share_expert_adapters=true": "peft.share_expert_adapters=true: experts that are not grouped have an "
        "adapter each",
        "numerics.initial_weights=invariant": "numerics.initial_weights=invariant draws adapters of linear_qkv",
    },
    taken_fields=("peft.share_expert_adapters=false",),
)

SHARDS_OF_TWO = "; the largest that fits is numerics.virtual_shards=1"
MAMBA = Family(
    "nemotron3_nano_toy numerics=tree numerics.virtual_shards=2",
    {
        **{
            f"model.hybrid_layer_pattern='{pattern}'": "…numerics=tree: of hybrid layers only M, *, - and E have "
            "invariant versions"
            for pattern in ("MG", "MD", "M*/M*")
        },
        **{
            f"model.{field}=9": f"numerics.virtual_shards=2 does not divide model.{field}=9{SHARDS_OF_TWO}"
            for field in ("mamba_num_groups", "mamba_num_heads")
        },
    },
    beside={f"model.{field}=9": "model.mamba_num_heads=" for field in ("mamba_num_groups", "mamba_num_heads")},
    or_stock=True,
    taken_fields=("model.hybrid_layer_pattern='M*-EM'", "model.mamba_num_groups=8"),
)

VIRTUAL_SHARDS = Family(
    "qwen3_toy numerics=tree",
    {
        **{
            f"numerics.virtual_shards={count}": f"numerics.virtual_shards={count}: must be a power of two"
            for count in (0, -2, 3, 6, 12)
        },
        "model.ffn_hidden_size=192": "model.ffn_hidden_size=192: on a CPU it must be a multiple of 256; "
        "numerics.virtual_shards=2 fits",
        "model.ffn_hidden_size=40": "model.ffn_hidden_size=40: on a CPU it must be a multiple of 256",
    },
    taken_fields=(
        "model.ffn_hidden_size=192 device.kind=gpu",
        "model.ffn_hidden_size=192 numerics.virtual_shards=2",
    ),
    or_stock=True,
)

SHARDS_OF_SHARED_EXPERTS = Family(
    "qwen3_moe_toy numerics=tree",
    {
        "model.moe_shared_expert_intermediate_size=64": "model.moe_shared_expert_intermediate_size=64: on a CPU it "
        "must be a multiple of 128; numerics.virtual_shards=2 fits"
    },
)

DATA_SHARDS = Family(
    "qwen3_toy gbs=8",
    {
        "dp=3 gbs=6": "dp=3: the tree over data-parallel ranks needs a power of two; the largest that "
        "fits gbs=6 is dp=2",
        "numerics.data_shards=3": "numerics.data_shards=3: must be a power of two",
        "numerics.data_shards=0": "numerics.data_shards=0: must be a power of two",
        "dp=4 numerics.data_shards=2": "dp=4 does not divide numerics.data_shards=2",
        "gbs=24 numerics.data_shards=16": "…does not divide gbs=24; the largest that fits is numerics.data_shards=8",
        "numerics.data_shards=4 validation.eval_iters=1 validation.eval_global_batch_size=2": "numerics.data_shards=4 "
        "does not divide validation.eval_global_batch_size=2; the largest that fits is numerics.data_shards=2",
        "numerics=stock numerics.data_shards=4": "…numerics=stock has no data shards; leave it out",
        "ddp.overlap_param_gather=true": "…only a distributed optimizer gathers weights",
    },
    taken=(
        "dp=2",
        "dp=4 numerics.data_shards=4",
        "gbs=24 numerics.data_shards=8",
        "ddp.overlap_param_gather=true optimizer.use_distributed_optimizer=true",
    ),
    typed=True,
)

CONTEXT_SHARDS = Family(
    "qwen3_toy",
    {
        "numerics.context_shards=3": "numerics.context_shards=3: must be a power of two",
        "numerics.context_shards=0": "numerics.context_shards=0: must be a power of two",
        "cp=3 seq=96": "numerics.context_shards=3: must be a power of two",
        "cp=4 numerics.context_shards=2": "cp=4 does not divide numerics.context_shards=2",
        "tp=4 cp=4": "tp=4 * cp=4 does not divide numerics.virtual_shards=8, whose heads the ranks share; the "
        "largest that fits is cp=2",
        "seq=64 numerics.context_shards=16 numerics.virtual_shards=8": "…do not divide seq=64; the largest that "
        "fits is numerics.context_shards=8",
        "numerics.context_shards=null": "numerics.context_shards must be a number",
        "cp=2 numerics=gather": "…context parallelism is covered by numerics=tree and numerics=portable only; cp=1",
        "numerics.context_shards=2 numerics=portable": "…cp has no portable version; cp=1, and leave",
        "numerics.context_shards=2 numerics=stock": "…numerics=stock has no context shards; leave it out",
    },
    taken=(
        "tp=4 cp=2",
        "seq=64 numerics.context_shards=8",
        "cp=2 numerics.context_shards=4",
    ),
    typed=True,
)

EXCHANGES = Family(
    "qwen3_toy cp=2",
    {
        f"model.cp_comm_type={kind}": "…; model.cp_comm_type=a2a"
        for kind in ("p2p", "all_gather", "'a2a+p2p'", "[a2a,p2p]")
    },
    taken_fields=("model.cp_comm_type=a2a",),
)

_MUON = "optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated"
_LAYER_WISE = "optimizer.use_layer_wise_distributed_optimizer=true"

MUON = Family(
    f"qwen3_toy {_MUON}",
    {
        "optimizer.muon_tp_mode=blockwise": "…Muon would orthogonalise the part of a matrix that a rank has; "
        "optimizer.muon_tp_mode=duplicated",
        "optimizer.muon_tp_mode=distributed": "…optimizer.muon_tp_mode=distributed: Muon's matrices are whole in every "
        "layout; optimizer.muon_tp_mode=blockwise or duplicated",
        "optimizer.muon_scalar_optimizer=lion": "…optimizer.muon_scalar_optimizer=adam",
        "optimizer.use_distributed_optimizer=true": "optimizer.optimizer=muon: a distributed optimizer's ranks have "
        "parts of gradients, and it needs whole ones; optimizer.use_distributed_optimizer=false",
        f"{_LAYER_WISE} precision=fp32": "…Megatron-Core's layer-wise optimizer is for bf16; precision=bf16",
        "peft=lora checkpoint.pretrained_checkpoint=base": "…adapters have not been trained with Muon",
        "guard=products": "…of optimizers only Adam is computed again",
        "numerics=portable": "…of optimizers only Adam has a portable version; optimizer.optimizer=adam",
    },
    beside={
        "optimizer.muon_tp_mode=distributed": "numerics=tree: Muon would orthogonalise",
    },
    taken=(
        "tp=2 dp=2 gbs=2",
        f"{_LAYER_WISE} dp=2 gbs=2",
        "numerics=gather",
        "numerics=stock optimizer.muon_tp_mode=blockwise",
        "optimizer.muon_nesterov=true optimizer.muon_momentum=0.9 optimizer.muon_num_ns_steps=8",
        "optimizer.muon_coefficient_type=polar_express optimizer.muon_fp32_matmul_prec=highest",
    ),
    typed=True,
)

MUON_OF_EXPERTS = Family(
    f"qwen3_moe_toy gbs=2 {_MUON} {_LAYER_WISE}",
    {"tp=2": "…Megatron-Core saves each copy of an expert as the only one"},
    taken=("tp=2 ep=2", "tp=2 dp=2"),
    typed=True,
)

PORTABLE_RUN = Family(
    "qwen3_toy numerics=portable",
    {
        "model.transformer_impl=transformer_engine": "…model.transformer_impl=local",
        "precision=fp32": "…stated for bf16 and FP8 only; precision=bf16",
        "cp=2": "…cp has no portable version; cp=1",
        "model.hidden_dropout=0.1": "…dropout draws other numbers in every layout",
        "model.add_bias_linear=true": "…biases of projections have no portable version",
        "model.softmax_type=learnable": "…attention sinks have no portable version",
        "model.activation_func_clamp_value=7.0": "…activations with model.activation_func_clamp_value",
        "model.glu_linear_offset=1.0": "…activations with model.glu_linear_offset",
        "model.rotary_interleaved=true": "…of positions only rotary ones in halves",
        "optimizer.optimizer=sgd": "…of optimizers only Adam has a portable version",
        "optimizer.use_precision_aware_optimizer=true": "…Adam's moments are fp32",
        "numerics.grad_norm=fp64": "…numerics.grad_norm=exact",
        "scheduler.lr_decay_style=inverse-square-root": "…scheduler.lr_decay_style one of constant, linear, cosine",
    },
    begins=PORTABLE,
    beside={
        f"{PRECISION_AWARE}=true": f"{PRECISION_AWARE}=true: it is Transformer Engine's Adam",
    },
    taken=("tp=1", "tp=4 sp=false", "tp=2 pp=2 dp=2 gbs=4"),
    typed=True,
)

PORTABLE_FIELDS = Family(
    "qwen3_toy numerics=portable",
    {
        "model.activation_func=torch.nn.functional.gelu": "of activations only SwiGLU has a portable version",
        "model.gated_linear_unit=false": "of activations only SwiGLU has a portable version",
        "model.attention_backend=unfused": "it has an attention of its own; model.attention_backend=auto",
        _LAYER_NORM: "LayerNorm is covered by numerics=tree only; model.normalization=RMSNorm",
    },
    begins=PORTABLE,
)
OF_TREE = ("optimizer.optimizer=sgd", "precision=fp32", "optimizer.use_distributed_optimizer=true")
OF_TREES_EXPERTS = ("model.moe_router_dtype=fp32", "model.moe_expert_capacity_factor=1.0")

PORTABLE_EXPERTS = Family(
    "qwen3_moe_toy numerics=portable",
    {
        "model.moe_router_score_function=sigmoid": "of routers only softmax has a portable version",
        "model.moe_router_load_balancing_type=seq_aux_loss": "…of balancing losses only aux_loss has a portable "
        "version",
        **{
            f"model.moe_layer_freq={which}": "dense layers beside layers of experts have no portable version"
            for which in ("2", "[0,1,1,1]")
        },
        **{
            f"model.{field}": f"…experts with model.{field.partition('=')[0]} have no portable version"
            for field in (
                "moe_shared_expert_intermediate_size=64",
                "moe_expert_capacity_factor=1.0",
                "moe_router_enable_expert_bias=true",
                "moe_router_group_topk=2",
                "moe_router_num_groups=2",
                "moe_router_pre_softmax=true",
                "moe_router_topk_scaling_factor=2.5",
                "moe_router_dtype=fp32",
                "moe_z_loss_coeff=0.1",
                "moe_latent_size=32",
            )
        },
    },
    begins=PORTABLE,
    beside={"model.moe_shared_expert_intermediate_size=64": "model.moe_shared_expert_intermediate_size=64: on a CPU"},
    taken=("tp=1", "tp=2", "tp=2 ep=2", "pp=2"),
    taken_fields=("model.moe_layer_freq=[1,1,1,1]", "model.moe_layer_freq=1"),
)

BY_128 = "numerics.virtual_shards=2 cuts sums between multiples of 128"
IN_FP8 = Family(
    "qwen3_toy numerics=tree precision=fp8_tensorwise",
    {
        "mixed_precision=fp16_with_mxfp8_mixed": f"{TREE}of FP8 only the recipes",
        "precision=mxfp8 numerics.virtual_shards=8": "numerics.virtual_shards=8 cuts sums between multiples of 32: in "
        "MXFP8 32 numbers of a sum share a scale",
        "precision=mxfp8 model.hidden_size=80": "model.hidden_size is 80: in MXFP8 32 "
        "numbers of a sum share a scale; the next is 96",
        "precision=mxfp8 seq=48": "seq=48: weight gradients in FP8 add 32 tokens at a time; the next is seq=64",
        "precision=mxfp8 mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=true": f"{TREE}gradients' memory holds",
        "precision=mxfp8 numerics=gather": "numerics=gather: FP8 is covered by numerics=tree and numerics=portable",
        "mixed_precision=bf16_with_nvfp4_mixed": f"{TREE}FP4 products have no definition here",
        "mixed_precision=bf16_with_fp8_delayed_scaling_mixed": f"{TREE}delayed scaling takes scales from what a rank",
        "mixed_precision.fp8_recipe=delayed": f"{TREE}delayed scaling takes scales from what a rank",
        "mixed_precision.fp8_recipe=custom": f"{TREE}of FP8 only the recipes bf16_with_fp8_current_scaling_mixed",
        "mixed_precision=fp16_with_fp8_subchannel_scaling_mixed": f"{TREE}of FP8 only the recipes",
        "precision=bf16 model.fp8=hybrid": f"{TREE}the precision decides what is in FP8; model.fp8=null",
        "mixed_precision.fp8_param_gather=true": "…mixed_precision.fp8_param_gather=false",
        "mixed_precision.fp8_dot_product_attention=true": "…mixed_precision.fp8_dot_product_attention=false",
        "mixed_precision.fp8_multi_head_attention=true": "…mixed_precision.fp8_multi_head_attention=false",
        "mixed_precision.fp8_wgrad=false": "…mixed_precision.fp8_wgrad=true",
        "mixed_precision.bf16=false": "…mixed_precision.bf16=true",
        "numerics=gather": "numerics=gather: FP8 is covered by numerics=tree and numerics=portable only",
        "numerics=stock": "FP8 and FP4 products need Transformer Engine on a GPU; precision=bf16, or device=gpu",
        "precision=fp8_blockwise numerics.virtual_shards=2": f"{BY_128}: FP8 products add 128 numbers at a time (the",
        "precision=fp8_blockwise numerics.virtual_shards=2 model.kv_channels=32 model.ffn_hidden_size=384": BY_128,
        "precision=fp8_blockwise model.hidden_size=192": "model.hidden_size is 192: FP8 products add 128 numbers at a "
        "time; the next is 256",
        "model.hidden_size=200 device=gpu": "model.hidden_size is 200: FP8 matrices have sides in steps of 16; the "
        "next is 208",
        "seq=64": "seq=64: weight gradients in FP8 add 128 tokens at a time; the next is seq=128",
        "numerics.context_shards=2": "seq=128: weight gradients in FP8 add 128 tokens at a time in each of 2 context",
    },
    taken=(
        "numerics=portable",
        "precision=fp8_blockwise",
        "mixed_precision.fp8=e4m3",
        "mixed_precision=bf16_with_fp8_current_scaling_mixed",
        "mixed_precision=bf16-with-fp8-current-scaling-mixed",
        "mixed_precision=bf16_with_fp8_subchannel_scaling_mixed",
        "mixed_precision=nemotron_h_bf16_with_fp8_current_scaling_mixed",
        "model.hidden_size=192",
        "numerics.virtual_shards=2 tp=2",
        "seq=256 numerics.context_shards=2",
    ),
    typed=True,
)

RECORDING = Family(
    "qwen3_toy numerics=stock",
    {
        "ledger.digests=-1": "ledger.digests=-1: must be 0 (never) or a number of steps",
        "ledger.state_digests=-1": "ledger.state_digests=-1: must be at least 0",
        "ledger.trace=99:101": "…the run ends at step 50; raise iters or trace less",
        "ledger.trace='50:51'": "…the run ends at step 50; raise iters or trace less",
        "ledger.dump=[weights/x]": "…at which steps? set ledger.trace=FIRST:LAST",
        "ledger.dump=[weights/x,loss,forward/x] ledger.trace='1:1'": "…ledger.dump: loss, forward/x:",
        "ledger.dump=[weight/*,loss*,w?ights/x,forward*] ledger.trace='1:1'": "…ledger.dump: weight/*, loss*:",
        "ddp.use_megatron_fsdp=true": "…ddp.use_megatron_fsdp=false; or record none: ledger.digests=0",
        "model.gtp_weight_remat_size=2": "…model.gtp_weight_remat_size=1",
        **{
            f"ledger.trace='{text}'": "…FIRST:LAST"
            for text in ("", "3:", ":3", "0:3", "3:2", "a:b", "1:2:3", "-1:2", "1.0:2")
        },
    },
    taken=(
        "ledger.digests=0 ddp.use_megatron_fsdp=true",
        "ledger.trace='49:50'",
        *(
            f"ledger.dump=[{name}] ledger.trace='1:1'"
            for name in (
                "forward/decoder.layers.0.mlp/output",
                "backward/model/input.1",
                "gradients/a.b",
                "weights/a.b",
                "*",
                "?orward/*/input",
                "masters/*.linear_fc?.weight",
            )
        ),
    ),
)

GUARD = Family(
    "qwen3_toy gbs=4 dp=2 guard=shadow",
    {
        "dp=1": "guard=shadow: dp=1 has no other replica to repeat a data shard; guard=products, or dp=2",
        "ledger.trace='1:1'": "guard=shadow: a trace would see a data shard twice; leave ledger.trace out",
        "ddp.overlap_grad_reduce=true": "guard=shadow: gradients are on their way before a rank's only data shard",
        "numerics=stock": "guard=shadow: one wrong bit proves a fault only where all bits are promised; a guard is "
        "covered by numerics=tree and numerics=portable only; guard=off",
        "numerics=gather": "guard=shadow: one wrong bit proves",
        "guard=off guard.every=5": "guard.every=5: guard=off computes nothing again; guard=products",
        "guard=off guard.exclude=true": "guard.exclude=True: guard=off computes nothing again",
        "guard.every=0": "guard.every=0: must be at least 1",
        "guard.products=0": "guard.products=0: must be at least 1",
        "optimizer.optimizer=sgd numerics=tree": "…of optimizers only Adam is computed again",
    },
    taken=(
        "guard=products dp=1",
        "guard=products ledger.trace='1:1'",
        "guard=off",
        "ddp.overlap_grad_reduce=true numerics.data_shards=4",
        "guard.exclude=true",
        "numerics=portable",
    ),
    typed=True,
)

GUARDED_EXPERTS = Family(
    "qwen3_moe_toy gbs=4 guard=shadow dp=2",
    {"ep=2": "guard=shadow: the experts are spread over all replicas, so that no other rank holds the same; raise dp"},
    taken=("tp=2 ep=2", "dp=4 ep=2"),
    typed=True,
)

_OF_SIXTEEN = "numerics.virtual_shards=16 model.num_attention_heads=16 model.num_query_groups=16"
_ALWAYS = "device.peer_memory=always: "
PEER_MEMORY = Family(
    "qwen3_toy device=gpu tp=2 device.peer_memory=always",
    {
        "device.peer_memory=yes": "device.peer_memory=yes: ",
        "device=cpu": f"{_ALWAYS}on a CPU Gloo moves all bytes; device.peer_memory=auto",
        "numerics=stock": f"{_ALWAYS}numerics=stock leaves sums to NCCL; device.peer_memory=auto",
        "tp=1": f"{_ALWAYS}tp=1 sums over one rank; device.peer_memory=auto",
        f"tp=16 {_OF_SIXTEEN}": f"{_ALWAYS}tp=16 is not one of 2, 4, 8",
        "tp=4 launcher=slurm cluster.gpus_per_node=2 slurm.time=5": f"{_ALWAYS}tp=4 is more than the 2 ranks of a node",
    },
    taken=(
        "tp=4",
        "numerics=portable",
        "numerics=gather",
        "tp=1 device.peer_memory=auto",
        "numerics=stock device.peer_memory=never",
        "device=cpu device.peer_memory=auto",
        "tp=4 launcher=slurm cluster.gpus_per_node=4 slurm.time=5",
    ),
    typed=True,
)

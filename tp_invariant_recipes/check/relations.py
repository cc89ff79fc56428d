"""Settings that must fit each other in any layout; and those that tpi decides itself."""

import re
from collections.abc import Callable, Collection
from typing import Any

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text

# Services that keep the curves of many runs.
EXPERIMENTS = ("wandb", "mlflow", "comet")
# The field of each that logging.project is.
_PROJECTS = {"wandb": "wandb_project", "mlflow": "mlflow_experiment", "comet": "comet_project"}
# What Bridge takes for a wish to log there, whatever `logging=` says.
_LOGGER_FIELDS = (
    *("wandb_project", "mlflow_experiment", "mlflow_run_name", "mlflow_tracking_uri", "mlflow_tags"),
    *("mlflow_description", "comet_project", "comet_experiment_name", "comet_workspace", "comet_tags"),
)

# Kernels of GPUs read rows of 16 bytes, 8 numbers in bf16.
WIDTH = 8

_TRAINS = "a run trains", "leave it out, validation.eval_iters=N validates at its end"
_STEPS = "tpi counts steps", "leave it unset, iters=N"
# What every run would replace or ignore without a word, or fail by, and what to do instead.
REPLACED = {
    "checkpoint.save": ("checkpoints go to run.dir/checkpoints", "set run.dir=PATH"),
    "checkpoint.load": (
        "tpi train --resume RUN continues a run",
        "checkpoint.pretrained_checkpoint=FOLDER takes the weights alone",
    ),
    "dataset.path_to_cache": ("the index of the data goes to run.dir", "set run.dir=PATH"),
    "train.rampup_batch_size": ("Megatron-Core ignores it", "leave it out, every step has gbs sequences"),
    "train.step_batch_size_schedule": ("Megatron-Bridge ignores it", "leave it out, every step has gbs sequences"),
    "train.iterations_to_skip": ("the ledger has every step", "leave it out"),
    "train.skip_train": _TRAINS,
    "validation.skip_train": _TRAINS,
    "train.train_samples": _STEPS,
    "train.num_epochs": _STEPS,
}
_NAMED = "the run has the name of run.dir", "set name=NAME"
# The same, of some runs. Path -> of which, and what to do instead.
REPLACED_IN: dict[str, tuple[Callable[[RunConfig], bool], tuple[str, str]]] = {
    "dataset.blend": (lambda t: t.data.kind == "text", ("data=text reads data.path", "leave it out")),
    "logger.tensorboard_dir": (lambda t: t.logging.kind != "none", ("curves go to run.dir", "leave it out")),
    "logger.wandb_save_dir": (lambda t: t.logging.kind == "wandb", ("logging=wandb writes to run.dir", "leave it out")),
    "logger.wandb_exp_name": (lambda t: t.logging.kind == "wandb", _NAMED),
    "logger.mlflow_run_name": (lambda t: t.logging.kind == "mlflow", _NAMED),
    "logger.comet_experiment_name": (lambda t: t.logging.kind == "comet", _NAMED),
}


def _replaced(config: RunConfig) -> list[Problem]:
    replaced = REPLACED | {path: instead for path, (applies, instead) in REPLACED_IN.items() if applies(config)}
    given = {path: _at(config, path) for path in replaced}
    return [
        Problem(f"{path}={value}", *replaced[path]) for path, value in given.items() if value not in (None, False, [])
    ]


def _loggers(config: RunConfig) -> list[Problem]:
    """Return settings of services that `logging=` has not chosen, and secrets, whose values are not shown."""
    of_service = {name for name in _LOGGER_FIELDS if _at(config, f"logger.{name}") not in (None, [], {})}
    problems = []
    for service in EXPERIMENTS:
        if config.logging.kind != service:
            idle = sorted(name for name in of_service if name.startswith(f"{service}_"))
            problems += [
                Problem(f"logger.{name}", f"without logging={service} nothing reads it", "leave it out")
                for name in idle
            ]
    field, project = f"logger.{_PROJECTS.get(config.logging.kind)}", config.logging.project
    if config.logging.kind in EXPERIMENTS and _at(config, field) != project:
        problems.append(
            Problem(
                "",
                f"{field}={_at(config, field)} beside logging.project={project}",
                f"project={_at(config, field)} sets both",
            )
        )
    if config.logging.kind not in EXPERIMENTS:
        services = ", ".join(EXPERIMENTS)
        named = {"project": config.logging.project, "name": config.logging.name}
        problems += [
            Problem(f"{key}={value}", f"is for logging={services}") for key, value in named.items() if value is not None
        ]
    if _at(config, "logger.comet_api_key"):
        problems.append(
            Problem(
                "logger.comet_api_key",
                "a secret, and what is configured is written down",
                "set COMET_API_KEY where you start the run, and cluster.forward=[COMET_API_KEY] for a job",
            )
        )
    return problems


def _at(config: RunConfig, path: str) -> Any:
    section, _, name = path.partition(".")
    return config.section(section).get(name)


def _sizes(config: RunConfig) -> Problem | None:
    missing = [name for name in ("hidden_size", "num_attention_heads", "vocab_size") if not config.model.get(name)]
    missing += [] if config.shape.layers or config.shape.pattern else ["num_layers"]
    key = ", ".join(f"model.{name}" for name in missing)
    return Problem(key, "a model has a number of these") if missing else None


def _divides(whole: str, by: str, unless: str | None = None) -> Callable[[RunConfig], Problem | None]:
    """Return the rule that one number of the model is a multiple of another one, where it has both."""

    def rule(config: RunConfig) -> Problem | None:
        total, part = config.model.get(whole), config.model.get(by)
        if total is None or part is None or total % part == 0 or (unless and config.model.get(unless)):
            return None
        hint = f", or set model.{unless}" if unless else ""
        return Problem("", f"model.{whole}={total} is not a multiple of model.{by}={part}", f"change one of them{hint}")

    return rule


# Which layers have what: a 0 or a 1 for each layer, or every how many. Field of the model -> what reads it.
PER_LAYER: dict[str, Callable[[RunConfig], Any]] = {
    "linear_attention_freq": lambda t: families.delta_sizes(t.model),
    "moe_layer_freq": lambda t: t.shape.experts,
    "no_rope_freq": lambda t: t.model["no_rope_freq"] != 0,  # 0: of no layer
    "window_attn_skip_freq": lambda t: t.model.get("window_size"),
}


def _per_layer(name: str) -> Callable[[RunConfig], Problem | None]:
    """Return the rule that a field of PER_LAYER says something of each layer."""

    def rule(config: RunConfig) -> Problem | None:
        layers, value = config.shape.layers, config.model.get(name)
        if not layers or value is None or not PER_LAYER[name](config):
            return None
        if isinstance(value, list | tuple):
            valid = len(value) == layers and {*value} <= {0, 1}
            need = f"model.num_layers={layers} layers need a 0 or a 1 each"
        else:
            valid, need = value != 0, "must be at least 1"
        return None if valid else Problem(f"model.{name}={value_text(value)}", need)

    return rule


def _ahead_of_delta_nets(config: RunConfig) -> Problem | None:
    every, layers, ahead = config.model.get("linear_attention_freq"), config.shape.layers, config.shape.depths
    if not (ahead and every and layers and families.delta_sizes(config.model)):
        return None
    if (not every[-1]) if isinstance(every, list) else layers % every == 0:
        return None
    return Problem(
        f"model.mtp_num_layers={ahead}",
        "multi-token prediction repeats the last layer, and no gated delta net",
        "a model.linear_attention_freq whose last layer is attention, or model.mtp_num_layers=null",
    )


def _without_rotary(config: RunConfig) -> Problem | None:
    """`no_rope_freq` where there is nothing to leave out, or where Megatron-Core leaves nothing out."""
    model, key = config.model, "model.no_rope_freq"
    positions = model.get("position_embedding_type", "rope")
    if not model.get("no_rope_freq"):
        return None
    if config.shape.latent:
        return Problem(key, "multi-latent attention turns queries and keys in every layer", "leave it unset")
    if positions not in ("rope", "yarn"):
        return Problem(key, f"model.position_embedding_type={positions} has no rotary positions", "leave it unset")
    return None


def _experts_projections_bias(config: RunConfig) -> Problem | None:
    """Megatron-Core asserts both when a rank builds the layer."""
    model, shape, key = config.model, config.shape, "model.add_bias_linear=true"
    if not (shape.experts and shape.biased):
        return None
    if shape.shared_width:
        return Problem(key, "Megatron-Core's shared experts have no biases", "model.add_bias_linear=false")
    if model.get("moe_grouped_gemm") and model.get("bias_dropout_fusion"):
        return Problem(
            key, "Megatron-Core adds the bias of grouped experts by itself", "model.bias_dropout_fusion=false"
        )
    return None


def _window(config: RunConfig) -> Problem | None:
    sides = config.model.get("window_size")
    if not isinstance(sides, list | tuple) or (len(sides) == 2 and min(sides) >= -1):
        return None
    key = f"model.window_size={value_text(sides)}"
    return Problem(
        key, "must be the tokens before and after, each at least 0, or -1 for all", "model.window_size=[N,0]"
    )


def _own_positions(config: RunConfig) -> Problem | None:
    """Gemma 3's attention reads the positions of two bases, which its model makes beside rotary ones alone."""
    positions = config.model.get("position_embedding_type", "rope")
    if positions == "rope" or families.family_of(config.model) != families.TWO_BASES:
        return None
    return Problem(
        f"model.position_embedding_type={positions}",
        f"{families.TWO_BASES} has rotary positions of two bases",
        "model.position_embedding_type=rope",
    )


def _at_most(low: str, high: str, section: str = "model") -> Callable[[RunConfig], Problem | None]:
    """Return the rule that one number is at most another, where there are both. Short paths are in `section`."""
    first, second = (path if "." in path else f"{section}.{path}" for path in (low, high))

    def rule(config: RunConfig) -> Problem | None:
        small, large = _at(config, first), _at(config, second)
        if small is None or large is None or small <= large:
            return None
        return Problem("", f"{first}={small} is more than {second}={large}", "change one of them")

    return rule


def _aligned(config: RunConfig) -> Problem | None:
    hidden = config.shape.hidden
    if hidden is None or hidden % WIDTH == 0:
        return None
    return Problem(
        f"model.hidden_size={hidden}",
        f"must be a multiple of {WIDTH}",
        f"the next that is: {-(-hidden // WIDTH) * WIDTH}",
    )


def _warmup(config: RunConfig) -> Problem | None:
    warmup = config.section("scheduler").get("lr_warmup_iters") or 0
    decay = config.section("scheduler").get("lr_decay_iters")
    name, end = ("iters", config.train["train_iters"]) if decay is None else ("scheduler.lr_decay_iters", decay)
    if not warmup or warmup < end:
        return None
    return Problem(
        "",
        f"scheduler.lr_warmup_iters={warmup} is not below {name}={end}",
        "scheduler.lr_warmup_iters=0, or more steps",
    )


def shares_of_text(config: RunConfig) -> list[float]:
    """Get the shares of training, validation and tests, as Megatron reads dataset.split; it takes missing ones as 0."""
    parts = [float(part) for part in re.findall(r"\d*\.?\d+", config.section("dataset").get("split") or "")]
    return [part / (sum(parts) or 1) for part in parts]


def _validation(config: RunConfig) -> Problem | None:
    iters, split = config.section("validation").get("eval_iters"), config.section("dataset").get("split")
    if config.section("validation").get("eval_interval") and not iters:
        return Problem(
            "", "validation.eval_interval without validation.eval_iters validates nothing", "set both, or neither"
        )
    if iters and config.data.kind == "text" and not any(shares_of_text(config)[1:2]):
        return Problem(
            f"validation.eval_iters={iters}", f"dataset.split={split} has no text for it", "\"dataset.split='90,5,5'\""
        )
    return None


def _tokens(config: RunConfig) -> Problem | None:
    size, vocab = config.section("tokenizer")["vocab_size"], config.shape.vocabulary
    if config.data.kind == "text" and size != vocab:
        return Problem(f"tokenizer.vocab_size={size}", "the tokenizer of data=text decides it", "leave it out")
    return None


def unpadded(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return what is wrong with padding a vocabulary whose size is set. typed: the paths that the command line sets."""
    size, multiple = config.shape.vocabulary, config.model.get("make_vocab_size_divisible_by") or 128
    padded = -(-size // multiple) * multiple
    keys = ("model.make_vocab_size_divisible_by", "model.should_pad_vocab")
    why = f"Megatron-Bridge pads no vocabulary whose size is set; model.vocab_size={padded}"
    return [
        Problem(f"{key}={as_text(_at(config, key))}", why)
        for key in keys
        if key in typed and _at(config, key) and size != padded
    ]


def _mask(config: RunConfig) -> Problem | None:
    if not _at(config, "dataset.reset_attention_mask"):
        return None
    why = "Megatron-Bridge trains without the data's mask, so documents would still see each other"
    return Problem("dataset.reset_attention_mask=true", why, "leave it out")


def _param_gather(config: RunConfig) -> Problem | None:
    requested = [
        f"{section}.overlap_param_gather=true"
        for section in ("ddp", "optimizer")
        if config.section(section).get("overlap_param_gather")
    ]
    if not requested or config.section("optimizer").get("use_distributed_optimizer"):
        return None
    need = "optimizer.use_distributed_optimizer=true"
    return Problem(", ".join(requested), "only a distributed optimizer gathers weights", need)


def _precision_aware(config: RunConfig) -> Problem | None:
    optimizer = config.section("optimizer")
    if not optimizer.get("use_precision_aware_optimizer"):
        return None
    key = "optimizer.use_precision_aware_optimizer"
    if config.device.kind == "cpu":
        return Problem(f"{key}=true", "it is Transformer Engine's Adam", f"{key}=false, or device=gpu")
    if optimizer.get("use_distributed_optimizer"):
        return None
    return Problem(
        f"{key}=true", "it is a distributed optimizer", f"{key}=false, or optimizer.use_distributed_optimizer=true"
    )


def _centred(config: RunConfig) -> Problem | None:
    key = "model.layernorm_zero_centered_gamma"
    if config.device.kind != "cpu" or config.numerics.invariant or config.model.get("normalization") == "RMSNorm":
        return None
    return (
        Problem(f"{key}=true", "torch's LayerNorm has none", f"{key}=false, or device=gpu")
        if _at(config, key)
        else None
    )


def _undistributed(config: RunConfig) -> Problem | None:
    """Of Megatron-Core's optimizers those of whole matrices read whole gradients, whatever DDP has reduced."""
    optimizer = config.section("optimizer")
    name = optimizer.get("optimizer", "adam")
    distributed = optimizer.get("use_distributed_optimizer") or config.section("ddp").get("use_distributed_optimizer")
    if name == "sgd" and distributed:
        why = "Megatron-Core's distributed optimizer has no SGD"
        return Problem("optimizer.optimizer=sgd", why, "optimizer.use_distributed_optimizer=false")
    if name in ("adam", "sgd"):
        return None
    layer_wise = optimizer.get("use_layer_wise_distributed_optimizer") or name.startswith("dist_")
    if distributed:
        spread = "" if layer_wise else "; optimizer.use_layer_wise_distributed_optimizer=true spreads its state over dp"
        why = "a distributed optimizer's ranks have parts of gradients, and it needs whole ones"
        return Problem(f"optimizer.optimizer={name}", why, f"optimizer.use_distributed_optimizer=false{spread}")
    if layer_wise and not optimizer.get("bf16") and not config.mixed_precision:
        why = "Megatron-Core's layer-wise optimizer is for bf16"
        return Problem("optimizer.use_layer_wise_distributed_optimizer=true", why, "precision=bf16, or set it to false")
    return None


def _experts_bias(config: RunConfig) -> Problem | None:
    if not peft.loses_bias(config):
        return None
    key = "model.moe_router_bias_update_rate"
    return Problem(key, "checkpoints of adapters lack the experts' bias, so it must stay", f"{key}=0")


def _of_gpus(path: str, why: str = "it reads a GPU") -> Callable[[RunConfig], Problem | None]:
    """Return the rule that a field is for GPUs."""

    def rule(config: RunConfig) -> Problem | None:
        wrong = config.device.kind == "cpu" and _at(config, path)
        return Problem(f"{path}=true", why, f"{path}=false, or device=gpu") if wrong else None

    return rule


def _resumable(name: str) -> Callable[[RunConfig], Problem | None]:
    """Return the rule that a checkpoint has what --resume reads."""
    key = f"checkpoint.{name}"
    problem = Problem(f"{key}=false", "a run could not be resumed", f"{key}=true")  # fields/ says it of invariant runs
    return lambda config: None if config.numerics.invariant or _at(config, key) is not False else problem


def _tied_ahead(config: RunConfig) -> Problem | None:
    """SIGTERM saves a checkpoint of every run, and digests have its names."""
    model = config.model
    if not (config.shape.depths and config.shape.tied):
        return None
    if model["pipeline_model_parallel_size"] == 1:
        return None
    return Problem(
        "",
        "Megatron-Core cannot save a tied embedding beside multi-token prediction",
        "pp=1, or model.share_embeddings_and_output_weights=false",
    )


def _async_save(config: RunConfig) -> Problem | None:
    saves = config.section("checkpoint")
    if not saves.get("async_save"):
        return None
    wrong = [] if saves.get("async_strategy") == "mcore" else ["checkpoint.async_strategy=mcore"]
    wrong += ["checkpoint.use_persistent_ckpt_worker=true"] if saves.get("use_persistent_ckpt_worker") is False else []
    why = "Megatron-Core's persistent writer is the one that sends the hashes of what it writes"
    return Problem("checkpoint.async_save=true", why, " ".join(wrong)) if wrong else None


TESTS: tuple[Callable[[RunConfig], Problem | list[Problem] | None], ...] = (
    _replaced,
    _loggers,
    _sizes,
    _aligned,
    _divides("hidden_size", "num_attention_heads", unless="kv_channels"),
    _divides("num_attention_heads", "num_query_groups"),
    _divides("num_moe_experts", "moe_router_num_groups"),
    _divides("mamba_num_heads", "mamba_num_groups"),
    *map(_per_layer, PER_LAYER),
    _ahead_of_delta_nets,
    _without_rotary,
    _window,
    _own_positions,
    _experts_projections_bias,
    _at_most("moe_router_topk", "num_moe_experts"),
    _at_most("moe_router_group_topk", "moe_router_num_groups"),
    _at_most("tokenizer.vocab_size", "model.vocab_size"),
    _at_most("scheduler.start_weight_decay", "scheduler.end_weight_decay"),
    _at_most("profile_step_start", "profile_step_end", section="profiling"),
    _warmup,
    _validation,
    _tokens,
    _mask,
    _param_gather,
    _precision_aware,
    _undistributed,
    _async_save,
    _centred,
    _experts_bias,
    _resumable("save_optim"),
    _resumable("save_rng"),
    _tied_ahead,
    _of_gpus("optimizer.optimizer_cpu_offload", "the optimizer is on the CPU already"),
    _of_gpus("profiling.use_nsys_profiler"),
    _of_gpus("profiling.record_memory_history"),
    _of_gpus("logger.log_energy"),
)
RULES = tuple(Rule(test) for test in TESTS)

# SPDX-License-Identifier: Apache-2.0
"""Settings that must fit each other in any layout; and those that tpi decides itself."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tp_invariant_recipes.check.rule import Rule, becomes, value_of
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import finetuning, low_precision
from tp_invariant_recipes.settings.field_table import SERVICES
from tp_invariant_recipes.settings.low_precision import MULTIPLE
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text

# Kernels of GPUs read rows of 16 bytes, 8 numbers in bf16.
WIDTH = 8


def _replaced(path: str, why: str, solve: str, needs: Callable[[RunConfig], Any] = lambda t: True) -> Rule[RunConfig]:
    """Return the rule that nobody sets what a run would replace or ignore without a word, or fail by."""

    def replaced(config: RunConfig) -> bool:
        return config.at(path) not in (None, False, [])

    return Rule(replaced, why, solve, needs=needs, head=value_of(path))


def _logs_to(*kinds: str) -> Callable[[RunConfig], bool]:
    return lambda t: t.logging.kind in kinds


REPLACED = (
    _replaced("checkpoint.save", "checkpoints go to run.dir/checkpoints", "set run.dir=PATH"),
    _replaced("checkpoint.load", "tpi train --resume RUN continues a run",
        "checkpoint.pretrained_checkpoint=FOLDER takes the weights alone"),
    _replaced("dataset.path_to_cache", "the index of the data goes to run.dir", "set run.dir=PATH"),
    _replaced("train.rampup_batch_size", "Megatron-Core ignores it", "leave it out, every step has gbs sequences"),
    _replaced("train.step_batch_size_schedule", "Megatron-Bridge ignores it",
        "leave it out, every step has gbs sequences"),
    _replaced("train.iterations_to_skip", "the ledger has every step", "leave it out"),
    *(_replaced(f"{section}.skip_train", "a run trains", "leave it out, validation.eval_iters=N validates at its end")
      for section in ("train", "validation")),
    *(_replaced(f"train.{name}", "tpi counts steps", "leave it unset, iters=N")
      for name in ("train_samples", "num_epochs")),
    _replaced("dataset.blend", "data=text reads data.path", "leave it out", lambda t: t.data.kind == "text"),
    _replaced("logger.tensorboard_dir", "metrics go to run.dir", "leave it out", lambda t: t.logging.kind != "none"),
    _replaced("logger.wandb_save_dir", "logging=wandb writes to run.dir", "leave it out", _logs_to("wandb")),
    *(_replaced(f"logger.{service.run_name}", "the run has the name of run.dir", "set name=NAME", _logs_to(kind))
      for kind, service in SERVICES.items()),
)  # fmt: skip


def _loggers(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of services that `logging=` has not chosen, and secrets, whose values are not shown."""
    kind, project = config.logging.kind, config.logging.project
    for other, service in SERVICES.items():
        for name in service.signs:
            if kind != other and config.at(f"logger.{name}") not in (None, [], {}):
                yield Problem(f"logger.{name}", f"without logging={other} nothing reads it", "leave it out")
    if kind in SERVICES:
        field = f"logger.{SERVICES[kind].project}"
        if (given := config.at(field)) != project:
            yield Problem("", f"{field}={given} beside logging.project={project}", f"project={given} sets both")
    else:
        named = {"project": project, "name": config.logging.name}
        for key, value in named.items():
            if value is not None:
                yield Problem(f"{key}={value}", f"is for logging={', '.join(SERVICES)}")


def _sizes(config: RunConfig) -> Problem | None:
    missing = [name for name in ("hidden_size", "num_attention_heads", "vocab_size") if not config.model.get(name)]
    missing += [] if config.shape.layers or config.shape.pattern else ["num_layers"]
    key = ", ".join(f"model.{name}" for name in missing)
    return Problem(key, "a model has a number of these") if missing else None


def _aligned(config: RunConfig) -> Problem | None:
    hidden = config.shape.hidden
    if hidden is None or hidden % WIDTH == 0:
        return None
    nearest = f"the next that is: {-(-hidden // WIDTH) * WIDTH}"
    return Problem(f"model.hidden_size={hidden}", f"must be a multiple of {WIDTH}", nearest)


def _divides(whole: str, by: str, unless: str | None = None) -> Rule[RunConfig]:
    """Return the rule that one number of the model is a multiple of another one, where it has both."""
    hint = f", or set model.{unless}" if unless else ""

    def multiple(config: RunConfig) -> Problem | None:
        total, part = config.model.get(whole), config.model.get(by)
        if total is None or part is None or total % part == 0 or (unless and config.model.get(unless)):
            return None
        return Problem("", f"model.{whole}={total} is not a multiple of model.{by}={part}", f"change one of them{hint}")

    return Rule(multiple)


# Which layers have what: a 0 or a 1 for each layer, or every how many. Field of the model -> what reads it.
PER_LAYER: dict[str, Callable[[RunConfig], Any]] = {
    "linear_attention_freq": lambda t: families.delta_sizes(t.model),
    "moe_layer_freq": lambda t: t.shape.experts,
    "no_rope_freq": lambda t: t.model["no_rope_freq"] != 0,  # 0: of no layer
    "window_attn_skip_freq": lambda t: t.model.get("window_size"),
}


def _per_layer(name: str) -> Rule[RunConfig]:
    """Return the rule that a field of PER_LAYER says something of each layer."""

    def per_layer(config: RunConfig) -> Problem | None:
        layers, value = config.shape.layers, config.model.get(name)
        if not layers or value is None or not PER_LAYER[name](config):
            return None
        if isinstance(value, list | tuple):
            valid = len(value) == layers and {*value} <= {0, 1}
            need = f"model.num_layers={layers} layers need a 0 or a 1 each"
        else:
            valid, need = value != 0, "must be at least 1"
        return None if valid else Problem(f"model.{name}={value_text(value)}", need)

    return Rule(per_layer)


def _repeats_a_delta_net(config: RunConfig) -> bool:
    """Whether MTP stands behind a gated delta net."""
    every, layers = config.model.get("linear_attention_freq"), config.shape.layers
    if not (config.shape.depths and every and layers and families.delta_sizes(config.model)):
        return False
    return bool(every[-1] if isinstance(every, list) else layers % every)


def _without_rotary(config: RunConfig) -> Problem | None:
    """`no_rope_freq` where there is nothing to leave out, or where Megatron-Core leaves nothing out."""
    positions = config.model.get("position_embedding_type", "rope")
    if config.shape.latent:
        return Problem("", "multi-latent attention turns queries and keys in every layer", "leave it unset")
    if positions not in ("rope", "yarn"):
        return Problem("", f"model.position_embedding_type={positions} has no rotary positions", "leave it unset")
    return None


def _at_most(low: str, high: str) -> Rule[RunConfig]:
    """Return the rule that one number is at most another, where there are both."""

    def at_most(config: RunConfig) -> Problem | None:
        small, large = config.at(low), config.at(high)
        if small is None or large is None or small <= large:
            return None
        return Problem("", f"{low}={small} is more than {high}={large}", "change one of them")

    return Rule(at_most)


def _warmup(config: RunConfig) -> Problem | None:
    warmup, decay = config.at("scheduler.lr_warmup_iters") or 0, config.at("scheduler.lr_decay_iters")
    name, end = ("iters", config.train["train_iters"]) if decay is None else ("scheduler.lr_decay_iters", decay)
    if not warmup or warmup < end:
        return None
    text = f"scheduler.lr_warmup_iters={warmup} is not below {name}={end}"
    return Problem("", text, "scheduler.lr_warmup_iters=0, or more steps")


def shares_of_text(config: RunConfig) -> list[float]:
    """Get the shares of training, validation and tests, as Megatron reads dataset.split; it takes missing ones as 0."""
    parts = [float(part) for part in re.findall(r"\d*\.?\d+", config.at("dataset.split") or "")]
    return [part / (sum(parts) or 1) for part in parts]


def empty_part(config: RunConfig, data: str, documents: int) -> Problem | None:
    """Return what is wrong with dataset.split: Megatron would look for the tokens of a part without documents for ever.

    data: its name. documents: of it; Megatron rounds their shares.
    """
    shares = shares_of_text(config)
    ends = [round(end * documents) for end in itertools.accumulate(shares, initial=0.0)]
    if not any(share and ends[n] == ends[n + 1] for n, share in enumerate(shares)):
        return None
    text = f"has a part without a document: {data} has {documents} in all"
    return Problem(f"dataset.split={config.at('dataset.split')}", text, "set other shares, or add documents")


def _validation(config: RunConfig) -> Problem | None:
    iters, split = config.at("validation.eval_iters"), config.at("dataset.split")
    if config.at("validation.eval_interval") and not iters:
        text = "validation.eval_interval without validation.eval_iters validates nothing"
        return Problem("", text, "set both, or neither")
    if iters and config.data.kind == "text" and not any(shares_of_text(config)[1:2]):
        text = f"dataset.split={split} has no text for it"
        return Problem(f"validation.eval_iters={iters}", text, "\"dataset.split='90,5,5'\"")
    return None


def unpadded(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return what is wrong with padding a vocabulary whose size is set. typed: the paths that the command line sets."""
    size, multiple = config.shape.vocabulary, config.model.get("make_vocab_size_divisible_by") or 128
    padded = -(-size // multiple) * multiple
    keys = ("model.make_vocab_size_divisible_by", "model.should_pad_vocab")
    why = f"Megatron-Bridge pads no vocabulary whose size is set; model.vocab_size={padded}"
    return [Problem(value_of(key)(config), why) for key in keys if key in typed and config.at(key) and size != padded]


_GATHERS = ("ddp.overlap_param_gather", "optimizer.overlap_param_gather")


def _gathers_whole_weights(config: RunConfig) -> Problem | None:
    keys = [key for key in _GATHERS if config.at(key)]
    if not keys or config.at("optimizer.use_distributed_optimizer"):
        return None
    need = "optimizer.use_distributed_optimizer=true"
    return Problem(", ".join(f"{key}=true" for key in keys), "only a distributed optimizer gathers weights", need)


def _undistributed(config: RunConfig) -> Problem | None:
    """Of Megatron-Core's optimizers those of whole matrices read whole gradients, whatever DDP has reduced."""
    name = config.section("optimizer").get("optimizer", "adam")
    distributed = config.at("optimizer.use_distributed_optimizer") or config.at("ddp.use_distributed_optimizer")
    if name == "sgd" and distributed:
        why = "Megatron-Core's distributed optimizer has no SGD"
        return Problem("optimizer.optimizer=sgd", why, "optimizer.use_distributed_optimizer=false")
    if name in ("adam", "sgd"):
        return None
    layer_wise = config.at("optimizer.use_layer_wise_distributed_optimizer") or name.startswith("dist_")
    if distributed:
        spread = "" if layer_wise else "; optimizer.use_layer_wise_distributed_optimizer=true spreads its state over dp"
        why = "a distributed optimizer's ranks have parts of gradients, and it needs whole ones"
        return Problem(f"optimizer.optimizer={name}", why, f"optimizer.use_distributed_optimizer=false{spread}")
    if layer_wise and not config.at("optimizer.bf16") and not config.mixed_precision:
        why = "Megatron-Core's layer-wise optimizer is for bf16"
        return Problem("optimizer.use_layer_wise_distributed_optimizer=true", why, "precision=bf16, or set it to false")
    return None


def _async_save(config: RunConfig) -> Problem | None:
    wrong = [] if config.at("checkpoint.async_strategy") == "mcore" else ["checkpoint.async_strategy=mcore"]
    if config.at("checkpoint.use_persistent_ckpt_worker") is False:
        wrong.append("checkpoint.use_persistent_ckpt_worker=true")
    why = "Megatron-Core's persistent writer is the one that sends the hashes of what it writes"
    return Problem("", why, " ".join(wrong)) if wrong else None


def _on_cpu(path: str, why: str, **more: Any) -> Rule[RunConfig]:
    """Return the rule that a field is for GPUs."""
    solve = f"{path}=false, or device=gpu"
    return Rule(lambda t: t.device.kind == "cpu" and t.at(path), why, solve, head=value_of(path), **more)


def _resumable(path: str) -> Rule[RunConfig]:
    """Return the rule that a checkpoint has what --resume reads. fields/ says it of invariant runs."""
    wrong = lambda t: not t.numerics.invariant and t.at(path) is False  # noqa: E731
    return Rule(wrong, "a run could not be resumed", f"{path}=true", head=value_of(path))


_PRECISION_AWARE = "optimizer.use_precision_aware_optimizer"
_BIASES = "model.add_bias_linear"
_BIAS_RATE = "model.moe_router_bias_update_rate"


def _no_window(config: RunConfig) -> bool:
    return len(config.model["window_size"]) != 2 or min(config.model["window_size"]) < -1


# In the order of messages.
RULES: tuple[Rule[RunConfig], ...] = (
    *REPLACED,
    Rule(_loggers),
    Rule(lambda t: t.at("logger.comet_api_key"), "a secret, and what is configured is written down",
        "set COMET_API_KEY where you start the run, and cluster.forward=[COMET_API_KEY] for a job",
        head=lambda t: "logger.comet_api_key"),
    Rule(_sizes),
    Rule(_aligned),
    _divides("hidden_size", "num_attention_heads", unless="kv_channels"),
    _divides("num_attention_heads", "num_query_groups"),
    _divides("num_moe_experts", "moe_router_num_groups"),
    _divides("mamba_num_heads", "mamba_num_groups"),
    *map(_per_layer, PER_LAYER),
    Rule(_repeats_a_delta_net, "MTP repeats the last layer, and no gated delta net",
        "a model.linear_attention_freq whose last layer is attention, or model.mtp_num_layers=null",
        head=value_of("model.mtp_num_layers")),
    Rule(_without_rotary, needs=lambda t: t.model.get("no_rope_freq"), head=lambda t: "model.no_rope_freq"),
    Rule(_no_window, "must be the tokens before and after, each at least 0, or -1 for all", "model.window_size=[N,0]",
        needs=lambda t: isinstance(t.model.get("window_size"), list | tuple),
        head=lambda t: f"model.window_size={value_text(t.model['window_size'])}"),
    Rule(  # its attention reads the positions of two bases, which its model makes beside rotary ones alone
        lambda t: t.model.get("position_embedding_type", "rope") != "rope",
        f"{families.TWO_BASES} has rotary positions of two bases",
        "model.position_embedding_type=rope",
        needs=lambda t: families.family_of(t.model) == families.TWO_BASES,
        head=value_of("model.position_embedding_type"),
    ),
    # Megatron-Core asserts both when a rank builds the layer.
    Rule(lambda t: t.shape.shared_width, "Megatron-Core's shared experts have no biases", f"{_BIASES}=false",
        needs=lambda t: t.shape.experts and t.shape.biased, head=value_of(_BIASES)),
    Rule(lambda t: t.model.get("moe_grouped_gemm") and t.model.get("bias_dropout_fusion"),
        "Megatron-Core adds the bias of grouped experts by itself", "model.bias_dropout_fusion=false",
        needs=lambda t: t.shape.experts and t.shape.biased and not t.shape.shared_width, head=value_of(_BIASES)),
    _at_most("model.moe_router_topk", "model.num_moe_experts"),
    _at_most("model.moe_router_group_topk", "model.moe_router_num_groups"),
    _at_most("tokenizer.vocab_size", "model.vocab_size"),
    _at_most("scheduler.start_weight_decay", "scheduler.end_weight_decay"),
    _at_most("profiling.profile_step_start", "profiling.profile_step_end"),
    Rule(_warmup),
    Rule(_validation),
    Rule(lambda t: t.at("tokenizer.vocab_size") != t.shape.vocabulary, "the tokenizer of data=text decides it",
        "leave it out", needs=lambda t: t.data.kind == "text", head=value_of("tokenizer.vocab_size")),
    Rule(lambda t: t.at("dataset.reset_attention_mask"),
        "Megatron-Bridge trains without the data's mask, so documents would still see each other", "leave it out",
        head=value_of("dataset.reset_attention_mask"), adjust=becomes(False, "dataset.reset_attention_mask")),
    Rule(_gathers_whole_weights, adjust=becomes(False, " ".join(_GATHERS))),
    Rule(lambda t: t.device.kind == "cpu" or not t.at("optimizer.use_distributed_optimizer"),
        "it is Transformer Engine's distributed Adam",
        f"{_PRECISION_AWARE}=false, or optimizer.use_distributed_optimizer=true and device=gpu",
        needs=lambda t: t.at(_PRECISION_AWARE), head=value_of(_PRECISION_AWARE),
        adjust=becomes(False, _PRECISION_AWARE)),
    Rule(_undistributed),
    Rule(_async_save, needs=lambda t: t.at("checkpoint.async_save"), head=value_of("checkpoint.async_save"),
        adjust=becomes("mcore", "checkpoint.async_strategy", unset=True)),
    _on_cpu("model.layernorm_zero_centered_gamma", "torch's LayerNorm has none",
        needs=lambda t: not t.numerics.invariant and t.model.get("normalization") != "RMSNorm"),
    Rule(finetuning.loses_bias, "checkpoints of adapters lack the experts' bias, so it must stay",
        f"{_BIAS_RATE}=0", head=lambda t: _BIAS_RATE, adjust=becomes(0, _BIAS_RATE, unset=True)),
    _resumable("checkpoint.save_optim"),
    _resumable("checkpoint.save_rng"),
    Rule(  # SIGTERM saves a checkpoint of every run, and digests have its names
        lambda t: t.shape.depths and t.shape.tied and t.layout.pp != 1,
        "Megatron-Core cannot save a tied embedding beside MTP",
        "pp=1, or model.share_embeddings_and_output_weights=false",
    ),
    _on_cpu("optimizer.optimizer_cpu_offload", "the optimizer is on the CPU already"),
    _on_cpu("profiling.use_nsys_profiler", "it reads a GPU"),
    _on_cpu("profiling.record_memory_history", "it reads a GPU"),
    _on_cpu("logger.log_energy", "it reads a GPU"),
)  # fmt: skip


# What stock numerics need for products in FP8 or FP4; invariant/fp8.py says it of invariant numerics.


def _applies(config: RunConfig) -> bool:
    return low_precision.enabled(config) and not config.numerics.invariant


def _uneven(config: RunConfig) -> Iterator[Problem]:
    must = f"FP8 and FP4 GEMMs have sides that are multiples of {MULTIPLE}"
    for words, side in _sides(config).items() if config.device.kind == "gpu" else ():
        if side % MULTIPLE:
            yield Problem("", f"{must}, and {words} is {side:g}", "change it, or precision=bf16")


def _sides(config: RunConfig) -> dict[str, float]:
    """Return the sides of the products on one rank: name -> size."""
    model, shape = config.model, config.shape
    tp, etp = config.layout.tp, config.layout.etp
    mbs = config.train["micro_batch_size"]
    heads, width = shape.heads + 2 * shape.groups, shape.fields.get("kv_channels") or shape.hidden / shape.heads
    sides = {
        "seq * mbs / cp": shape.sequence * mbs / config.layout.cp,
        "model.hidden_size": shape.hidden,
        "the width of queries, keys and values / tp": heads * width / tp,
    }
    if shape.experts:
        sides["model.moe_ffn_hidden_size / etp"] = shape.expert_width / etp
        if shared := shape.shared_width:
            sides["model.moe_shared_expert_intermediate_size / tp"] = shared / tp
    else:
        sides["model.ffn_hidden_size / tp"] = shape.ffn / tp
    if "M" in shape.pattern:
        inner = shape.mamba_heads * shape.mamba_width
        states = shape.mamba_groups * shape.mamba_state
        sides["the width of Mamba's in_proj / tp"] = (2 * (inner + states) + shape.mamba_heads) / tp
    if families.delta_sizes(model):
        sides["the width of a gated delta net's in_proj / tp"] = 2 * sum(families.delta_widths(model)) / tp
    return sides


PRECISION_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(lambda t: t.device.kind != "gpu", "FP8 and FP4 GEMMs need Transformer Engine on a GPU",
        "precision=bf16, or device=gpu", needs=_applies),
    Rule(_uneven, needs=_applies),
)  # fmt: skip

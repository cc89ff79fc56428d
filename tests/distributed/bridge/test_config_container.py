# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge makes of a configuration."""

import dataclasses
import inspect
import os
import shlex

import pytest

from tests import hf_folders
from tests.models import degree, small_ones, sparing
from tp_invariant_recipes.cli import show, train
from tp_invariant_recipes.cli.arguments import with_model
from tp_invariant_recipes.config import container, describe, hydra_tree
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.container import LOCAL_SPECS
from tp_invariant_recipes.config.overrides import parse
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.settings import conf_files, environment, schema
from tp_invariant_recipes.settings.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("bridge")

MODELS = conf_files.groups()["model"]


def _provider(model: str) -> str:
    """The class that its file names, without composing."""
    return str(hydra_tree.unresolved("model", "_target_", [parse(f"model={model}")])).rpartition(".")[2]


# Layers that are neither the provider's own nor Bridge's local ones.
OWN = "tp_invariant_recipes.numerics.megatron.families.block"
FAMILIES = ("olmoe", "gemma3")
ON_CPU = [model for model in MODELS if _provider(model) in LOCAL_SPECS or model.startswith(FAMILIES)]
# Of dense layers and layers of experts in one model: Bridge's own function makes one layer for all.
DELTA_NETS = "tp_invariant_recipes.numerics.megatron.families.delta_net.block"
BOTH = "tp_invariant_recipes.numerics.megatron.spec.block_of_both"
QWEN3 = ("qwen3_0p6b", *(pytest.param(model, marks=pytest.mark.release) for model in ("qwen3_8b", "qwen3_30b_a3b")))


def build(model: str, *overrides: str, device: str = "gpu"):
    return container.build(compose(model, overrides, device=device).config)


def validated(model: str, *overrides: str, device: str = "gpu"):
    """As a rank sees it."""
    config = compose(model, overrides, device=device).config
    made = container.build(config)
    container.validate(made, config.layout.world, here=device == "cpu")
    return made


def problems(model: str, *overrides: str, device: str = "cpu") -> list[str]:
    with pytest.raises(ConfigError) as error:
        build(model, *overrides, device=device)
    lines = str(error.value).splitlines()
    return lines if len(lines) == 1 else [line.removeprefix("  - ") for line in lines[1:]]


def differing(a: object, b: object) -> dict[str, tuple]:
    """Field -> both values, of every field of `a` that has another value in `b`."""
    pairs = {f.name: (getattr(a, f.name, None), getattr(b, f.name, None)) for f in dataclasses.fields(a)}
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y}


# --- every model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", small_ones(ON_CPU))
def test_bridge_accepts_every_model_that_a_cpu_can(model):
    made = validated(model, "numerics=stock", device="cpu")
    assert made.model.transformer_impl == "local"
    assert made.dist.distributed_backend == "gloo"
    provider = type(made.model).__name__
    layers = getattr(made.model, container.SPEC_FIELDS.get(provider, "transformer_layer_spec"))
    expected = BOTH if model.startswith("glm45") else container.LOCAL_SPECS.get(provider)
    if model.startswith(FAMILIES):
        layers, expected = layers.func, OWN
    if model.startswith("qwen3_next"):
        expected = DELTA_NETS
    assert f"{layers.__module__}.{layers.__name__}" == expected


# Of each provider one in `make test`, where all models compose for GPUs (tests/unit/config/test_config_compose.py).
PROVIDERS = ("gemma3_toy", "moonlight_toy", "nemotron3_nano_toy", "qwen3_toy")


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[pytest.mark.release] * (model not in PROVIDERS)) for model in MODELS]
)
def test_bridge_accepts_every_model_on_gpus(model):
    made = validated(model, f"tp={degree(model)}", "dp=2", "gbs=2")
    assert made.model.sequence_parallel is (degree(model) > 1)
    assert made.dist.distributed_backend == "nccl"
    assert made.data_parallel_size == 2
    assert made.model.bf16 is True
    assert made.optimizer.bf16 is True


@pytest.mark.parametrize("model", ("qwen3_toy", "nemotron3_nano_toy"))
@pytest.mark.parametrize("device", ("cpu", "gpu"))
def test_invariant_numerics_bring_their_layers(model, device):
    # Its two key and value heads are V at most, and its experts have options that this is not about.
    more = ("numerics.virtual_shards=2",) if model == "nemotron3_nano_toy" else ()
    made = build(model, "numerics=tree", *more, device=device)
    layers = getattr(made.model, container.SPEC_FIELDS[type(made.model).__name__])
    assert f"{layers.__module__}.{layers.__name__}" == container.INVARIANT_SPECS[type(made.model).__name__]


# The published validation settings, by section.
PUBLISHED = {
    "model": {"seq_length": 2048, "vocab_size": 151936, "bf16": True},
    "dataset": {"seq_length": 2048, "random_seed": 1234},
    "tokenizer": {"tokenizer_type": "NullTokenizer"},
    "train": {"micro_batch_size": 1, "global_batch_size": 1},
    "optimizer": {
        "optimizer": "adam", "lr": 3e-4, "min_lr": 3e-5, "weight_decay": 0.033, "adam_beta1": 0.9, "adam_beta2": 0.95,
        "adam_eps": 1e-5, "clip_grad": 1.0, "bf16": True,
    },
    "scheduler": {
        "lr_decay_style": "cosine", "lr_decay_iters": 100, "lr_warmup_iters": 0, "start_weight_decay": 0.033,
        "end_weight_decay": 0.033,
    },
    "rng": {"seed": 1234},
    "ddp": {"grad_reduce_in_fp32": True},
}  # fmt: skip


@pytest.mark.parametrize("model", QWEN3)
def test_the_published_settings_reach_bridge(model):
    made = validated(model)
    for section, fields in PUBLISHED.items():
        assert {name: getattr(getattr(made, section), name) for name in fields} == fields


# --- the same architecture as Bridge derives itself -------------------------------------------------------------------

# As the models' config.json have them.
QWEN = dict(head_dim=128, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6)
QWEN_UNTIED = QWEN | dict(vocab_size=151936, tie_word_embeddings=False)
LLAMA = dict(vocab_size=128256, max_position_embeddings=131072, rope_theta=5e5, rms_norm_eps=1e-5, head_dim=128)
TIED = dict(tie_word_embeddings=True)
LLAMA31_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def sizes(hidden: int, ffn: int, layers: int, heads: int, groups: int) -> dict[str, int]:
    return dict(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
    )


def experts(ffn: int) -> dict[str, object]:
    return dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=ffn, norm_topk_prob=True)


HUGGING_FACE = {
    "qwen3_0p6b": ("Qwen3", QWEN_UNTIED | sizes(1024, 3072, 28, 16, 8) | TIED),
    "qwen3_8b": ("Qwen3", QWEN_UNTIED | sizes(4096, 12288, 36, 32, 8)),
    "qwen3_32b": ("Qwen3", QWEN_UNTIED | sizes(5120, 25600, 64, 64, 8)),
    "qwen3_30b_a3b": ("Qwen3Moe", QWEN_UNTIED | sizes(2048, 6144, 48, 32, 4) | experts(768)),
    "qwen3_235b_a22b": ("Qwen3Moe", QWEN_UNTIED | sizes(4096, 12288, 94, 64, 4) | experts(1536)),
    "qwen25_0p5b": ("Qwen2", QWEN | sizes(896, 4864, 24, 14, 2) | TIED | dict(vocab_size=151936, head_dim=64)),
    "qwen25_7b": ("Qwen2", QWEN_UNTIED | sizes(3584, 18944, 28, 28, 4) | dict(vocab_size=152064)),
    "qwen25_14b": ("Qwen2", QWEN_UNTIED | sizes(5120, 13824, 48, 40, 8) | dict(vocab_size=152064, rms_norm_eps=1e-5)),
    "llama3_8b": ("Llama", LLAMA | sizes(4096, 14336, 32, 32, 8)),
    "llama31_8b": ("Llama", LLAMA | sizes(4096, 14336, 32, 32, 8) | dict(rope_scaling=LLAMA31_ROPE)),
    "llama31_405b": ("Llama", LLAMA | sizes(16384, 53248, 126, 128, 8) | dict(rope_scaling=LLAMA31_ROPE)),
    "llama32_1b": (
        "Llama",
        LLAMA | sizes(2048, 8192, 16, 32, 8) | TIED | dict(head_dim=64, rope_scaling=LLAMA31_ROPE | dict(factor=32.0)),
    ),
}
# Reason why a field may differ -> the fields.
NOT_ARCHITECTURE = {
    "set from mixed_precision when validated": ("bf16", "params_dtype", "autocast_dtype", "pipeline_dtype"),
    "what is trained, not what the model can serve": ("seq_length",),
    "numerics=deterministic": ("deterministic_mode", "cross_entropy_loss_fusion"),
    "numerics=stock fuses it on a GPU": ("gradient_accumulation_fusion", "cross_entropy_fusion_impl"),
    "a fused kernel of the same function": (
        *("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"),
    ),
    "layout: 1 is spelt out, null would follow tp": ("expert_tensor_parallel_size",),
}
NEMOTRON_MAY_DIFFER = NOT_ARCHITECTURE | {
    "counted from hybrid_layer_pattern": ("num_layers",),
    "theirs comes from the tokenizer when training starts": ("vocab_size",),
    "layout": ("expert_model_parallel_size",),
    "for CUDA graphs": ("use_te_rng_tracker", "cuda_graph_impl", "cuda_graph_modules"),
    "which kernel": ("attention_backend", "masked_softmax_fusion"),
    "what is kept in memory": ("recompute_granularity", "recompute_modules", "offload_modules"),
    "how tokens travel": ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms"),
}


def unexplained(expected: object, actual: object, reasons: dict[str, tuple[str, ...]]) -> dict[str, tuple]:
    """The fields that differ for no reason."""
    explained = {name for names in reasons.values() for name in names}
    return {name: pair for name, pair in differing(expected, actual).items() if name not in explained}


@pytest.mark.parametrize("model", sparing(HUGGING_FACE))
def test_the_provider_is_the_one_bridge_derives_from_hugging_face(model):
    import transformers
    from megatron.bridge import AutoBridge

    kind, fields = HUGGING_FACE[model]
    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], **fields)
    expected = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    actual = build(model, "numerics=stock", "cuda_graph=off").model
    assert type(actual) is type(expected)
    assert unexplained(expected, actual, NOT_ARCHITECTURE) == {}
    assert actual.vocab_size == expected.vocab_size == fields["vocab_size"]


def test_nemotron_is_the_model_of_bridges_recipe(families):
    from megatron.bridge.recipes.nemotronh.h100 import nemotron_3_nano

    expected = nemotron_3_nano.nemotron_3_nano_pretrain_8gpu_h100_bf16_config()
    actual = build("nemotron3_nano", "numerics=stock")
    assert type(actual.model) is type(expected.model)
    assert unexplained(expected.model, actual.model, NEMOTRON_MAY_DIFFER) == {}
    assert len(actual.model.hybrid_layer_pattern) == expected.model.num_layers == 52
    for field in ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad"):
        assert getattr(actual.optimizer, field) == getattr(expected.optimizer, field), field


@pytest.mark.parametrize("toy, real", (("qwen3_moe_toy", "qwen3_30b_a3b"), ("nemotron3_nano_toy", "nemotron3_nano")))
def test_a_toy_is_the_real_model_made_small(toy, real):
    sizes = {"num_layers", "num_moe_experts", "moe_router_topk", "hybrid_layer_pattern", "hidden_size", "seq_length"}
    sizes |= {"ffn_hidden_size", "num_attention_heads", "num_query_groups", "mamba_num_heads", "vocab_size"}
    sizes |= {"moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "kv_channels", "mamba_head_dim"}
    assert differing(build(toy).model, build(real).model).keys() <= sizes


# --- fields of Bridge's on the command line ---------------------------------------------------------------------------


def test_every_section_is_one_of_bridges_and_of_bridges_none_is_forgotten():
    from megatron.bridge.training.config import ConfigContainer

    hints = {f.name for f in dataclasses.fields(ConfigContainer)}
    actual = schema.BRIDGE_SECTIONS.keys() | {"mixed_precision"}
    assert actual <= hints
    assert hints - actual == {"env_vars", "optimizer_config_override_provider", "_checkpoint_load_required"}
    tree = compose("qwen3_toy").config.sections
    for section in actual:
        assert schema.fields(schema.section_class(section, tree)), section


def test_any_field_can_be_set_also_one_that_conf_does_not_name():
    made = build(
        "qwen3_8b",
        "optimizer.decoupled_lr=1",
        "logger.log_throughput=true",
        "profiling.use_pytorch_profiler=true",
        "model.attention_backend=unfused",
        "model.params_dtype=float16",
        "model.activation_func=torch.nn.functional.gelu",
        "model.recompute_granularity=selective",
        "model.recompute_modules=[core_attn,mlp]",
        "checkpoint.ckpt_step=null",
    )
    import torch
    from megatron.core.transformer.enums import AttnBackend

    assert (made.optimizer.decoupled_lr, type(made.optimizer.decoupled_lr)) == (1.0, float)
    assert made.logger.log_throughput is True
    assert made.profiling.use_pytorch_profiler is True
    assert made.model.attention_backend is AttnBackend.unfused
    assert made.model.params_dtype is torch.float16
    assert made.model.activation_func is torch.nn.functional.gelu
    assert made.model.recompute_modules == ["core_attn", "mlp"]
    assert made.checkpoint.ckpt_step is None


# One mistake each, and the line about it; all are reported at once. Others: tests/unit/config/test_config_compose.py.
MISTAKES = {
    "model.num_layer=3": "model.num_layer: no such field of GPTModelProvider; did you mean 'model.num_layers'?",
    "optimizer.clip_grad=abc": "optimizer.clip_grad=abc: expected float, such as 1e-4",
    "model.attention_backend=quick": "model.attention_backend=quick: expected one of flash, fused, unfused, local, ",
    "model.params_dtype=float65": "model.params_dtype=float65: expected dtype, such as bfloat16 (or bf16)",
    "model.activation_func=torch.nn.silu": "model.activation_func=torch.nn.silu: expected the dotted path of a "
    "function, such as torch.nn.functional.silu",
    "model.recompute_granularity=all": "model.recompute_granularity=all: expected one of 'full', 'selective' or null",
    "mixed_precision.fp16=true": "mixed_precision.fp16=true: mixed_precision=bf16_mixed is a preset; setting one field",
    "ft.enable_ft_packages=1": "ft.enable_ft_packages: no such field of FaultToleranceConfig",
    "tpp=2": "tpp=2:",
    "data=texxt": "data=texxt:",
    "pp=3": "pp=3 does not",
}


def test_all_mistakes_are_reported_at_once_and_each_names_its_field(capfd):
    actual = problems("qwen3_toy", *MISTAKES)
    for says in MISTAKES.values():
        assert sum(problem.startswith(says) for problem in actual) == 1, says
    assert len(actual) == len(MISTAKES)
    assert "Error" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ("no.such.Class", "os.path.join"))
def test_another_class_than_bridges_is_refused(name):
    (problem,) = problems("qwen3_toy", f"model._target_={name}")
    assert problem.startswith(f"{name} is not one of Megatron-Bridge's classes of settings")


def test_mistakes_in_conf_are_detected_when_the_container_is_built():
    tree = compose("qwen3_toy").config.sections
    tree["optimizer"]["lrr"] = 1
    tree["ddp"]["overlap_grad_reduce"] = "sometimes"
    tree["numerics"]["mode"] = "magic"
    with pytest.raises(ConfigError) as error:
        container.build(RunConfig(tree))
    message = str(error.value)
    assert "3 problems" in message
    assert "optimizer.lrr: no such field of OptimizerConfig; did you mean 'optimizer.lr'?" in message
    assert "ddp.overlap_grad_reduce=sometimes: expected bool, such as true" in message
    assert "numerics.mode=magic" in message


def test_mixed_precision_is_a_name_or_all_its_fields():
    import torch

    fields = (
        "mixed_precision.bf16=true",
        "mixed_precision.params_dtype=bfloat16",
        "mixed_precision.pipeline_dtype=bfloat16",
    )
    fields += ("mixed_precision.grad_reduce_in_fp32=false", "numerics=stock")
    made = validated("qwen3_toy", "mixed_precision=null", *fields)
    assert made.model.bf16 is True
    assert made.model.params_dtype is torch.bfloat16
    assert made.ddp.grad_reduce_in_fp32 is False
    made = validated("qwen3_toy", "precision=fp32")
    assert made.mixed_precision is None
    assert made.model.bf16 is False
    assert made.model.params_dtype is torch.float32
    with pytest.raises(ConfigError, match="Unknown mixed-precision recipe 'bf17_mixed'"):
        validated("qwen3_toy", "mixed_precision=bf17_mixed", "numerics=stock")


# --- building and validating ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, says",
    (
        (("model.recompute_granularity=full",), "recompute_method must be"),
        (("dataset.seq_length=64",), "Sequence length in model config: 128, Sequence length in dataset config: 64"),
    ),
)
def test_what_bridge_refuses_is_a_configuration_error_in_its_words(overrides, says):
    with pytest.raises(ConfigError, match="Megatron-Bridge refuses this configuration: ") as error:
        validated("qwen3_toy", *overrides, device="cpu")
    assert says in str(error.value)


def test_validation_is_for_the_ranks_asked_for_and_leaves_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = dict(os.environ)
    container.validate(build("qwen3_toy", "tp=2", device="cpu"), 4)
    with pytest.raises(ConfigError, match=r"world size \(3\) is not divisible"):
        container.validate(build("qwen3_toy", "tp=2", device="cpu"), 3)
    assert os.environ == before


@pytest.mark.skipif(installed("transformer-engine") is not None, reason="Transformer Engine is installed")
@pytest.mark.parametrize(
    "overrides, says",
    (
        (("qwen3_30b_a3b",), "fus"),
        (("qwen3_0p6b", "numerics=stock", "optimizer.use_precision_aware_optimizer=true"), "FusedAdam"),
        (
            (
                "qwen3_30b_a3b",
                "numerics=stock",
                "precision=fp8_tensorwise",
                *(f"model.{x}=false" for x in container.NEED_TE),
            ),
            "transformer-engine",
        ),
    ),
)
def test_what_needs_transformer_engine_is_for_the_nodes_to_judge(overrides, says):
    from megatron.core.utils import get_te_version

    before = get_te_version()
    container.validate(build(*overrides), 1, here=False)
    assert get_te_version() == before
    with pytest.raises(ConfigError, match=says):
        container.validate(build(*overrides), 1)


@pytest.mark.parametrize("numerics", ("tree", "stock"))
def test_what_bridge_sets_must_be_allowed_too(numerics, monkeypatch):
    """Bridge's validation changes fields of other sections, so the rules look at what comes out, too."""
    from megatron.bridge.training import config

    def sets(made) -> None:
        made.ddp.average_in_collective = True
        made.optimizer.optimizer_cpu_offload = True

    monkeypatch.setattr(config, "runtime_config_update", sets)
    made = build("qwen3_toy", f"numerics={numerics}")
    if numerics == "stock":
        return container.validate(made, 1)
    with pytest.raises(ConfigError) as error:
        container.validate(made, 1)
    offload, average, stock = error.value.problems
    assert offload.startswith("numerics=tree: Megatron-Bridge sets optimizer.optimizer_cpu_offload=true: ")
    assert average.startswith("numerics=tree: Megatron-Bridge sets ddp.average_in_collective=true: ")
    assert stock == "or numerics=stock"


def test_the_decay_is_as_long_as_the_run():
    assert validated("qwen3_toy", "iters=7", device="cpu").scheduler.lr_decay_iters == 7
    made = validated("qwen3_toy", "iters=7", "scheduler.lr_decay_iters=50", device="cpu")
    assert (made.train.train_iters, made.scheduler.lr_decay_iters) == (7, 50)


@pytest.mark.parametrize("device", ("cpu", "gpu"))
def test_bridge_sets_the_variables_that_we_set(device, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    ours = environment.settings(device, {"NCCL_ALGO": "Ring"})
    assert build("qwen3_toy", "tp=2", device=device).env_vars == ours
    queues = {environment.ORDERED: "32"} if device == "gpu" else {}
    assert build("qwen3_toy", device=device).env_vars == ours | queues
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    assert problems("qwen3_toy", device=device)[0].startswith("NCCL_ALGO=NVLS in the environment")


@pytest.mark.parametrize("includes_eod, eod", ((True, 511), (False, 512)))
def test_the_installed_null_tokenizer_has_the_eod_that_was_intended(includes_eod, eod):
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    made = build("qwen3_toy", f"tokenizer.vocab_includes_eod={includes_eod}", device="cpu")
    tokenizer = NullTokenizer(made.tokenizer.vocab_size)
    assert (tokenizer.eod, tokenizer.vocab_size) == (eod, eod + 1)
    assert not hasattr(made.tokenizer, "vocab_includes_eod")


def test_another_tokenizers_size_is_not_touched():
    made = build("qwen3_toy", "tokenizer.tokenizer_type=HuggingFaceTokenizer", device="cpu")
    assert made.tokenizer.vocab_size == 512


def test_a_layer_specification_of_ones_own_is_kept():
    own = "megatron.bridge.models.gpt_provider.transformer_engine_layer_spec"
    made = build("qwen3_toy", f"model.transformer_layer_spec={own}", device="cpu")
    assert made.model.transformer_layer_spec.__name__ == "transformer_engine_layer_spec"


def test_typed_layers_of_a_hybrid_model_may_have_layers_ahead(bridge):
    """Bridge appends these to the pattern; another value would be refused."""
    words = ["model.hybrid_layer_pattern=ME*E", "model.mtp_num_layers=1", "model.mtp_hybrid_override_pattern=*M"]
    config = compose("nemotron3_nano_toy", words, device="cpu").config
    built = container.build(config)
    container.validate(built, 1, typed=["model.hybrid_layer_pattern"])
    assert built.model.hybrid_layer_pattern == "ME*E/*M"


def test_a_tree_can_be_built_twice():
    tree = compose("qwen3_toy").config.sections
    first, second = container.build(RunConfig(tree)), container.build(RunConfig(tree))
    assert first.model is not second.model
    assert differing(first.model, second.model) == {}
    assert tree == compose("qwen3_toy").config.sections


@pytest.mark.parametrize("model", (pytest.param("qwen3_8b", marks=pytest.mark.release), "nemotron3_nano"))
def test_bridges_own_command_line_takes_the_overrides_that_are_shown(model):
    """Each container is changed to what the other's overrides say, by Bridge's code."""
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    shown = compose(model, ["tp=2", "lr=1e-3", "seed=7", "dp=2", "gbs=8"], device="gpu").config
    lines = [line for line in describe.bridge_overrides(shown) if not line.startswith("mixed_precision=")]
    expected = process_config_with_overrides(build(model), cli_overrides=lines)
    actual = container.build(shown)
    for section in describe.BRIDGE_SECTIONS.keys() & shown.sections.keys():
        different = differing(getattr(expected, section), getattr(actual, section))
        # Bridge leaves an enum's name and an empty tuple's list to be converted later.
        different = {n: p for n, p in different.items() if str(p[1]).split(".")[-1] != p[0] and any(p)}
        assert different.keys() <= {"vocab_size"}, section  # the NullTokenizer's convention, which only we know


def examples() -> list[tuple[str, ...]]:
    """The commands in the help of `tpi train` and `tpi show`."""
    texts = [inspect.getdoc(train.train), inspect.getdoc(show.show)]
    commands = [part.strip() for text in texts for line in text.splitlines() for part in line.split(";")]
    words = [tuple(shlex.split(command)[2:]) for command in commands if command.startswith(("tpi train", "tpi show"))]
    # Others are of runs, of two commands, or of a recipe whose sizes Hugging Face has.
    return [w for w in words if not {"--resume", "--from", "--diff", "--fix"}.intersection(w)]


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_the_examples_in_the_help_are_correct(words, tmp_path):
    words = " ".join(words).partition(" --key ")[0].split()
    model, *overrides = [word for word in words if not word.startswith("--")]
    if model == "weights=~/models/mine":
        folder = hf_folders.make(tmp_path / "mine", hf_folders.model_section("qwen3_toy"))
        model, overrides = with_model(f"weights={folder}", overrides)
    assert compose(model, overrides, device="gpu").model == model


def test_a_key_of_the_command_line_stands_in_the_place_of_the_folders_size(tmp_path):
    folder = hf_folders.make(tmp_path / "mine", hf_folders.model_section("qwen3_toy"))
    _, sizes = with_model(f"weights={folder}", [])
    changed = next(size for size in sizes if size.startswith("model.num_layers="))
    _, both = with_model(f"weights={folder}", ["++model.num_layers=7", "tp=2"])
    assert both == [*(size for size in sizes if size != changed), "++model.num_layers=7", "tp=2"]

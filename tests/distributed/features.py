# SPDX-License-Identifier: Apache-2.0
"""The features of a run as rows of overrides, by axis. Two rows of different axes make a pair.

A row is what one types for the feature alone; MODEL=NAME takes another model than qwen3_toy, and {weights} stands for a
Hugging Face checkpoint of the pair's model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.distributed.layouts.rows import EXPERTS, HYBRID, LATENT
from tests.distributed.small_models import MUON, small
from tp_invariant_recipes.features.audit import configurations

BASE = "seq=128 gbs=2 iters=1 scheduler.lr_decay_iters=4"
INTERLEAVED = "model.num_layers=4 model.virtual_pipeline_model_parallel_size=2 model.overlap_p2p_comm=true"
MODEL = "MODEL="
WEIGHTS = "{weights}"

# Model -> sizes that let it train in seconds in every precision: qwen3_moe_toy has 849 million parameters.
_MXFP8 = "model.hidden_size=96 model.mamba_num_heads=64 model.mamba_num_groups=4 model.kv_channels=32"
SIZES = {
    words.split()[0]: [word for word in words.split() if word.startswith("model.")]
    for words in (EXPERTS, LATENT, f"{HYBRID} {_MXFP8}", small("moonlight_toy"))
}

FAMILIES = (
    *("qwen3_moe", "qwen25", "llama32", "olmoe", "deepseek_v3", "moonlight", "nemotron3_nano"),
    *("gemma3", "gpt_oss", "qwen3_next", "glm45"),
)
AXES: dict[str, tuple[str, ...]] = {
    "numerics": ("numerics=stock", "numerics=portable", "numerics=gather"),
    "precision": ("precision=fp32", "precision=fp8_tensorwise", "precision=fp8_blockwise", "precision=mxfp8"),
    "family": tuple(f"MODEL={name}_toy" for name in FAMILIES),
    "weights": ("weights={weights}", "weights={weights} peft=lora peft.dim=8"),
    "optimizer": (
        "optimizer.optimizer=sgd",
        f"{MUON} optimizer.use_distributed_optimizer=false",
        "optimizer.use_distributed_optimizer=true",
        "optimizer.optimizer_cpu_offload=true ledger.digests=0",
        "optimizer.use_precision_aware_optimizer=true",
    ),
    "recompute": (
        "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
        "model.recompute_granularity=selective model.recompute_modules=[core_attn]",
    ),
    "guard": ("guard=products", "guard=shadow guard.every=1"),
    "graphs": ("cuda_graph=te", "cuda_graph=full"),
    "device": ("device=gpu",),
    "save": (
        "save=1",
        "save=1 checkpoint.async_save=true checkpoint.async_strategy=mcore",
        "checkpoint.save_optim=false",
    ),
    "validation": ("validation.eval_iters=1 validation.eval_interval=1",),
    "tensor": ("tp=2", "tp=2 sp=false", "tp=2 ep=2", "tp=2 etp=2"),
    "pipeline": ("pp=2", f"pp=2 {INTERLEAVED}"),
    "context": ("cp=2", "numerics.context_shards=2"),
    "data": ("dp=2", "numerics.data_shards=2", "mbs=2"),
    "record": (
        "ledger.trace=1 ledger.dump=[gradients/*]",
        "ledger.digests=0 ledger.state_digests=0",
        "logging=tensorboard",
    ),
    "loss": ("model.mtp_num_layers=1", "model.calculate_per_token_loss=true"),
    "embedding": ("model.share_embeddings_and_output_weights=true", "model.share_embeddings_and_output_weights=false"),
    "positions": ("model.position_embedding_type=learned_absolute", "model.position_embedding_type=none"),
    "layers": (
        "model.normalization=LayerNorm model.qk_layernorm=false", "model.add_bias_linear=true",
        "model.softmax_type=learnable", "model.window_size=[16,0]", "model.gated_linear_unit=false",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two rows of different axes."""

    first: str
    second: str

    @property
    def model(self) -> str:
        """The model that one of them names."""
        named = [word for word in self._words if word.startswith(MODEL)]
        return named[0].removeprefix(MODEL) if named else "qwen3_toy"

    def overrides(self, weights: str) -> list[str]:
        """weights: the folder of the model's checkpoint."""
        rows = [word.replace(WEIGHTS, weights) for word in self._words if not word.startswith(MODEL)]
        return [*BASE.split(), *self.sizes, *dict.fromkeys(rows)]

    @property
    def sizes(self) -> list[str]:
        """Overrides that cut the model."""
        return SIZES.get(self.model, [])

    @property
    def needs_weights(self) -> bool:
        """Whether a checkpoint must be there."""
        return any(WEIGHTS in word for word in self._words)

    @property
    def _words(self) -> list[str]:
        return f"{self.first} {self.second}".split()

    def __str__(self) -> str:
        return f"{self.first}  x  {self.second}"


def pairs() -> Iterator[Pair]:
    """All of them."""
    yield from (Pair(*settings) for settings in configurations.pairs([*AXES.values()]))

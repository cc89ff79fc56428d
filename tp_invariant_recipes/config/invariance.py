"""What `numerics=tree` can cover: one row a rule, so that a run it cannot is refused before it starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]

# Numbers of the model that are split into V shards.
SHARDED = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size", "seq_length")


@dataclass(frozen=True)
class Limit:
    """wrong: whether the tree is beyond what is covered. why: what there is no invariant version of yet."""

    wrong: Callable[[Tree], bool]
    why: str


LIMITS = (
    Limit(lambda t: t["device"]["kind"] != "cpu", "GPU layers have no invariant version yet; device=cpu"),
    Limit(lambda t: bool(t["model"].get("num_moe_experts")), "experts have no invariant version yet"),
    Limit(lambda t: "hybrid_layer_pattern" in t["model"], "Mamba layers have no invariant version yet"),
    Limit(lambda t: t["model"].get("normalization") != "RMSNorm", "only model.normalization=RMSNorm is covered"),
    Limit(
        lambda t: bool(t["model"].get("add_bias_linear") or t["model"].get("add_qkv_bias")),
        "biases have no invariant version yet; model.add_bias_linear=false, model.add_qkv_bias=false",
    ),
    Limit(
        lambda t: bool(t["model"].get("hidden_dropout") or t["model"].get("attention_dropout")),
        "dropout draws other numbers in every layout; model.hidden_dropout=0, model.attention_dropout=0",
    ),
    Limit(lambda t: t["model"]["context_parallel_size"] > 1, "cp has no invariant version yet; cp=1"),
    Limit(
        lambda t: t["parallel"]["data_parallel_size"] > 2,
        "an all-reduce over more than two data-parallel ranks adds in an order of its own; dp=1 or 2",
    ),
    Limit(lambda t: bool(t["model"].get("recompute_granularity")), "recomputation is not covered yet"),
    Limit(lambda t: bool(t["model"].get("mtp_num_layers")), "multi-token prediction is not covered yet"),
    Limit(lambda t: bool(t["optimizer"].get("clip_grad", 1.0) and t["optimizer"]["use_distributed_optimizer"]),
          "the distributed optimizer is not covered yet; optimizer.use_distributed_optimizer=false"),
)  # fmt: skip


def problems(tree: Tree) -> list[str]:
    """Everything that keeps the tree's numerics mode from being invariant; nothing for stock."""
    mode, shards = tree["numerics"]["mode"], tree["numerics"].get("shards")
    if mode == "stock":
        return []
    beyond = [f"numerics={mode}: {limit.why}" for limit in LIMITS if limit.wrong(tree)]
    return [*beyond, *_shards(tree, shards)]


def _shards(tree: Tree, shards: Any) -> list[str]:
    if not isinstance(shards, int) or shards < 1 or shards & (shards - 1):
        return [f"numerics.shards={shards}: must be a power of two"]
    totals = {f"model.{n}": tree["model"][n] for n in SHARDED}
    wrong = [f"{field}={total}" for field, total in totals.items() if total % shards]
    if wrong:
        common = math.gcd(*totals.values())
        return [
            f"numerics.shards={shards} does not divide {', '.join(wrong)}; "
            f"the largest that fits is numerics.shards={common & -common}"
        ]
    tp = tree["model"]["tensor_model_parallel_size"]
    if shards % tp:
        return [f"tp={tp} does not divide numerics.shards={shards}; raise numerics.shards or change tp"]
    return []

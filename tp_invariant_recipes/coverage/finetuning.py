"""What the invariant numerics cover of fine-tuning on examples."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_invariant_recipes.coverage.limit import Limit, cuts_sequences, lacks
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import sft
from tp_invariant_recipes.settings.run_config import RunConfig


def _tuned(wrong: Callable[[RunConfig], Any]) -> Callable[[RunConfig], bool]:
    """What is wrong with a run on examples alone."""
    return lambda t: sft.is_sft(t.section("dataset")) and bool(wrong(t))


def _options(config: RunConfig) -> Mapping[str, Any]:
    return sft.field(config, "dataset_kwargs") or {}


LIMITS = (
    Limit(_tuned(lacks(mode.FINETUNING)), mode.only(mode.FINETUNING)),
    Limit(
        _tuned(lambda t: not _options(t).get("pad_to_max_length")),
        "how far an example is padded depends on the others of its rank; dataset.dataset_kwargs.pad_to_max_length=true",
    ),
    Limit(
        _tuned(lambda t: _options(t).get("get_attention_mask_from_fusion") is False),
        "a mask of the data's own has no invariant version; dataset.dataset_kwargs.get_attention_mask_from_fusion=true",
    ),
    Limit(
        _tuned(cuts_sequences),
        "fine-tuning with context parallelism is not covered: a shard may have no token that counts; cp=1, and leave "
        "numerics.context_shards out",
    ),
    Limit(
        lambda t: bool(t.model.get("calculate_per_token_loss")) and not t.numerics.covers(mode.TOKEN_LOSS),
        f"{mode.only(mode.TOKEN_LOSS)}; model.calculate_per_token_loss=false",
    ),
    Limit(
        lambda t: bool(t.model.get("calculate_per_token_loss"))
        and cuts_sequences(t),
        "context-parallel ranks would count a sequence's tokens several times; model.calculate_per_token_loss=false",
    ),
)  # fmt: skip

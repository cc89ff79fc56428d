"""What the invariant numerics cover of fine-tuning on examples."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tp_invariant_recipes.check.invariant.limit import cuts_sequences, has, lacks, limit_of
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.settings import sft
from tp_invariant_recipes.settings.run_config import RunConfig


def _options(config: RunConfig) -> Mapping[str, Any]:
    return config.at("dataset.dataset_kwargs") or {}


_row = partial(limit_of, lambda t: sft.is_sft(t.section("dataset")))
_per_token = partial(limit_of, has("calculate_per_token_loss"))

LIMITS = (
    _row(lacks(mode.FINETUNING), mode.only(mode.FINETUNING)),
    _row(
        lambda t: not _options(t).get("pad_to_max_length"),
        "how far an example is padded depends on the others of its rank",
        "dataset.dataset_kwargs.pad_to_max_length=true",
    ),
    _row(
        lambda t: _options(t).get("get_attention_mask_from_fusion") is False,
        "a mask of the data's own has no invariant version",
        "dataset.dataset_kwargs.get_attention_mask_from_fusion=true",
    ),
    _row(
        cuts_sequences,
        "fine-tuning with context parallelism is not covered: a shard may have no token that counts",
        "cp=1, and leave numerics.context_shards out",
    ),
    _per_token(lacks(mode.TOKEN_LOSS), mode.only(mode.TOKEN_LOSS), "model.calculate_per_token_loss=false"),
    _per_token(
        cuts_sequences,
        "context-parallel ranks would count a sequence's tokens several times",
        "model.calculate_per_token_loss=false",
    ),
)

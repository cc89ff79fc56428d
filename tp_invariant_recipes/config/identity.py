"""What makes two runs comparable: the model, the data, the optimizer and the seed, whatever the layout or machine."""

from collections.abc import Mapping
from typing import Any

from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.ledger.schema import SHARDS
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import RunConfig

WEIGHTS_DIGEST = "weights.digest"

# Sections whose fields are part of the identity.
SECTIONS = ("model", "train", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "rng", "mixed_precision")

# The same of runs that have them.
OPTIONAL = (finetuning.SECTION,)


def identity(config: RunConfig, data_digest: str | None, weights_digest: str | None = None) -> dict[str, Any]:
    """Dotted key -> value of everything that two comparable runs have in common.

    data_digest:    `PreparedData.digest` of text or `Examples.digest` of examples; None for generated data.
    weights_digest: of the checkpoint that the weights come from (`weights.Checkpoint.digest`); None: they are new.
    """
    flat = of_sections(config.sections)
    if finetuning.is_sft(config.section("dataset")):
        flat = {key: value for key, value in flat.items() if key not in finetuning.PLACES}
    if flat.get("scheduler.lr_decay_iters") is None:
        flat["scheduler.lr_decay_iters"] = config.train["train_iters"]
    flat["data.kind"] = config.data.kind
    if family := families.family_of(config.model):
        flat["model.layers"] = family
    for key in SHARDS if config.numerics.invariant else ():
        if (count := getattr(config.numerics, key.partition(".")[2])) is not None:
            flat[key] = count
    flat["data.digest"] = data_digest
    if weights_digest is not None:
        flat[WEIGHTS_DIGEST] = weights_digest
    return dict(sorted(flat.items()))


def of_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the identity that sections of Bridge make."""
    fields = {name: sections.get(name) for name in SECTIONS}
    fields |= {name: sections[name] for name in OPTIONAL if sections.get(name) is not None}
    return {key: value for key, value in flat(fields).items() if value != {} and catalogue.in_fingerprint(key)}


def flat(sections: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything that is no mapping, or an empty one."""
    fields: dict[str, Any] = {}
    for name, value in sections.items():
        inner = isinstance(value, Mapping) and value
        fields |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return fields

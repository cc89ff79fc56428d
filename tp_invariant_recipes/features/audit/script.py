# SPDX-License-Identifier: Apache-2.0
"""`tpi audit --all --script`: a program of Megatron-Core alone that shows a fault, where a layer by itself has it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tp_invariant_recipes.settings.run_config import RunConfig

_SETTINGS = '{"config": {}, "ranks": 1, "module": "", "tokens": 32, "sequences": 2}'
_LAYER = "decoder.layers."
_OTHERS = ("pp=", "cp=", "mbs=", "optimizer.", "data=", "dataset.", "validation.", "peft", "recompute", "mtp", "share_")
_DROPPED = ("activation_func", "num_layers", "moe_layer_freq", "transformer_impl", "cuda_graph_impl")


def text(config: RunConfig, settings: Sequence[str], first: str | None) -> str | None:
    """Return the program; None: what is wrong lies outside a layer, or needs more than a layer.

    config: of the smallest run that shows the fault. settings: of its configuration. first: "KIND MODULE" of its
    tensor.
    """
    kind, _, module = (first or "").partition(" ")
    layered = module.startswith(_LAYER) and kind == "gradients"
    plain = not config.shape.latent and config.shape.gated
    if not layered or not plain or any(part in setting for setting in settings for part in _OTHERS):
        return None
    name = module.removeprefix(_LAYER).partition(".")[2]
    from megatron.core.transformer import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)} - {*_DROPPED}
    described = {
        "config": {
            name: value
            for name, value in config.model.items()
            if name in names
            and isinstance(value, bool | int | float | str)
            and "." not in str(value).strip("0123456789.e-")
        }
        | {"num_layers": 1, "use_cpu_initialization": True},
        "ranks": config.layout.world,
        "module": name.partition(".experts.")[0],
        "tokens": config.shape.sequence,
        "sequences": config.train["global_batch_size"],
    }
    template = Path(__file__).with_name("module_alone.py").read_text(encoding="utf-8")
    return template.replace(_SETTINGS, json.dumps(described)).replace(
        "RANKS SCRIPT", f"{config.layout.world} THIS_FILE"
    )

"""Short keys: what people type for the fields they change most."""

from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings.tables.megatron_flags import FLAGS


@dataclass(frozen=True)
class ShortKey:
    """`name=VALUE` on the command line stands for `path=VALUE`. type: a hint, as settings/values.py converts to it."""

    name: str
    path: str
    type: Any
    help: str


SHORT_KEYS = {
    key.name: key
    for key in (
        ShortKey("tp", "model.tensor_model_parallel_size", int, "tensor-parallel degree"),
        ShortKey("pp", "model.pipeline_model_parallel_size", int, "pipeline-parallel degree"),
        ShortKey("dp", "parallel.data_parallel_size", int, "data-parallel degree"),
        ShortKey("cp", "model.context_parallel_size", int, "context-parallel degree"),
        ShortKey("ep", "model.expert_model_parallel_size", int, "expert-parallel degree"),
        ShortKey("etp", "model.expert_tensor_parallel_size", int, "tensor-parallel degree of the experts"),
        ShortKey("sp", "model.sequence_parallel", bool, "sequence parallelism (default: on when tp > 1)"),
        ShortKey("seq", "model.seq_length", int, "sequence length, tokens"),
        ShortKey(
            "mbs",
            "train.micro_batch_size",
            int,
            "micro-batch size, sequences; numerics=stock alone computes them at once",
        ),
        ShortKey("gbs", "train.global_batch_size", int, "global batch size, sequences"),
        ShortKey("iters", "train.train_iters", int, "training steps"),
        ShortKey("lr", "optimizer.lr", float, "peak learning rate"),
        ShortKey("seed", "rng.seed", int, "seed of weights and data order"),
        ShortKey("save", "checkpoint.save_interval", int, "steps between checkpoints; 0: only on SIGTERM"),
        ShortKey("project", "logging.project", str | None, "project of wandb and Comet, experiment of MLflow"),
        ShortKey("name", "logging.name", str | None, "name of the run there (default: run.dir's)"),
        ShortKey("weights", "weights.folder", str | None, "folder of the Hugging Face weights to start from"),
    )
}


def suggestions(name: str) -> list[str]:
    """Return the keys that a word of another program may mean: `learning_rate`, `--global-batch-size`, `TP`,
    `--swiglu`.

    Of a flag that stands for a value, with the value.
    """
    plain = name.lstrip("-").lower().replace("-", "_")
    if plain in FLAGS:
        return [*FLAGS[plain]]
    words = plain.replace("_", " ")
    return [
        key.name
        for key in SHORT_KEYS.values()
        if plain in (key.name, key.path.rpartition(".")[2])
        or (len(words) > 4 and words in key.help.partition(";")[0].replace("-", " "))
    ]

# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's generation on the Megatron model of its policy, colocated.

    policy_generation = tp_invariant_recipes.adapters.nemo_rl.Generation(policy)

Its workers must import `tp_invariant_recipes.patch_mode` with NVTE_TP_INVARIANT_MODE=1 and TPI_NUMERICS=portable before
they build the model. A refit copies nothing. A completion depends on the weights, the prompt, `seed`, the number of the
call and the row: set `calls` when a run resumes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from nemo_rl.models.generation.interfaces import GenerationInterface
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.features.rollouts.requests import STOP, Completion, Request, Sampling

# What a refit of the loop calls on the policy: the model stays where it is, and nobody receives its weights.
OF_REFIT = ("offload_before_refit", "offload_after_refit", "stream_weights_via_ipc_zmq")


class Generation(GenerationInterface):
    """Generates with the model that the policy trains, on all of its ranks.

    Args:
        policy: NeMo-RL's `Policy` with Megatron workers.
        seed: The seed of all draws.
        decode: Token ids to text, for stop strings.

    Raises:
        TpiError: Lists the settings of `policy.generation` that are not supported.
    """

    def __init__(self, policy: Any, *, seed: int = 0, decode: Callable[[list[int]], str] | None = None) -> None:
        self.config, self.seed, self.calls = policy.cfg["generation"], seed, 0
        self.workers = policy.worker_group.workers
        problems = []
        if self.config["temperature"] != 1.0:
            problems.append("policy.generation.temperature: log-probabilities are the model's; temperature=1.0")
        if not self.config.get("colocated", {"enabled": True})["enabled"]:
            problems.append("policy.generation.colocated.enabled: the model is the policy's; enabled=true")
        if policy.cfg.get("sequence_packing", {}).get("enabled"):
            problems.append("policy.sequence_packing.enabled: attention over packed sequences; enabled=false")
        refuse(problems)
        for name in OF_REFIT:
            setattr(policy, name, lambda *_, **__: [])
        self._on_all(bind, decode)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Complete the rows of `data`. returns: of its class, with the fields of NeMo-RL's GenerationOutputSpec."""
        config, rows, stops = self.config, range(len(data["input_ids"])), data.get("stop_strings")
        draws = {"top_k": config["top_k"] or 0, "top_p": config["top_p"], "seed": self.seed, "do_sample": True}
        prompts = [data["input_ids"][n, : int(data["input_lengths"][n])].tolist() for n in rows]
        requests = [
            Request(
                f"{self.calls}/{n}",
                prompts[n],
                Sampling(
                    max_new_tokens=config["max_new_tokens"],
                    eos_token_id=tuple(config["stop_token_ids"] or ()),
                    stop_strings=(*(config["stop_strings"] or ()), *((stops[n] if stops else None) or ())),
                    **({} if greedy else draws),
                ),
            )
            for n in rows
        ]
        self.calls += 1
        completions = next(result for result in self._on_all(call, "generate", requests) if result is not None)
        return type(data)(outputs(prompts, completions, config["_pad_token_id"]))

    def prepare_for_generation(self, *_: Any, **__: Any) -> bool:
        """Note that the weights may have changed."""
        self._on_all(call, "refit")
        return True

    def finish_generation(self, *_: Any, release_gpu: bool = True, **__: Any) -> bool:
        """Free the caches, unless release_gpu=False."""
        if release_gpu:
            self._on_all(call, "release")
        return True

    shutdown = finish_generation

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Raise TpiError: ranks of their own for generation are not supported."""
        raise ConfigError("policy.generation.colocated.enabled: the model is the policy's; enabled=true")

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Return at once: no weight is copied."""

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """Note that the weights have changed; nothing is received."""
        self.prepare_for_generation()
        return []

    def blocks_training(self) -> bool:
        """Return True: generation uses the policy's GPUs."""
        return True

    def wake_carries_weight_updates(self) -> bool:
        """Return True: the weights are the policy's."""
        return True

    def _on_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return ray.get([worker.__ray_call__.remote(function, *arguments) for worker in self.workers])


def outputs(prompts: Sequence[list[int]], completions: Iterable[Completion], pad: int) -> dict[str, Tensor]:
    """[rows, longest] of tokens and log-probabilities, which are 0 for prompts and padding, and [rows] of lengths."""
    pairs = [*zip(prompts, completions, strict=True)]
    whole = torch.tensor([len(prompt) + len(each.tokens) for prompt, each in pairs])
    ids = torch.full((len(pairs), int(whole.max())), pad)
    log_probabilities = torch.zeros(ids.shape)
    for n, (prompt, each) in enumerate(pairs):
        ids[n, : whole[n]] = torch.tensor([*prompt, *each.tokens])
        log_probabilities[n, len(prompt) : whole[n]] = torch.tensor(each.log_probabilities)
    return {
        "output_ids": ids,
        "logprobs": log_probabilities,
        "generation_lengths": whole - torch.tensor([*map(len, prompts)]),
        "unpadded_sequence_lengths": whole,
        "truncated": torch.tensor([each.finish_reason != STOP for _, each in pairs]),
    }


class LogProbabilities:
    """Replaces NeMo-RL's functions of autograd, whose sum over the vocabulary is not the rollout's."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, *others: Any) -> Tensor:
        """[b, s, vocab/t], [b, s] → [b, s] fp32. others: the group of the t ranks is among them."""
        from megatron.core import tensor_parallel

        group = next(other for other in others if isinstance(other, dist.ProcessGroup))
        return 0.0 - tensor_parallel.vocab_parallel_cross_entropy(logits, target, tp_group=group)


def bind(worker: Any, decode: Callable[[list[int]], str] | None) -> None:
    """Make the engine of a rank, and have the policy compute log-probabilities as the engine does."""
    from nemo_rl.distributed import model_utils

    from tp_invariant_recipes.features.rollouts.engine import Engine

    worker.tpi_engine = Engine(worker.model, decode=decode)
    model_utils.DistributedLogprob = model_utils.ChunkedDistributedLogprob = LogProbabilities


def call(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a rank's engine, with the same arguments on all. returns: its result, on rank 0."""
    result = getattr(worker.tpi_engine, method)(*arguments)
    return result if dist.get_rank() == 0 else None

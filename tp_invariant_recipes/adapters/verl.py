# SPDX-License-Identifier: Apache-2.0
"""verl's rollout on the Megatron module of its actor: `actor_rollout_ref.rollout.name=tpi`.

    VERL_USE_EXTERNAL_MODULES=tp_invariant_recipes.adapters.verl NVTE_TP_INVARIANT_MODE=1 TPI_NUMERICS=portable …

makes verl import this module in each of its processes. The import registers the rollout and, on a rank, enables the
patch mode. All ranks of the actor are one replica, and each generates with the module that it trains: a weight update
copies nothing. A completion depends on the weights, the prompt, `rollout.seed`, the step and verl's request id, which
repeats from run to run with `rollout.full_determinism=True`.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import Any

import ray
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from tp_invariant_recipes.errors import ConfigError, refuse
from tp_invariant_recipes.features.rollouts.requests import Completion, Request, Sampling, check
from tp_invariant_recipes.replacement import Replacement, apply
from tp_invariant_recipes.start import bridge

NAME = "tpi"
REJECTED = "the replica takes no requests until generation resumes"
GATHERING = 0.02  # seconds in which further requests join a batch
# Fields of verl's sections that the rollout supports with one value only -> that value.
ROLLOUT = {
    "temperature": 1.0, "repetition_penalty": 1.0, "dtype": "bfloat16", "quantization": None, "layered_summon": False,
    "enable_rollout_routing_replay": False, "disaggregation.enabled": False, "mtp.enable_rollout": False,
}  # fmt: skip
ACTOR = {"param_offload": False, "use_remove_padding": False, "use_fused_kernels": False, "context_parallel_size": 1}
# Keys of sampling_params that it supports with one value only, and those that it reads.
FIXED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
READ = {"temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "logprobs", "stop", "stop_token_ids"}


class Rollout(base.BaseRollout):
    """A rank's engine on the module of its actor. The replica binds it once the actor has its model."""

    engine: Any = None
    global_steps: int | None = None

    def bind(self, actor: Any) -> None:
        """Make the engine. actor: verl's Megatron engine. TpiError: lists the settings that are not supported."""
        from tp_invariant_recipes.features.rollouts.engine import Engine  # Megatron

        refuse([*_problems(self.config, actor.engine_config)])
        config = self.config
        self.engine = Engine(
            actor.module,
            sequences=config.max_num_seqs,
            chunk=config.max_num_batched_tokens,
            graphs=not config.enforce_eager,
            decode=self.model_config.tokenizer.decode,
        )
        model = self.engine.model
        model.forward = _padded(model.forward, model.config.virtual_shards)

    async def resume(self, tags: list[str]) -> None:
        """Return at once: the weights are the actor's, and the next batch takes memory for the cache."""

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **others: Any
    ) -> None:
        """Note that the actor has new weights. Nothing is read from `weights`. TpiError: they are not the actor's."""
        if wire_format != "named_tensors" or others.get("peft_config"):
            raise ConfigError("the rollout has the actor's weights: no delta updates, and no adapters beside them")
        self.engine.refit()
        self.global_steps = global_steps

    async def release(self) -> None:
        """Free the cache and the CUDA graphs."""
        self.engine.release()


def _problems(config: Any, actor: Any) -> Iterator[str]:
    for section, fixed, prefix in ((config, ROLLOUT, "rollout"), (actor, ACTOR, "actor.megatron")):
        for key, only in fixed.items():
            value = section
            for part in key.split("."):
                value = getattr(value, part, only)
            if value != only:
                yield f"actor_rollout_ref.{prefix}.{key}={value}: rollout.name={NAME} supports {only} only"
    tp, dp = config.tensor_model_parallel_size, config.data_parallel_size
    of_actor = actor.tensor_model_parallel_size
    expected = {"tensor_model_parallel_size": of_actor, "data_parallel_size": dist.get_world_size() // of_actor}
    if (tp, dp) != tuple(expected.values()):
        keys = ", ".join(f"actor_rollout_ref.rollout.{key}={value}" for key, value in expected.items())
        yield f"the layout of the rollout is the actor's; {keys}"


def _padded(forward: Callable[..., Tensor], shards: int) -> Callable[..., Tensor]:
    """Return the forward pass of a model as verl's actor calls it, with its mask of tokens, [b, s] bool.

    The mask is left out: padding follows all tokens, and no query reads a later key. V divides the padded length.
    """

    @wraps(forward)
    def padded(*args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return forward(*args, **kwargs)
        refuse(["attention_mask: padding precedes a token"] if bool((mask.int().diff(dim=1) > 0).any()) else [])
        more = (0, -mask.shape[1] % shards)
        longer = {name: functional.pad(kwargs[name], more) for name in ("input_ids", "position_ids")}
        return forward(*args, **kwargs | longer | {"attention_mask": None})[:, : mask.shape[1]]

    return padded


def _worker(process: Any) -> Any:
    """Return verl's worker of actor and rollout. process: the Ray actor, which may hold several workers."""
    held = getattr(process, "worker_dict", None) or getattr(process, "fused_worker_dict", None) or {"": process}
    return next(worker for worker in held.values() if isinstance(getattr(worker, "rollout", None), Rollout))


def bind(process: Any) -> tuple[int, tuple[int, ...]]:
    """Bind the rollout of a rank to its actor. returns: the size of the vocabulary, and the tokens that end a text."""
    worker = _worker(process)
    rollout = worker.rollout
    rollout.bind(worker.actor.engine)
    sections = rollout.model_config.generation_config, rollout.model_config.hf_config
    ends = (getattr(section, "eos_token_id", None) for section in sections)
    ids = {id for end in ends if end is not None for id in (end if isinstance(end, list) else [end])}
    return rollout.engine.model.vocab_size, tuple(sorted(ids))


def generate(process: Any, requests: Sequence[Request]) -> tuple[list[Completion], int | None] | None:
    """Complete requests on a rank, the same on all. returns: completions and the step of the weights, on rank 0."""
    rollout = _worker(process).rollout
    step = rollout.global_steps
    completions = rollout.engine.generate([replace(request, id=f"{step}/{request.id}") for request in requests])
    return (completions, step) if dist.get_rank() == 0 else None


def release(process: Any) -> None:
    """Free the cache of a rank."""
    _worker(process).rollout.engine.release()


class Server:
    """Takes verl's requests one by one, and hands all that wait to the ranks as a batch.

    A batch ends with the weights that it began with: verl updates them between batches only.
    """

    def __init__(self, config: Any, vocabulary: int, ends: tuple[int, ...], workers: Sequence[Any]) -> None:
        self.config, self.vocabulary, self.ends, self.workers = config, vocabulary, ends, workers
        self.waiting: dict[str, tuple[Request, asyncio.Future]] = {}
        self.batches: asyncio.Task | None = None
        self.busy, self.resumed = asyncio.Lock(), asyncio.Event()
        self.resumed.set()
        self.rejects = False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **others: Any,
    ) -> TokenOutput:
        """Complete a prompt. TpiError: lists what the rollout does not support; RuntimeError: it takes no requests."""
        if self.rejects:
            raise RuntimeError(REJECTED)
        others |= {"image_data": image_data, "video_data": video_data}
        refuse([f"{name}: the rollout completes text only" for name, value in others.items() if value])
        request = self.request(prompt_ids, sampling_params, request_id)
        check([request], self.vocabulary, self.config.max_model_len, text=True)
        if request.id in self.waiting:
            raise ConfigError(f"request {request_id} waits already, and would have the same draws")
        future = asyncio.get_running_loop().create_future()
        self.waiting[request.id] = request, future
        if self.batches is None or self.batches.done():
            self.batches = asyncio.create_task(self._batches())
        completion, step = await future
        asked = sampling_params.get("logprobs")
        return TokenOutput(
            token_ids=list(completion.tokens),
            log_probs=None if asked is None or asked is False else list(completion.log_probabilities),
            stop_reason=completion.finish_reason,
            extra_fields={"global_steps": step},
        )

    def request(self, prompt_ids: Sequence[int], params: dict[str, Any], request_id: str) -> Request:
        """Return verl's request as ours. Its turns have one id and unlike prompts, hence other draws."""
        greedy = params.get("temperature", 1.0) == 0
        fixed = FIXED if greedy else FIXED | {"temperature": 1.0}
        refuse(
            [f"{key}={params[key]}: must be {value}" for key, value in fixed.items() if params.get(key, value) != value]
            + [f"{key}: rollout.name={NAME} has no such parameter" for key in params.keys() - fixed.keys() - READ]
        )
        draws = {"do_sample": True, "top_k": max(0, params.get("top_k", -1)), "top_p": params.get("top_p", 1.0)}
        left = self.config.prompt_length + self.config.response_length - len(prompt_ids)
        most = params.get("max_new_tokens", params.get("max_tokens", min(self.config.response_length, left)))
        sampling = Sampling(
            max_new_tokens=most,
            eos_token_id=(*(() if self.config.ignore_eos else self.ends), *(params.get("stop_token_ids") or ())),
            stop_strings=params.get("stop") or (),
            **({} if greedy else draws | {"seed": self.config.seed}),
        )
        return Request(f"{request_id}/{len(prompt_ids)}", tuple(prompt_ids), sampling)

    async def _batches(self) -> None:
        while self.waiting:
            await asyncio.sleep(GATHERING)
            await self.resumed.wait()
            async with self.busy:
                batch, self.waiting = self.waiting, {}
                try:
                    results = await self._on_all(generate, [request for request, _ in batch.values()])
                    completions, step = next(result for result in results if result is not None)
                except Exception as error:
                    self._fail(batch, error)
                    continue
                for (_, future), completion in zip(batch.values(), completions, strict=True):
                    future.set_result((completion, step))

    async def _on_all(self, function: Any, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(each.__ray_call__.remote(function, *arguments) for each in self.workers)))

    @staticmethod
    def _fail(batch: dict[str, tuple[Request, asyncio.Future]], error: Exception) -> None:
        for _, future in batch.values():
            future.set_exception(error)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Begin no batch until `resume_generation`, and return when none is in progress.

        reject_request: whether requests fail until then, those that wait included.
        """
        self.resumed.clear()
        self.rejects = reject_request
        async with self.busy:
            if reject_request:
                waiting, self.waiting = self.waiting, {}
                self._fail(waiting, RuntimeError(REJECTED))

    async def resume_generation(self) -> None:
        """Begin batches again."""
        self.rejects = False
        self.resumed.set()

    async def sleep(self) -> None:
        """Free the caches of all ranks, between batches."""
        async with self.busy:
            await self._on_all(release)

    release_kv_cache = sleep

    async def wake_up(self) -> None:
        """Return at once: the next batch takes memory for the cache, and shares no prefixes with the last one."""

    clear_kv_cache = resume_kv_cache = wake_up

    async def start_profile(self, **_: Any) -> None:
        """Return at once: verl profiles the actor's processes, which generate."""

    stop_profile = start_profile


class Replica(RolloutReplica):
    """The one replica: all ranks of the actor. It has no HTTP address."""

    async def launch_servers(self) -> None:
        """Bind all ranks and start the server. TpiError: the rollout is not colocated with the actor."""
        if self.rollout_mode is not RolloutMode.HYBRID:
            raise ConfigError(f"rollout.name={NAME} generates with the actor's module; a colocated trainer, nnodes=0")
        (vocabulary, ends), *_ = await asyncio.gather(*(each.__ray_call__.remote(bind) for each in self.workers))
        name = f"{NAME}_server_{self.replica_rank}{self.name_suffix}"
        options = {"name": name, "max_concurrency": self.max_concurrency}
        server = ray.remote(Server).options(**options).remote(self.config, vocabulary, ends, self.workers)
        self.servers, self._server_handle, self._server_address = [server], server, name


def _of_its_implementation(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def layer_spec(config: Any) -> Any:
        from megatron.bridge.models.gpt_provider import local_layer_spec

        return local_layer_spec(config) if config.transformer_impl == "local" else original(config)

    return layer_spec


LAYERS = Replacement(
    "megatron.bridge.models.gpt_provider:transformer_engine_layer_spec",
    _of_its_implementation,
    "Bridge's providers, which verl builds, take Transformer Engine's layers whatever transformer_impl says",
)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.Rollout"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
if "RANK" in os.environ:
    import_module("tp_invariant_recipes.patch_mode")
    bridge.load()
    apply([LAYERS])

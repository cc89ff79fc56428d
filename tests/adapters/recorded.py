# SPDX-License-Identifier: Apache-2.0
"""The interfaces that the adapters implement, as verl 0.9.1 and NeMo-RL of November 2026 declare them: names, arguments
and defaults. tests/adapters/test_installed_verl.py compares those of verl with an installed one.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace


class BaseRollout(ABC):
    def __init__(self, config, model_config, device_mesh, *args, **kwargs):
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh

    @abstractmethod
    async def resume(self, tags): ...

    @abstractmethod
    async def update_weights(self, weights, wire_format="named_tensors", **kwargs): ...

    @abstractmethod
    async def release(self): ...

    def generate_sequences(self, prompts):
        raise NotImplementedError


class RolloutReplica(ABC):
    def __init__(
        self, replica_rank, config, model_config, gpus_per_node=8, is_reward_model=False, is_teacher_model=False,
        name_suffix="",
    ):  # fmt: skip
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.name_suffix, self.workers, self.max_concurrency = name_suffix, [], 1000

    @abstractmethod
    async def launch_servers(self): ...


# What verl calls on a server: by its replicas, its checkpoint manager and its client.
SERVER = {
    "generate": ("request_id", "prompt_ids", "sampling_params", "image_data", "video_data"),
    "wake_up": (), "sleep": (), "abort_all_requests": ("reject_request",), "resume_generation": (),
    "clear_kv_cache": (), "release_kv_cache": (), "resume_kv_cache": (), "start_profile": (), "stop_profile": (),
}  # fmt: skip


class TokenOutput(SimpleNamespace):
    """Of pydantic in verl."""

    FIELDS = ("token_ids", "log_probs", "routed_experts", "stop_reason", "num_preempted", "extra_fields")


class RolloutMode:
    HYBRID, COLOCATED, STANDALONE = "hybrid", "colocated", "standalone"


class GenerationInterface(ABC):
    @abstractmethod
    def init_collective(self, ip, port, world_size, *, train_world_size): ...

    @abstractmethod
    def generate(self, data, greedy): ...

    @abstractmethod
    def prepare_for_generation(self, *args, **kwargs): ...

    @abstractmethod
    def finish_generation(self, *args, **kwargs): ...

    @abstractmethod
    def shutdown(self): ...

    def prepare_refit_info(self, state_dict_info):
        raise NotImplementedError

    def update_weights_via_ipc_zmq(self):
        raise NotImplementedError

    def blocks_training(self):
        return False

    def wake_carries_weight_updates(self):
        return False


class RolloutReplicaRegistry:
    @classmethod
    def register(cls, name, loader):
        setattr(cls, name, loader)


def _module(name: str, **attributes: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    return module


@contextmanager
def installed(adapter: str) -> Iterator[ModuleType]:
    """The adapter, verl or nemo_rl, imported beside packages that have only the recorded interfaces."""
    base = _module("verl.workers.rollout.base", BaseRollout=BaseRollout, _ROLLOUT_REGISTRY={})
    replica = _module(
        "verl.workers.rollout.replica", RolloutMode=RolloutMode, RolloutReplica=RolloutReplica, TokenOutput=TokenOutput,
        RolloutReplicaRegistry=RolloutReplicaRegistry,
    )  # fmt: skip
    modules = [
        _module("ray", get=lambda values: values), base, replica,
        _module("verl.workers.rollout", base=base, replica=replica), _module("verl.workers"), _module("verl"),
        _module("nemo_rl.models.generation.interfaces", GenerationInterface=GenerationInterface),
        _module("nemo_rl.distributed", model_utils=(utils := _module("nemo_rl.distributed.model_utils"))), utils,
        *map(_module, ("nemo_rl", "nemo_rl.models", "nemo_rl.models.generation")),
    ]  # fmt: skip
    name = f"tp_invariant_recipes.adapters.{adapter}"
    here = {module.__name__: module for module in modules}
    before = {each: sys.modules.pop(each, None) for each in (*here, name)}
    sys.modules |= here
    try:
        yield import_module(name)
    finally:
        for each, module in before.items():
            sys.modules.pop(each, None)
            if module is not None:
                sys.modules[each] = module

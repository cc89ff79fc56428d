# SPDX-License-Identifier: Apache-2.0
"""The adapter in the installed verl, on a CPU: `scripts/try-verl`."""

import asyncio
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters import recorded, verl_toy, verl_trainer
from tests.adapters.verl_toy import ANSWERS, PROMPTS, RESPONSE, Batch
from tests.distributed.ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed; see scripts/try-verl"),
    pytest.mark.release,
    pytest.mark.usefixtures("bridge"),
]
UPDATES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return verl_toy.make_folder(tmp_path_factory.mktemp("verl") / "model")


def updates(mesh, folder):
    """Of each step: the rollout's and the actor's log-probabilities of all tokens, and the addresses of weights."""
    import torch

    from tp_invariant_recipes import Request, Sampling

    verl_toy.set_variables(mesh.rank, mesh.size)
    with verl_toy.on_a_cpu():
        from tp_invariant_recipes.adapters import verl as adapter

        worker, steps = verl_toy.worker(folder, mesh.size), []
        sampling = Sampling(RESPONSE, do_sample=True, top_k=0, seed=42, eos_token_id=1)
        prompts = [prompt for prompt in PROMPTS for _ in range(ANSWERS)]
        for step in range(UPDATES):
            asyncio.run(worker.update_weights(global_steps=step, mode="naive"))
            engine = worker.rollout.engine
            assert {p.data_ptr() for p in engine.model.parameters()} <= {
                p.data_ptr() for module in worker.actor.engine.module for p in module.parameters()
            }
            adapter.generate(worker, [])  # a batch without requests
            requests = [Request(f"{n}", prompt, sampling) for n, prompt in enumerate(prompts)]
            completions = engine.generate([Request(f"{step}/{r.id}", r.tokens, sampling) for r in requests])
            results = adapter.generate(worker, requests)
            assert results == ((completions, step) if mesh.rank == 0 else None)
            batch = Batch(prompts, [each.tokens for each in completions])
            old = batch.old_log_prob(worker)
            rollout = torch.tensor([number for each in completions for number in each.log_probabilities])
            rewards = torch.tensor([sum(each.tokens) % 7 / 7 for each in completions])
            padded = torch.zeros(batch.answered.shape).masked_scatter(batch.answered, rollout)
            steps.append((rollout, old[batch.answered] if old is not None else None))
            batch.update(worker, padded, rewards)
            asyncio.run(worker.rollout.release())
    return steps


def test_the_rollout_and_the_actor_agree_in_all_bits_over_five_updates(folder):
    one, two = on_ranks(1, 8, updates, folder), on_ranks(2, 8, updates, folder)
    texts = []
    for (rollout, old), (sliced, of_slices), (other, _) in zip(*one, *two, strict=True):
        assert rollout.numel() > 60
        assert rollout.tolist() == old.tolist() == sliced.tolist() == of_slices.tolist() == other.tolist()
        texts.append(rollout.tolist())
    assert len({tuple(text) for text in texts}) == UPDATES


def naive(mesh, folder):
    """The same with verl's own rollout over transformers' model."""
    from types import SimpleNamespace

    import torch
    from transformers import AutoModelForCausalLM

    verl_toy.set_variables(0, 1)
    with verl_toy.on_a_cpu():
        from verl import DataProto
        from verl.workers.rollout.naive import NaiveRollout

        worker = verl_toy.worker(folder, 1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        config = SimpleNamespace(response_length=RESPONSE, temperature=1.0, top_k=None, do_sample=True)
        prompts = [PROMPTS[0]] * 8
        ids = torch.tensor(prompts)
        columns = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(3).expand(8, 3),
        }
        torch.manual_seed(1)
        asked = DataProto.from_dict(columns, meta_info={"eos_token_id": [1]})
        # NaiveRollout of verl 0.9.1 is abstract; its method needs a module and a configuration.
        answered = NaiveRollout.generate_sequences(SimpleNamespace(module=model, config=config), asked).batch
        batch = Batch(prompts, answered["responses"].tolist())
        return answered["old_log_probs"].float().flatten(), batch.old_log_prob(worker).flatten()


def test_verls_own_rollout_does_not(folder):
    ((rollout, old),) = on_ranks(1, 8, naive, folder)
    print(f"{int((rollout != old).sum())} of {old.numel()} differ, at most by {(rollout - old).abs().max():.3g}")
    assert (rollout - old).abs().max() < 0.1  # it is the same model
    assert (rollout != old).sum() > old.numel() / 2


def test_verls_servers_and_clients_on_ray(folder, monkeypatch):
    """verl's manager launches the replica, and its client asks through verl's balancer."""
    from types import SimpleNamespace

    import ray
    from verl.workers.rollout.llm_server import LLMServerManager

    import tp_invariant_recipes.adapters.verl  # noqa: F401

    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise it writes a token into the home directory
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
    try:
        process = ray.remote(verl_toy.Process).remote(folder)
        config = verl_toy.configuration(folder, "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
        manager = LLMServerManager.create(config, SimpleNamespace(workers=[process], world_size=1))
        client = manager.get_client()
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

        async def answers():
            asked = (client.generate(f"{n}", prompt_ids=[*p], sampling_params=params) for n, p in enumerate(prompts))
            return await asyncio.gather(*asked)

        prompts = [prompt for prompt in PROMPTS for _ in range(ANSWERS)]
        (replica,) = manager.get_replicas()
        for step in (3, 4):
            ray.get(process.update_weights.remote(step))
            outputs = asyncio.run(answers())
            assert {output.extra_fields["global_steps"] for output in outputs} == {step}
            asyncio.run(replica.sleep())
            old = ray.get(process.old_log_prob.remote(prompts, [output.token_ids for output in outputs]))
            assert [number for output in outputs for number in output.log_probs] == old
    finally:
        ray.shutdown()


# Of verl 0.9.1: the trainer that it deprecates, and its default, whose queue of batches is a package of its own.
TRAINERS = (
    ("trainer.use_v1=false",),
    ("trainer.use_v1=true", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"),
)


@pytest.mark.parametrize("overrides", TRAINERS, ids=("v0", "v1"))
def test_verls_trainer_reports_no_difference_over_five_updates(tmp_path, overrides):
    """`verl.trainer.main_ppo` itself; these numbers are verl's."""
    root = str(Path(__file__).parents[2])
    modules = "tests.adapters.verl_trainer,tp_invariant_recipes.adapters.verl"
    environment = {
        "PYTHONPATH": root, "VERL_USE_EXTERNAL_MODULES": modules, "NVTE_TP_INVARIANT_MODE": "1",
        "TPI_NUMERICS": "portable", "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    words = ["--config-name=ppo_megatron_trainer", *verl_trainer.make(tmp_path), *overrides]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words, f"trainer.total_training_steps={UPDATES}"]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    lines = re.findall(r"step:\d+ - .*", done.stdout)
    assert len(lines) == UPDATES, done.stdout[-3000:] + done.stderr[-3000:]
    for line in lines:
        found = dict(re.findall(r"([\w/]+):(?:np\.float64\()?([-+.\de]+)", line))
        names = ("training/rollout_probs_diff_max", "rollout_corr/log_ppl_abs_diff", "actor/ppo_kl")
        assert [float(found[name]) for name in names] == [0, 0, 0]
        assert float(found["training/rollout_probs_diff_valid"]) == 1
        assert float(found["actor/grad_norm"]) > 0
    assert len({line.partition("actor/entropy:")[2][:12] for line in lines}) == UPDATES


def shape(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_recorded_interface_is_verls():
    from verl.workers.rollout import base, llm_server, replica

    for ours, theirs in ((recorded.BaseRollout, base.BaseRollout), (recorded.RolloutReplica, replica.RolloutReplica)):
        assert ours.__abstractmethods__ == theirs.__abstractmethods__
        for name in ("__init__", *ours.__abstractmethods__):
            assert shape(getattr(ours, name)) == shape(getattr(theirs, name))
    assert set(recorded.TokenOutput.FIELDS) == set(replica.TokenOutput.model_fields)
    called = set(re.findall(r"server\.(\w+)\.remote\(", inspect.getsource(replica)))
    assert called | {"generate"} == set(recorded.SERVER)
    (text,) = re.findall(r"server\.generate\.remote\((.*?)\*\*", inspect.getsource(llm_server), re.S)
    assert tuple(re.findall(r"(\w+)=", text)) == recorded.SERVER["generate"]
    assert ("vllm", "async") in base._ROLLOUT_REGISTRY

# SPDX-License-Identifier: Apache-2.0
"""The adapter for NeMo-RL against its interface as it is recorded."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from tests.adapters import recorded
from tp_invariant_recipes import Completion, TpiError

CONFIG = {
    "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_token_ids": [9], "stop_strings": None,
    "_pad_token_id": 0, "colocated": {"enabled": True},
}  # fmt: skip


class Batch(dict):
    """NeMo-RL's BatchedDataDict is a dict, too."""


class Engine:
    """Completes a prompt with its last token, as often as it has tokens."""

    def __init__(self, model, decode):
        self.called = model

    def generate(self, requests):
        self.called.append(requests)
        lengths = [(r, len(r.tokens)) for r in requests]
        return [
            Completion(r.id, 0, r.tokens[-1:] * n, (-0.5,) * n, (1,) * n, "length" if n > 2 else "stop")
            for r, n in lengths
        ]

    def refit(self):
        self.called.append("refit")

    def release(self):
        self.called.append("release")


@pytest.fixture
def nemo_rl(monkeypatch):
    monkeypatch.setattr("tp_invariant_recipes.features.rollouts.engine.Engine", Engine)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with recorded.installed("nemo_rl") as module:
        yield module


def policy(**changes):
    rank = SimpleNamespace(model=[])
    rank.__ray_call__ = SimpleNamespace(remote=lambda function, *arguments: function(rank, *arguments))
    return SimpleNamespace(cfg={"generation": CONFIG | changes}, worker_group=SimpleNamespace(workers=[rank]))


def test_the_class_has_the_methods_of_the_interface(nemo_rl):
    for name, method in inspect.getmembers(recorded.GenerationInterface, inspect.isfunction):
        names = [(p.name, p.kind) for p in inspect.signature(method).parameters.values()]
        keywords = {n: None for n, kind in names[1:] if kind is not inspect.Parameter.VAR_KEYWORD and n != "args"}
        inspect.signature(getattr(nemo_rl.Generation, name)).bind(None, **keywords)
    assert not nemo_rl.Generation.__abstractmethods__


def test_rows_are_completed_and_padded_on_the_right(nemo_rl):
    trained = policy()
    generation = nemo_rl.Generation(trained, seed=3)
    data = Batch(
        input_ids=torch.tensor([[5, 6, 7], [8, 0, 0]]), input_lengths=torch.tensor([3, 1]), stop_strings=[["x"], None]
    )
    result = generation.generate(data, greedy=False)
    assert type(result) is Batch
    assert result["output_ids"].tolist() == [[5, 6, 7, 7, 7, 7], [8, 8, 0, 0, 0, 0]]
    assert result["logprobs"].tolist() == [[0, 0, 0, -0.5, -0.5, -0.5], [0, -0.5, 0, 0, 0, 0]]
    assert result["generation_lengths"].tolist() == [3, 1]
    assert result["unpadded_sequence_lengths"].tolist() == [6, 2]
    assert result["truncated"].tolist() == [True, False]
    generation.generate(data, greedy=True)
    first, second = trained.worker_group.workers[0].model
    assert [r.id for r in first + second] == ["0/0", "0/1", "1/0", "1/1"]
    assert (first[0].sampling.stop_strings, first[1].sampling.stop_strings) == (("x",), ())
    assert (first[0].sampling.seed, first[0].sampling.top_k, first[0].sampling.eos_token_id) == (3, 0, (9,))
    assert [r.sampling.do_sample for r in first + second] == [True, True, False, False]


def test_a_refit_copies_nothing_and_leaves_the_model_where_it_is(nemo_rl):
    trained = policy()
    generation = nemo_rl.Generation(trained)
    trained.offload_before_refit()
    assert generation.prepare_for_generation(tags=["weights"])
    assert trained.stream_weights_via_ipc_zmq(buffer_size_bytes=1) == generation.update_weights_via_ipc_zmq() == []
    trained.offload_after_refit()
    assert generation.finish_generation(release_gpu=False)
    assert generation.finish_generation()
    assert generation.shutdown()
    assert trained.worker_group.workers[0].model == ["refit", "refit", "release", "release"]
    assert generation.blocks_training()
    assert generation.wake_carries_weight_updates()


def test_what_it_does_not_support_is_listed(nemo_rl):
    wrong = policy(temperature=0.7, colocated={"enabled": False})
    wrong.cfg["sequence_packing"] = {"enabled": True}
    with pytest.raises(TpiError) as error:
        nemo_rl.Generation(wrong)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "policy.generation.temperature",
        "policy.generation.colocated.enabled",
        "policy.sequence_packing.enabled",
    ]
    with pytest.raises(TpiError, match="enabled=true"):
        nemo_rl.Generation(policy()).init_collective("h", 1, 2, train_world_size=1)

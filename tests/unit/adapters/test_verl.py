# SPDX-License-Identifier: Apache-2.0
"""The adapter for verl against verl's interface as it is recorded; tests/adapters runs it in verl."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import torch

from tests.adapters import recorded
from tp_invariant_recipes import Completion, TpiError

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CONFIG = {
    "prompt_length": 8, "response_length": 4, "ignore_eos": False, "seed": 42, "temperature": 1.0, "dtype": "bfloat16",
    "tensor_model_parallel_size": 2, "data_parallel_size": 2, "max_num_seqs": 5, "max_num_batched_tokens": 64,
    "enforce_eager": True, "max_model_len": 12,
}  # fmt: skip
ACTOR = {"param_offload": False, "use_remove_padding": False, "tensor_model_parallel_size": 2}


@pytest.fixture
def verl():
    with recorded.installed("verl") as module:
        yield module


class Rank:
    """A handle of Ray's on a rank. calls: the functions that it was called with, and their arguments."""

    def __init__(self, results=lambda function, *_: None):
        self.calls, self.results = [], results
        self.__ray_call__ = SimpleNamespace(remote=self.call)

    async def call(self, function, *arguments):
        self.calls.append((function.__name__, *arguments))
        await asyncio.sleep(0.01)
        return self.results(function, *arguments)


def echo(function, *arguments):
    if function.__name__ == "generate":
        requests = arguments[0]
        return [
            Completion(r.id, 0, r.tokens[::-1], tuple(-float(t) for t in r.tokens), (), "stop") for r in requests
        ], 7
    return None


def served(verl, script, ranks, **config):
    async def main():
        return await script(verl.Server(SimpleNamespace(**CONFIG | config), 64, (1, 2), ranks))

    return asyncio.run(main())


def test_the_classes_have_the_methods_of_the_interface(verl):
    verl.Rollout(None, None, None)
    verl.Replica(0, None, None)
    for ours, interface in ((verl.Rollout, recorded.BaseRollout), (verl.Replica, recorded.RolloutReplica)):
        for name in interface.__abstractmethods__:
            expected = inspect.signature(getattr(interface, name)).parameters
            inspect.signature(getattr(ours, name)).bind(*[n for n in expected if n != "kwargs"])
            assert inspect.iscoroutinefunction(getattr(ours, name))
    for name, keywords in recorded.SERVER.items():
        inspect.signature(getattr(verl.Server, name)).bind(None, **dict.fromkeys(keywords))
    assert verl.base._ROLLOUT_REGISTRY == {("tpi", "async"): "tp_invariant_recipes.adapters.verl.Rollout"}
    assert recorded.RolloutReplicaRegistry.tpi() is verl.Replica


def test_requests_that_wait_are_one_batch_on_all_ranks(verl):
    async def script(server):
        return await asyncio.gather(*(server.generate(p, dict(PARAMS), f"r{n}") for n, p in enumerate(((3, 4), (5,)))))

    ranks = [Rank(echo), Rank()]
    first, second = served(verl, script, ranks)
    ((name, requests),) = ranks[0].calls
    assert (name, [r.id for r in requests]) == ("generate", ["r0/2", "r1/1"])
    assert ranks[1].calls == ranks[0].calls
    sampling = requests[0].sampling
    assert (sampling.max_new_tokens, sampling.top_k, sampling.seed, sampling.eos_token_id) == (4, 0, 42, (1, 2))
    assert (first.token_ids, first.log_probs, first.stop_reason) == ([4, 3], [-3.0, -4.0], "stop")
    assert second.extra_fields == {"global_steps": 7}


@pytest.mark.parametrize("asked, expected", ((True, [-3.0]), (0, [-3.0]), (False, None), (None, None)))
def test_log_probabilities_are_returned_where_they_are_asked_for(verl, asked, expected):
    async def script(server):
        return await server.generate((3,), PARAMS | {"logprobs": asked}, "a")

    assert served(verl, script, [Rank(echo)]).log_probs == expected


def test_greedy_parameters_and_limits(verl):
    async def script(server):
        one = server.request((3, 4), {"temperature": 0, "top_p": 1.0, "top_k": -1, "max_tokens": 2}, "a").sampling
        return one, server.request((3,) * 10, PARAMS, "b").sampling

    one, two = served(verl, script, [], ignore_eos=True)
    assert (one.do_sample, one.max_new_tokens, one.eos_token_id) == (False, 2, ())
    assert two.max_new_tokens == 2  # what prompt_length + response_length leave


@pytest.mark.parametrize(
    "change, expected",
    (
        ({"temperature": 0.7}, "temperature=0.7: must be 1.0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: must be 1.0"),
        ({"prompt_logprobs": 3}, "prompt_logprobs: rollout.name=tpi has no such parameter"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0"),
    ),
)
def test_parameters_that_have_no_meaning_are_refused(verl, change, expected):
    async def script(server):
        await server.generate((3, 4), PARAMS | change, "a")

    with pytest.raises(TpiError, match=expected):
        served(verl, script, [Rank(echo)])


@pytest.mark.parametrize(
    "prompt, expected",
    (((), "an empty prompt"), ((64,), "64"), ((3,) * 12, "max_new_tokens=0"), ((3,) * 9, "more than")),
)
def test_a_wrong_prompt_is_refused_before_it_joins_a_batch(verl, prompt, expected):
    async def script(server):
        good = asyncio.create_task(server.generate((3, 4), PARAMS, "good"))
        with pytest.raises(TpiError, match=expected):
            await server.generate(prompt, PARAMS | ({"max_tokens": 4} if len(prompt) == 9 else {}), "bad")
        return await good

    assert served(verl, script, [Rank(echo)]).token_ids == [4, 3]


def test_images_and_an_id_that_waits_already_are_refused(verl):
    async def script(server):
        with pytest.raises(TpiError, match="image_data: the rollout completes text only"):
            await server.generate((3,), PARAMS, "a", image_data=[1])
        first = asyncio.create_task(server.generate((3,), PARAMS, "a"))
        await asyncio.sleep(0)
        with pytest.raises(TpiError, match="waits already"):
            await server.generate((3,), PARAMS, "a")
        return await first

    assert served(verl, script, [Rank(echo)]).token_ids == [3]


def test_a_failed_batch_fails_its_requests_and_no_later_one(verl):
    def fails(function, requests):
        if requests[0].id == "a/1":
            raise ValueError("a rank is gone")
        return echo(function, requests)

    async def script(server):
        with pytest.raises(ValueError, match="a rank is gone"):
            await server.generate((3,), PARAMS, "a")
        return await server.generate((3,), PARAMS, "b")

    assert served(verl, script, [Rank(fails)]).token_ids == [3]


def test_an_abort_waits_for_the_batch_in_progress_and_holds_the_next(verl):
    async def script(server):
        first = asyncio.create_task(server.generate((3,), PARAMS, "a"))
        await asyncio.sleep(verl.GATHERING + 0.005)
        await server.abort_all_requests()
        await asyncio.sleep(0)
        assert first.done()
        second = asyncio.create_task(server.generate((4,), PARAMS, "b"))
        await asyncio.sleep(5 * verl.GATHERING)
        assert not second.done()
        await server.resume_generation()
        await second
        third = asyncio.create_task(server.generate((5,), PARAMS, "c"))
        await asyncio.sleep(0)
        await server.abort_all_requests(reject_request=True)
        for refused in (third, server.generate((6,), PARAMS, "d")):
            with pytest.raises(RuntimeError, match="until generation resumes"):
                await refused
        await server.resume_generation()
        await server.sleep()
        return await server.generate((7,), PARAMS, "e")

    ranks = [Rank(echo)]
    assert served(verl, script, ranks).token_ids == [7]
    assert [name for name, *_ in ranks[0].calls] == ["generate", "generate", "release", "generate"]


def test_what_the_rollout_does_not_support_is_listed(verl, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    rollout = verl.Rollout(SimpleNamespace(**CONFIG), SimpleNamespace(tokenizer=None), None)
    engine = SimpleNamespace(**ACTOR)
    assert not [*verl._problems(rollout.config, engine)]
    config = CONFIG | {"temperature": 0.5, "disaggregation": SimpleNamespace(enabled=True), "data_parallel_size": 1}
    rollout.config = SimpleNamespace(**config)
    with pytest.raises(TpiError) as error:
        rollout.bind(SimpleNamespace(engine_config=SimpleNamespace(**ACTOR | {"param_offload": True})))
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "actor_rollout_ref.rollout.temperature=0.5",
        "actor_rollout_ref.rollout.disaggregation.enabled=True",
        "actor_rollout_ref.actor.megatron.param_offload=True",
        "the layout of the rollout is the actor's; actor_rollout_ref.rollout.tensor_model_parallel_size=2, "
        "actor_rollout_ref.rollout.data_parallel_size=2",
    ]


def test_weights_that_are_not_the_actors_are_refused(verl):
    rollout = verl.Rollout(None, None, None)
    for changes in ({"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}):
        with pytest.raises(TpiError, match="the rollout has the actor's weights"):
            asyncio.run(rollout.update_weights(iter(()), **changes))


def test_a_replica_beside_the_actor_is_refused(verl):
    replica = verl.Replica(0, None, None)
    replica.rollout_mode = verl.RolloutMode.STANDALONE
    with pytest.raises(TpiError, match="nnodes=0"):
        asyncio.run(replica.launch_servers())


def test_the_forward_pass_gets_whole_shards_and_no_mask(verl):
    def forward(input_ids, position_ids, attention_mask):
        seen.append((input_ids.tolist(), position_ids.tolist(), attention_mask))
        return input_ids.unsqueeze(-1)

    seen = []
    padded = verl._padded(forward, 4)
    ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[True, True, True], [True, False, False]])
    assert padded(input_ids=ids, position_ids=ids, attention_mask=mask).squeeze(-1).tolist() == ids.tolist()
    assert seen == [([[5, 6, 7, 0], [8, 0, 0, 0]],) * 2 + (None,)]
    assert padded(ids, ids, attention_mask=None).shape == (2, 3, 1)
    with pytest.raises(TpiError, match="padding precedes a token"):
        padded(input_ids=ids, position_ids=ids, attention_mask=mask.flip(1))

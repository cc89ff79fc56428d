# SPDX-License-Identifier: Apache-2.0
"""The engine of rollouts: one outcome for every batch, order, chunk and block, with the bits of `tpi score`.

A rank loads a model once and runs all variants on it.
"""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests import hf_folders
from tp_invariant_recipes.features.rollouts.requests import Request, Sampling
from tp_invariant_recipes.features.score import workflow as score
from tp_invariant_recipes.launch import local

pytestmark = pytest.mark.usefixtures("modelopt", "portable_loops")

DENSE = ("model.num_layers=1", "model.num_query_groups=4", "model.vocab_size=512")
MOE = (
    *("model.num_layers=1", "model.hidden_size=64", "model.moe_ffn_hidden_size=64", "model.num_attention_heads=4"),
    *("model.num_query_groups=4", "model.kv_channels=16", "model.vocab_size=512"),
)
FOLDERS = {"dense": ("qwen3_toy", DENSE), "experts": ("qwen3_moe_toy", MOE)}
LENGTHS = (1, 17, 40, 70)
# Name -> options of the engine, and the order of requests.
VARIANTS = {
    "first": ({}, 1), "one at a time": ({"sequences": 1}, 1), "chunks": ({"chunk": 7, "block": 16}, -1),
    "a token a pass": ({"chunk": 1, "block": 8}, 1), "preempted": ({"tokens": 104, "block": 8}, 1),
    "digests": ({"digests": True, "block": 4}, -1),
}  # fmt: skip
SHORT = ("first", "chunks", "preempted")  # in `make test`


def requests() -> list[Request]:
    """Greedy and drawn, several samples, two prompts that begin alike, one that is there twice; the first ends last."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(512) for _ in range(length)) for length in LENGTHS]
    prompts += [prompts[3], (*prompts[3][:40], 5, 6)]
    drawn = {"do_sample": True, "temperature": 0.5, "num_return_sequences": 2}
    return [
        Request(f"r{n}", tokens, Sampling(max_new_tokens=4 + (not n), **(drawn | {"seed": n} if n % 2 else {})))
        for n, tokens in enumerate(prompts)
    ]


@contextmanager
def library_attention() -> Iterator[None]:
    """The control: attention to the same cached keys by a library's softmax."""
    from tp_invariant_recipes.portable import cached_pass

    def attend(query, keys, values, spans, scale):
        out = torch.zeros_like(query)
        for first, count, *blocks in spans.tables.tolist():
            for row in range(first, first + count):
                at = torch.arange(int(spans.positions[row]) + 1)
                slots = torch.tensor(blocks)[at // spans.size] * spans.size + at % spans.size
                k, v = (x[slots].repeat_interleave(query.shape[1] // x.shape[1], 1).float() for x in (keys, values))
                weights = (torch.einsum("hd,shd->hs", query[row].float(), k) * scale).softmax(-1)
                out[row] = torch.einsum("hs,shd->hd", weights, v).bfloat16()
        return out

    with mock.patch.object(cached_pass, "cached_attention", attend):
        yield


@contextmanager
def recomputing(model) -> Iterator[None]:
    """The model as a training that computes norms and MLPs again has it; here whatever does so fails."""
    from megatron.core import tensor_parallel
    from megatron.core.utils import unwrap_model

    fails = mock.Mock(side_effect=AssertionError("recomputed"))
    layer = unwrap_model(model).decoder.layers[0]
    layer.recompute_mlp = layer.recompute_input_layernorm = True
    with mock.patch.multiple(tensor_parallel, checkpoint=fails, CheckpointWithoutOutput=fails):
        yield
    assert layer.recompute_mlp
    assert layer.recompute_input_layernorm
    layer.recompute_mlp = layer.recompute_input_layernorm = False


def plain(completions) -> list:
    return [
        [c.request, c.sample, c.tokens, c.log_probabilities, c.ranks, c.finish_reason]
        for c in sorted(completions, key=lambda c: (c.request, c.sample))
    ]


@dataclass(frozen=True)
class AuditRun:
    """What the rank does; it writes what all variants gave."""

    config: object
    variants: tuple[str, ...]
    out: Path

    def __call__(self, run_dir, rank_info) -> None:
        from tp_invariant_recipes.features.inference.rank import leave, loaded_model
        from tp_invariant_recipes.features.rollouts.engine import Engine
        from tp_invariant_recipes.start import bridge

        bridge.load()
        with ExitStack() as stack, torch.no_grad():
            model = loaded_model(stack, self.config, None)
            result, before = {"defined": self._drawn_from_whole_passes(model)}, self._state(model)
            engines = {}
            for name in self.variants:
                options, order = VARIANTS[name]
                engine, ended = Engine(model, **options), []
                engines[name] = engine
                completions = engine.generate(requests()[::order], ended.append)
                assert [(c.request, c.sample) for c in completions] == [
                    (r.id, n) for r in requests()[::order] for n in range(r.sampling.num_return_sequences)
                ]
                result[name] = plain(completions)
                result[f"{name}: preemptions"] = engine.preemptions
                result[f"{name}: ended"] = len(ended)
            assert self._state(model) == before
            result["refit"], result["new"] = self._refitted(engine, model)
            longer = [replace(request, tokens=request.tokens * 3) for request in requests()]
            if self.variants == SHORT:
                longer = longer[3:]
            with recomputing(model):
                primed = Engine(model)
                result["in a training that recomputes"] = plain(primed.generate(requests()))
            # Blocks enough are there for the last of them, but no table has so many.
            for name, engine, more in (("longer", primed, longer), ("fewer", engines["first"], longer[-1:])):
                result[name], result[f"{name} alone"] = (plain(each.generate(more)) for each in (engine, Engine(model)))
            with library_attention():
                result["library"] = plain(Engine(model).generate(requests()))
            result["score"] = self._scores(model, result["first"])
            self.out.write_text(json.dumps(result))
            leave()

    def _refitted(self, engine, model) -> tuple[list, list]:
        """After the weights have changed in place: what this engine gives, and a new one. They are as before then."""
        from tp_invariant_recipes.features.rollouts.engine import Engine

        kept = [weight.clone() for weight in model.parameters()]
        for weight in model.parameters():
            weight.mul_(1.5)
        engine.refit()
        result = plain(engine.generate(requests())), plain(Engine(model).generate(requests()))
        for weight, values in zip(model.parameters(), kept, strict=True):
            weight.copy_(values)
        return result

    def _drawn_from_whole_passes(self, model) -> list[list[int]]:
        """Tokens of each sample, by the model's forward pass over all tokens before, and the definition of a draw."""
        from megatron.core.utils import unwrap_model

        from tp_invariant_recipes.numerics import mode
        from tp_invariant_recipes.numerics.layers import cross_entropy
        from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
        from tp_invariant_recipes.portable.ieee.draw import draw, request_key

        config, group = unwrap_model(model).config, unwrap_model(model).pg_collection.tp
        mesh, kernels = VirtualMesh.from_group(config.virtual_shards, group), mode.mode_of(config).cross_entropy()
        several = requests()[: 2 if self.variants == SHORT else None]  # a greedy one, and two that are drawn
        samples = [(request, n) for request in several for n in range(request.sampling.num_return_sequences)]
        drawn: list[list[int]] = [[] for _ in samples]
        for (request, sample), tokens in zip(samples, drawn, strict=True):
            for position in range(request.sampling.max_new_tokens):
                whole = [*request.tokens, *tokens]
                ids = torch.tensor([whole + [0] * (-len(whole) % 64)])
                logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], attention_mask=None)
                row = cross_entropy.log_probabilities(logits[0, len(whole) - 1][None], mesh, kernels)
                key = torch.tensor([[request_key(request.sampling.seed, request.id), sample, position]])
                numbers = torch.tensor([request.sampling.numbers], dtype=torch.float64)
                tokens += draw(row[:, :512].contiguous(), key, numbers).tolist()
        return drawn

    def _state(self, model) -> list:
        """What a training reads of a model, and must find as it was."""
        modules = [*model.modules()]
        return [(module.training, getattr(module, "post_process", None), id(module)) for module in modules]

    def _scores(self, model, completions) -> list:
        from tp_invariant_recipes.data.sequences import Sequence
        from tp_invariant_recipes.features.score.rank import Forward, Wanted

        prompts = {request.id: request.tokens for request in requests()}
        window = [
            Sequence(id=f"{name}.{sample}", tokens=[*prompts[name], *tokens], first=len(prompts[name]))
            for name, sample, tokens, *_ in completions
        ]
        scores = Forward(model, self.config, Wanted(ranks=True)).window(window, 4096)
        return [[values[0].tolist(), values[1].tolist()] for values in scores]


def run(model: str, variants: tuple[str, ...], out: str) -> None:
    """In the folder of the tests: launch a rank, and end this process."""
    words, file = ["device=cpu", "numerics=portable"], Path("s.jsonl")
    scoring = score.plan(score.ScoreRequest(Path(model), file, words, Path(f"{out}.scores")), file)
    scoring.plan.run_dir.logs.mkdir(parents=True)
    outcome = local.run(
        scoring.plan, lambda: None, rank_fn=AuditRun(scoring.plan.config, variants, Path(out).absolute())
    )
    sys.exit(outcome is not local.Outcome.COMPLETED)


# Layouts: test_rollouts.py.
WHOLE = {"dense": SHORT, "all of dense": tuple(VARIANTS), "all of experts": tuple(VARIANTS)}


@pytest.fixture(
    scope="module",
    params=[name if name == "dense" else pytest.param(name, marks=pytest.mark.release) for name in WHOLE],
)
def whole(request, shared):
    """What a model gave, by variant."""
    name = request.param.split()[-1]
    folder, out = shared.folder / name, f"{request.param}.json"
    if not folder.exists():
        model, overrides = FOLDERS[name]
        hf_folders.make(folder, hf_folders.model_section(model, *overrides))
    (shared.folder / "s.jsonl").write_text('{"id": "a", "tokens": [1, 2]}\n')
    shared("generate", before=partial(run, name, WHOLE[request.param], out), status=0)
    return json.loads((shared.folder / out).read_text())


def test_batches_orders_chunks_blocks_and_preemption_change_nothing(whole):
    names = [name for name in VARIANTS if name in whole]
    assert {*SHORT} <= {*names}
    for name in names:
        assert whole[name] == whole["first"], name
        assert whole[f"{name}: ended"] == len(whole["first"]) == 9
        assert (whole[f"{name}: preemptions"] > 0) == (name == "preempted")


def test_tokens_are_drawn_as_defined_from_whole_passes(whole):
    tokens = [row[2] for row in whole["first"]]
    assert tokens[: len(whole["defined"])] == whole["defined"] != []
    assert len(whole["defined"]) == (len(tokens) if set(VARIANTS) <= set(whole) else 3)


def test_an_engine_takes_longer_requests_later(whole):
    assert whole["longer"] == whole["longer alone"] != whole["first"]
    assert whole["fewer"] == whole["fewer alone"] != []


def test_a_training_that_recomputes_changes_nothing(whole):
    assert whole["in a training that recomputes"] == whole["first"]


def test_log_probabilities_and_ranks_are_those_of_scores(whole):
    assert [[row[3], row[4]] for row in whole["first"]] == whole["score"]


def test_a_library_s_attention_has_others(whole):
    """The control."""
    first, other = ([row[3] for row in whole[name]] for name in ("first", "library"))
    assert sum(a != b for a, b in zip(first, other, strict=True)) > len(first) // 2


def test_changed_weights_are_seen(whole):
    assert whole["refit"] == whole["new"] != whole["first"]

# SPDX-License-Identifier: Apache-2.0
"""Steps in a graph whose experts lack slots are computed again, in whole runs of two CPU ranks.

A processor has no CUDA graphs. Here a step "in a graph" runs eagerly, with the slots, empty rows and counts of a graph.
"""

import signal
from collections import deque

import pytest

from tests.distributed.faults import at_step, reached, stop, wait_for_sigterm
from tests.distributed.scenario import Scenario, unequal
from tp_invariant_recipes.ledger.open import read

EXPERTS = (
    "qwen3_moe_toy seq=64 gbs=4 iters=7 numerics.data_shards=2 numerics.expert_groups=2 model.num_layers=2 "
    "model.hidden_size=64 model.moe_ffn_hidden_size=64 model.num_attention_heads=4 model.num_query_groups=4 "
    "model.kv_channels=16 model.vocab_size=512 model.ffn_hidden_size=128 model.num_moe_experts=8 save=0 "
    "ledger.digests=1 ledger.state_digests=1 dp=2 ep=2 optimizer.use_distributed_optimizer=true"
)
OVERLAP = (
    "ddp.overlap_grad_reduce=true ddp.bucket_size=20000 ddp.overlap_param_gather=true "
    "optimizer.overlap_param_gather=true"
)
BIASES = (
    "model.moe_router_enable_expert_bias=true model.moe_router_score_function=sigmoid "
    "model.moe_router_load_balancing_type=none"
)
COMBINED = "gbs=8 model.overlap_moe_expert_parallel_comm=true"
WARM_UP = 3
AGAIN = "a step needs more slots for experts than its CUDA graph has"


def graphs(margin: float, blind: bool = False):
    """What to do before the command. margin: of slots. blind: nobody looks whether slots lacked."""

    def plant() -> None:
        from megatron.bridge.training import train
        from megatron.core.full_cuda_graph import StaticBufferLoader

        from tp_invariant_recipes.numerics.layers.experts import token_dispatcher
        from tp_invariant_recipes.numerics.layers.formats.plain import Plain

        class Eager:
            """Megatron's FullCudaGraphWrapper, but for the graph."""

            cuda_graph, result, curr_iteration = {"training": None}, {"training": None}, {"training": 0}
            capturing = False

            def __init__(self, function, **_):
                self.function, self.cuda_graph_warmup_steps = function, WARM_UP

            def data_read(self, data_iterator, model, training, num_microbatches):
                source = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
                return [next(source) for _ in range(num_microbatches)]

            def __call__(self, *, data_iterator, num_microbatches, **kwargs):
                batches = StaticBufferLoader.static_buffers["training"]
                batches[:] = self.data_read(data_iterator, kwargs["model"], True, num_microbatches)
                if self.curr_iteration["training"] == WARM_UP:
                    assert self.cuda_graph["training"] is None
                    self.cuda_graph["training"] = "graph"
                Eager.capturing = self.cuda_graph["training"] is not None
                result = self.function(data_iterator=iter(batches), num_microbatches=num_microbatches, **kwargs)
                Eager.capturing = False
                self.curr_iteration["training"] += 1
                return result

        train.FullCudaGraphWrapper = Eager
        train.is_full_iteration_cuda_graph = lambda _: True
        token_dispatcher.MARGIN = margin
        token_dispatcher.capturing = lambda _: Eager.capturing

        class Groups(token_dispatcher.Groups):
            """With sizes in a graph, too, which GEMMs of a CPU need."""

            def __init__(self, sizes, counts, total=0):
                if total:
                    ends = counts.cumsum(0).clamp(max=total)
                    sizes = tuple(ends.diff(prepend=ends.new_zeros(1)).tolist())
                super().__init__(sizes, counts, total)

        token_dispatcher.Groups = Groups
        multiply, add = Plain.multiply_groups, Plain.add_gradients

        def multiply_filled(self, rows, across, out, groups, *, forward):
            filled = sum(groups.sizes)
            multiply(self, rows[:filled], across, out[:filled], groups, forward=forward)
            return out

        def add_filled(self, dy, kept, outs, batches):
            filled = sum(batches.groups.sizes)
            add(self, dy[:filled], [x[:filled] for x in kept], outs, batches)

        Plain.multiply_groups, Plain.add_gradients = multiply_filled, add_filled
        if blind:
            token_dispatcher.Room.limited = lambda self, most, filled: int(self.most * margin)

    return plant


@pytest.mark.parametrize(
    "more",
    (
        "",
        f"{OVERLAP} {BIASES}",
        pytest.param("validation.eval_interval=2 validation.eval_iters=1 model.mtp_num_layers=1 "
            "model.mtp_loss_scaling_factor=0.1 model.moe_expert_capacity_factor=1.0", marks=pytest.mark.release),
        pytest.param(f"gbs=8 {BIASES}", marks=pytest.mark.release),
    ),
    ids=("plain", "overlap and biases", "validation, MTP, capacity", "combined schedule"),
)  # fmt: skip
def test_a_run_has_the_ledger_of_one_without_graphs(scenario, more):
    """Steps 4 to 7 are in graphs; with a margin below 1 the first of them is void, and computed again."""
    run = scenario(EXPERTS, more)
    steps = run.ledger()
    for margin in (1.25, 0.9):
        graphed = run(more.replace("gbs=8", COMBINED)).planted(graphs(margin))
        assert unequal(steps, graphed.ledger()) == []
        assert (AGAIN in (graphed.run / "logs" / "rank-0.log").read_text()) == (margin < 1)


def test_slots_that_lack_unseen_change_the_run(scenario):
    run = scenario(EXPERTS)
    assert unequal(run.ledger(), run.planted(graphs(0.9, blind=True)).ledger())[0].startswith("step 4")


@pytest.mark.release
@pytest.mark.parametrize("lost", (False, True))
def test_a_run_that_stops_among_graphs_goes_on_with_its_data(tpi, lost):
    """Step 6's data is read as step 5 computes, and SIGTERM comes then. The control loses what is read ahead."""
    words = f"{EXPERTS} iters=10 data=text data.path=words.txt"
    (tpi.folder / "words.txt").write_text("".join(f"It was the best of times number {n}. " for n in range(400)))
    steps = Scenario(tpi, tpi.folder)(words).ledger()

    def plant() -> None:
        from tp_invariant_recipes.numerics.megatron import graph_room

        graphs(1.25)()
        if not run.exists():
            at_step(5, wait_for_sigterm)()
        if lost:
            ahead = graph_room._read_ahead
            graph_room._read_ahead = lambda *a, **more: ahead(*a, **more) and deque()

    run = tpi.folder / "run"
    stopped = tpi.start("train", *words.split(), "save=100", f"run.dir={run}", before=plant)
    stop(stopped, reached(tpi.folder, 5), signal.SIGTERM, 0)
    assert "stopped at step 5 of 10" in stopped.stderr
    tpi("train", "--resume", run, before=plant, status=0)
    differing = unequal(steps, list(read(run).steps))
    assert (differing[0] if lost else differing) == ("step 5: loss" if lost else [])

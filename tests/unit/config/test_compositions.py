# SPDX-License-Identifier: Apache-2.0
"""A configuration is composed once a command, and what is composed is passed on."""

import pytest

from tp_invariant_recipes.config import hydra_tree
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.jobs import slurm_client, submit
from tp_invariant_recipes.launch.record import RunRequest

pytestmark = pytest.mark.usefixtures("here", "no_gpus")

CPUS = ("cluster.name=site", "cluster.gpus_per_node=0", "cluster.ranks_per_node=4")
JOB = ("tp=2", "slurm.time=5", "cuda_graph=off")


@pytest.fixture
def compositions(monkeypatch) -> list[tuple[str, ...]]:
    """What Hydra is asked to merge, as it is asked."""
    asked: list[tuple[str, ...]] = []
    merged = hydra_tree.merged

    def counted(options, *more):
        asked.append(tuple(options))
        return merged(options, *more)

    monkeypatch.setattr(hydra_tree, "merged", counted)
    monkeypatch.setattr(slurm_client, "partitions", lambda: [slurm_client.Partition("cpu", True, 9, None)])
    return asked


def request(*overrides: str, **how) -> RunRequest:
    return RunRequest("qwen3_toy", tuple(parse_all(overrides)), **how)


NODES = (CPUS, ("cluster=h100", "cluster.ranks_per_node=4"), ("cluster=h200",), ("cuda_graph=auto", "cluster=h100"))


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_a_submission_composes_once(compositions, nodes):
    submit.train("qwen3_toy", [*JOB, *nodes])
    assert len(compositions) == 1


def test_a_field_of_graphs_in_a_file_of_ones_own_counts(compositions, tmp_path):
    (tmp_path / "site.yaml").write_text(
        "# @package _global_\ndefaults:\n  - h100\nddp:\n  check_for_nan_in_grad: true\n"
    )
    composed = compose("qwen3_0p6b", ["tp=2", f"cluster={tmp_path}/site.yaml"], device="gpu")
    assert composed.config.section("ddp")["check_for_nan_in_grad"] is True
    assert composed.graphs == "te"
    assert len(compositions) == 1


def test_a_file_that_hides_what_its_nodes_have_is_recomposed_for_these(compositions, tmp_path):
    hidden = "cluster:\n  gpus_per_node: ${validation.eval_iters}\n"
    (tmp_path / "site.yaml").write_text(f"# @package _global_\ndefaults:\n  - local\n{hidden}  ranks_per_node: 4\n")
    result = submit.train("qwen3_toy", [*JOB, f"cluster={tmp_path}/site.yaml"])
    assert "cpu ranks" in result.about
    assert len(compositions) == 2

"""`slurm.nodes=2-4`: the largest dp that so many nodes take, with the bits of the one asked for; else a refusal."""

import pytest

from tp_invariant_recipes.config import elastic
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError, lines
from tp_invariant_recipes.jobs import submit
from tp_invariant_recipes.launch.plan import Planning
from tp_invariant_recipes.multinode import srun_command
from tp_invariant_recipes.settings.run_config import RunConfig

DRY = Planning(here=False, dry=True)

NODES = ("cluster.name=here", "cluster.gpus_per_node=0", "slurm.time=10", "device=cpu", "launcher=slurm")
STOCK = ("qwen3_toy", "tp=2", "dp=4", "gbs=8", "numerics=stock", "cluster.ranks_per_node=2", "slurm.nodes=1-4")


def elastic_config(model: str, *overrides: str) -> RunConfig:
    return compose(model, [*NODES, *overrides]).config


@pytest.mark.parametrize("nodes, dp", ((1, 1), (2, 2), (3, 2), (4, 4), (5, 4)))
def test_the_largest_dp_that_divides_and_fits(nodes, dp):
    assert elastic.data_parallel(elastic_config(*STOCK), nodes) == dp
    assert lines(elastic.problems(elastic_config(*STOCK))) == []


def test_a_model_on_two_nodes_needs_two():
    wide = elastic_config(*STOCK, "tp=4", "dp=2", "slurm.nodes=2-4")
    assert [elastic.data_parallel(wide, nodes) for nodes in (1, 2, 3, 4)] == [None, 1, 1, 2]


def test_data_shards_are_those_of_the_most_nodes():
    asked = elastic_config(*STOCK, "numerics=tree")
    assert [elastic.data_parallel(asked, nodes) for nodes in (1, 2, 3, 4)] == [1, 2, 2, 4]
    assert elastic.kept(asked)[0].text == "numerics.data_shards=4"
    assert elastic.kept(elastic_config(*STOCK)) == []


def test_the_script_keeps_the_data_shards(tmp_path):
    result = submit.train(STOCK[0], [*NODES[:4], *STOCK[1:], "numerics=tree", f"run.dir={tmp_path}/run"], how=DRY)
    assert "numerics.data_shards=4" in result.scripts[0].text


REFUSED = (
    ("slurm.nodes=many", "slurm.nodes=many: give the fewest and the most nodes, as in slurm.nodes=2-4"),
    ("slurm.nodes=2-8", "slurm.nodes=2-8: with this layout the run takes 4 nodes with 2 cpu ranks each"),
    ("slurm.nodes=2-3", "slurm.nodes=2-3: with this layout the run takes 4 nodes with 2 cpu ranks each"),
    ("slurm.nodes=5-4", "slurm.nodes=5-4: with this layout the run takes 4 nodes with 2 cpu ranks each"),
    ("cluster.shared_files=false", "so cluster.shared_files must be true"),
    ("tp=4 dp=2", "slurm.nodes=1-4: tp=4 does not fit 1 of the nodes; slurm.nodes=2-4"),
)


@pytest.mark.parametrize("change, says", REFUSED)
def test_refused_with_one_line(change, says):
    (problem,) = lines(elastic.problems(elastic_config(*STOCK, *change.split())))
    assert says in problem
    with pytest.raises(ConfigError) as refused:
        submit.train(STOCK[0], [*NODES[:4], *STOCK[1:], *change.split()], how=DRY)
    assert says in str(refused.value)


def test_the_script_asks_for_a_range_and_starts_on_what_there_is(tmp_path):
    result = submit.train(STOCK[0], [*NODES[:4], *STOCK[1:], f"run.dir={tmp_path}/run"], how=DRY)
    text = result.scripts[0].text
    assert "#SBATCH --nodes=1-4\n" in text
    assert "#SBATCH --ntasks" not in text  # SLURM would give no more nodes than tasks
    assert "srun --ntasks-per-node=1 --wait=60 " in text
    assert "or as many of them as there are" in result.about


def test_a_matrix_has_no_range(tmp_path):
    words = [*NODES[:4], "tp=1,2", "cluster.ranks_per_node=2", "slurm.nodes=1-1"]
    with pytest.raises(ConfigError, match="each cell has a layout of its own; leave it out"):
        submit.several("qwen3_toy", words, directory=tmp_path / "v", how=DRY)


def test_the_step_has_srun_options_whether_or_not_the_number_of_nodes_varies():
    options = 'cluster.srun_options=["--mpi=pmix"]'
    fixed, varying = (compose("qwen3_toy", [*NODES, *words, options]).config for words in (STOCK[1:-1], STOCK[1:]))
    assert srun_command.arguments(varying) == ["--ntasks-per-node=1", "--wait=60", "--mpi=pmix"]
    assert srun_command.arguments(fixed)[-1] == "--mpi=pmix"

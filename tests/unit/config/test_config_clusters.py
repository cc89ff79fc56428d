# SPDX-License-Identifier: Apache-2.0
"""Clusters: what those that come with tpi say, a user's own tree, and a file that lies anywhere."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.check.refusals import problems_of
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import conf_files


def cluster(*overrides: str, device: str = "gpu") -> dict:
    return compose("qwen3_toy", overrides, device=device).config.section("cluster")


gpu_problems = partial(problems_of, device="gpu")

# Ours


@pytest.mark.parametrize("name", [name for name in conf_files.groups()["cluster"] if name != "local"])
def test_a_cluster_says_what_its_nodes_are(name):
    nodes = compose("qwen3_toy", [f"cluster={name}"], device="gpu").config.cluster
    assert nodes.name == name
    assert None not in (nodes.gpus_per_node, nodes.architecture, nodes.compute_capability, nodes.gpu_memory)
    assert nodes.environment["TORCH_NCCL_HIGH_PRIORITY"] == "1"


def test_a_refused_value_is_a_problem_of_the_configuration():
    (problem,) = gpu_problems("cluster.environment.NCCL_ALGO=NVLS")
    assert problem.startswith("cluster.environment.NCCL_ALGO=NVLS: ")


def test_variables_are_typed_as_intended():
    typed = {"A": "010", "B": "on", "C": "a=b,c", "D": "[1]", "E": "1e3", "F": "null_", "G": "it's", "H": ""}
    assert cluster(*(f"cluster.environment.{k}={v}" for k, v in typed.items()))["environment"] == typed
    assert cluster("cluster=h100", "cluster.environment.NCCL_DEBUG=INFO")["environment"].keys() == {
        "TORCH_NCCL_HIGH_PRIORITY",
        "NCCL_DEBUG",
    }


def test_nothing_in_a_file_is_called(tmp_path):
    names = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
    (tmp_path / "site.yaml").write_text("".join(f"{name}: builtins.print\n" for name in names))
    for name, problem in zip(names, gpu_problems(f"cluster={tmp_path}/site.yaml"), strict=True):
        assert problem.startswith(f"cluster.{name}: no such field of ClusterSettings")


# One's own


@pytest.fixture
def own_clusters() -> Path:
    """The user's own tree, with a folder for clusters; the home of configuration has a space and more in its name."""
    folder = conf_files.user_dir() / "cluster"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(params=("in the user's tree", "anywhere"))
def site(request, own_clusters, tmp_path):
    """Write a file; the override that chooses it."""

    def write(text: str | bytes, name: str = "mysite") -> str:
        anywhere = request.param == "anywhere"
        file = (tmp_path / "it's, [a] = b" if anywhere else own_clusters) / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return f"cluster={file}" if anywhere else f"cluster={name}"

    return write


# What is said of a file does not depend on where it lies; both places are tried where the difference could show.
anywhere = pytest.mark.parametrize(
    "site", ("anywhere", pytest.param("in the user's tree", marks=pytest.mark.release)), indirect=True
)

MINE = "# Ours.\ndefaults: [h100]\ngpu_type: hopper\nenvironment: {NCCL_DEBUG: WARN}\n"


def test_a_file_builds_on_another(site):
    mine = site(MINE)
    assert cluster(mine) == cluster("cluster=h100") | {
        "name": "mysite",
        "gpu_type": "hopper",
        "environment": {**cluster("cluster=h100")["environment"], "NCCL_DEBUG": "WARN"},
    }


@anywhere
def test_a_file_may_hold_other_sections(site):
    mine = site(
        "# @package _global_\ndefaults: [b300]\ncluster:\n  container: /a.sqsh\nslurm:\n  time: '4:00:00'\n"
        "  account: our\n"
    )
    tree = compose("qwen3_toy", [mine, "slurm.account=mine"], device="gpu").config.sections
    assert (tree["cluster"]["container"], tree["cluster"]["gpus_per_node"]) == ("/a.sqsh", 8)
    assert (tree["slurm"]["time"], tree["slurm"]["account"]) == ("4:00:00", "mine")


def test_a_file_has_else_its_own(site):
    assert cluster(site("gpus_per_node: 4\n"))["name"] == "mysite"
    assert cluster(site(""))["name"] == "mysite"
    assert cluster(site(MINE), "cluster.name=other")["name"] == "other"


@anywhere
def test_the_last_of_several_counts(site):
    mine = site("gpus_per_node: 4\n")
    assert cluster(mine, "cluster=h200")["name"] == "h200"
    assert cluster("cluster=h200", mine) == cluster(mine)
    assert cluster(site("gpus_per_node: 2\n", "other"), mine) == cluster(mine)


# What a file holds, and what is said of it beside what is wrong with the command line.
HEAD = "# @package _global_\n"
NO_HEAD = "a file with sections in it begins with the line '# @package _global_'"
WRONG = (
    (
        "gpus_per_noed: 8\ngpus_per_node: eight\ncompute_capability: 9\nenvironment: {A: 010, B: on, C: x}\n"
        "cluster: {name: x}\nslurm: {time: x}\njust words: 1\n",
        [
            "cluster.gpus_per_noed: no such field of ClusterSettings; did you mean 'cluster.gpus",
            "cluster.gpus_per_node=eight: expected int or null, such as 4",
            "cluster.compute_capability=9: expected tuple",
            *("cluster.environment.A: expected text", "cluster.environment.B: exp"),
            f"cluster.cluster: {NO_HEAD}",
            f"cluster.slurm: {NO_HEAD}",
            "cluster.just words: no such field of ClusterSettings",
        ],
    ),
    (
        f"{HEAD}slurm: {{tires: 3, time: 4:00:00}}\nclutser: {{name: x}}\nledger: {{trace: [1]}}\n",
        [
            "slurm.tires: no such field of SlurmSettings; did you mean 'slurm.tries",
            "slurm.time=14400: expected text; in a file, write it in quotes",
            "clutser: no such section; did you mean 'cluster'?",
            "ledger.trace=[1]: expected str or null, such as text",
        ],
    ),
    ("environment: {1: x}\n", ["cluster.environment={1: 'x'}: expected dict, such as '{KEY: 1}'"]),
    ("environment: {a b: x}\n", ["cluster.environment: 'a b' is no name of a variable"]),
)


@anywhere
@pytest.mark.parametrize("text, says", WRONG, ids=[repr(text[:25]) for text, _ in WRONG])
def test_what_is_wrong_in_a_file_is_reported_with_everything_else(site, text, says):
    problems = gpu_problems(site(text), "tp=3", "seq=126", "lr=fast", device="cpu")
    for beginning in (*says, "tp=3 does not divide", "lr=fast: "):
        assert sum(problem.startswith(beginning) for problem in problems) == 1, beginning
    assert len(problems) == len(says) + 2


NO_SECTION = "cluster: a file puts a value where fields belong, as in cluster.FIELD"
# What Hydra cannot compose, and the whole problem or its end.
NOT_COMPOSED = (
    ("# @package _global_\ncluster: 5\n", NO_SECTION),
    ("# @package _global_\nhydra: {}\n", "hydra: no such section"),
    ("defaults: [h10]\n", "Could not load 'cluster/h10'."),
    ("environment: [A]\n", "Cannot merge DictConfig with ListConfig"),
    ("gpu_type: ${nope.x}\n", "cluster.gpu_type: Interpolation key 'nope.x' not found"),
    ("a: [1\nb: 2\n", "not YAML: expected ',' or ']', but got ':', line 2"),
    ("a: 1\na: 2\n", "not YAML: found duplicate key a, line 2"),
    ("- 1\n- 2\n", "not a mapping of keys to values"),
    (b"\xff\xfe\x00", "not YAML: 'utf-8' codec can't decode byte 0xff"),
    ("gpu_type: ${\n", "gpu_type: no viable alternative at input '${'"),
)


@anywhere
@pytest.mark.parametrize("text, says", NOT_COMPOSED)
@pytest.mark.parametrize("more", ((), ("cluster.ranks_per_node=8",)))
def test_what_cannot_be_composed_is_one_problem(site, text, says, more):
    (problem,) = gpu_problems(site(text), *more)
    assert problem == says or (says in problem and "mysite" in problem)


@pytest.mark.parametrize("path", ("/no/such.yaml", "no/such", "such.yaml", "such.yml", "~nobody-of-this-name/x.yaml"))
def test_a_file_that_is_not_there(path):
    first, second = gpu_problems(f"cluster={path}", "tp=3", "seq=126")
    assert first.startswith("cluster=/" if not path.startswith("~") else "cluster=")
    assert first.endswith(f"{path}: No such file or directory")
    assert second.startswith("tp=3")


def test_a_file_is_located_from_where_one_is_and_from_home(tmp_path, monkeypatch):
    (tmp_path / "site.yaml").write_text("gpus_per_node: 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("site.yaml", "./site.yaml", "~/site.yaml", f"{tmp_path}/site.yaml", f"'{tmp_path}/site.yaml'"):
        assert cluster(f"cluster={path}")["gpus_per_node"] == 4


@given(st.text())
def test_whatever_file_is_typed_is_at_worst_a_configuration_error(text):
    with pytest.raises(ConfigError, match="unknown model 'none'"):
        compose("none", [f"cluster={text}/x"])


# The user's tree


def test_the_users_own_options_are_offered_beside_tpis(own_clusters, cli):
    (own_clusters / "mysite.yaml").write_text(MINE)
    (own_clusters / "_base.yaml").write_text("")
    (own_clusters / ".#mysite.yaml").write_text("[")
    assert conf_files.groups()["cluster"] == ("b300", "gb300", "gh200", "h100", "h200", "local", "mysite")
    assert conf_files.summary("cluster", "mysite") == "Ours."
    assert conf_files.summary("cluster", "h100") == "Nodes of eight H100 GPUs (Hopper)."
    assert "gpu_type: hopper" in cli("show", "qwen3_8b", "cluster=mysite", "device=gpu", "--all").out


def test_other_groups_are_taken_from_it_as_well(own_clusters):
    (own_clusters.parent / "model").mkdir()
    (own_clusters.parent / "model" / "mine.yaml").write_text(
        "# @package _global_\n# Three layers.\ndefaults:\n  - qwen3_toy\nmodel:\n  num_layers: 3\n"
    )
    tree = compose("mine", device="cpu").config.sections
    assert (tree["model"]["num_layers"], tree["model"]["hidden_size"]) == (3, 128)
    assert "mine" in conf_files.groups()["model"]
    (own_clusters.parent / "model" / "mine.yaml").write_text("# @package _global_\ndefaults: [qwen3_toy]\nmodle: {}\n")
    with pytest.raises(ConfigError, match="modle: no such section; did you mean 'model'"):
        compose("mine", device="cpu")


# What would be passed over in silence: where it lies, what is said.
PASSED_OVER = (
    ("cluster/h100.yaml", "cluster=h100 is one of tpi's own; give the file another name"),
    ("model/_qwen3.yaml", "model=_qwen3 is one of tpi's own; give the file another name"),
    ("clusters/mysite.yaml", "'clusters' is no group; did you mean 'cluster'?"),
    ("cluster/mysite.yml", "the name must end in .yaml"),
    ("mysite.yaml", "not in the folder of a group, such as cluster/mysite.yaml"),
    ("config.yaml", "not in the folder of a group, such as cluster/mysite.yaml"),
    ("cluster/more/mysite.yaml", "not in the folder of a group, such as cluster/mysite.yaml"),
)


def test_files_that_would_be_passed_over_are_errors():
    files = [conf_files.user_dir() / path for path, _ in PASSED_OVER]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("gpus_per_node: 3\n")
    *result, last = gpu_problems("tp=3", "seq=126")
    assert sorted(result) == sorted(f"{file}: {says}" for file, (_, says) in zip(files, PASSED_OVER, strict=True))
    assert last.startswith("tp=3")
    for file in files:
        file.unlink()
    assert compose("qwen3_toy").model == "qwen3_toy"


def test_a_broken_file_that_nobody_asked_for_stands_in_nobodys_way(own_clusters):
    (own_clusters / "broken.yaml").write_text("a: [")
    assert cluster("cluster=h100")["name"] == "h100"
    (problem,) = gpu_problems("cluster=broken")
    assert problem.startswith(f"{own_clusters}/broken.yaml: not YAML")


def test_a_broken_base_is_named(own_clusters):
    (own_clusters / "_base.yaml").write_text("a: [")
    (own_clusters / "mysite.yaml").write_text("defaults: [_base]\n")
    (problem,) = gpu_problems("cluster=mysite")
    assert problem.startswith(f"{own_clusters}/_base.yaml: not YAML")

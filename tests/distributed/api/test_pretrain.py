# SPDX-License-Identifier: Apache-2.0
"""tpi.recipe and tpi.pretrain: what is checked again, what is refused, and one ledger with `tpi train`."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import tp_invariant_recipes as tpi
from tests import ledgers
from tests.distributed.ranks import on_ranks
from tp_invariant_recipes.api import megatron
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.cpu_host import cpu
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.settings import conf_files

pytestmark = pytest.mark.usefixtures("families")

ROOT = Path(__file__).parents[3]
TOY = {"model.num_layers": 1, "seq": 32, "iters": 2, "device": "cpu"}
WORDS = ("qwen3_toy", "model.num_layers=1", "seq=32", "iters=2", "device=cpu")
SCRIPT = """
import sys
import tp_invariant_recipes as tpi
config = tpi.recipe("qwen3_toy", {"model.num_layers": 1}, *sys.argv[2:], seq=32, device="cpu")
config.train.train_iters = 2
tpi.pretrain(config, callbacks=[tpi.LedgerCallback(sys.argv[1])])
"""


@pytest.mark.parametrize("model", (name for name in conf_files.groups()["model"] if name.endswith("_toy")))
def test_every_toy_is_a_container(model):
    assert type(tpi.recipe(model, "numerics=stock", device="gpu")).__name__ == "ConfigContainer"


def test_overrides_are_those_of_the_command():
    texts = tpi.recipe("qwen3_toy", "iters=7", "tp=2", "lr=1e-3", "optimizer.adam_eps=1e-7", "device=cpu")
    words = tpi.recipe("qwen3_toy", {"optimizer.adam_eps": 1e-7}, iters=7, tp=2, lr=1e-3, device="cpu")
    assert texts.to_dict() == words.to_dict()
    assert (words.model.tensor_model_parallel_size, words.train.train_iters) == (2, 7)
    assert words.model.invariant_mode == "tree"
    assert words.checkpoint.save is None


def test_text_is_prepared(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question. " * 200)
    words = {"data": "text", "data.path": tmp_path / "text.txt", "data.cache": tmp_path / "cache"}
    assert tpi.recipe("qwen3_toy", TOY, words).dataset.blend[0][0].startswith(str(tmp_path / "cache"))


def test_what_is_set_in_a_container_counts_like_an_override():
    config = tpi.recipe("qwen3_toy", TOY)
    assert megatron._checked(config) is getattr(config, megatron.MADE).composed.config
    config.model.num_layers, config.optimizer.lr = 2, 1e-3
    config.mixed_precision = None
    run = megatron._checked(config)
    assert (run.model["num_layers"], run.at("optimizer.lr"), run.mixed_precision) == (2, 1e-3, None)


def _set_size(config):
    config.model.num_attention_heads = 7


def _misspell(config):
    config.model.num_layer = 2


def _add_hook(config):
    config.model.register_pre_wrap_hook(lambda model: model)


def _replace_data(config):
    config.dataset.tokenizer = object()


def test_stock_numerics_take_the_environment_as_it_is_and_leave_it_so(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    run = megatron._checked(tpi.recipe("qwen3_toy", TOY, "numerics=stock"))
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    with megatron._rank(run):
        assert os.environ["NCCL_ALGO"] == "Tree"
        os.environ["NVTE_FLASH_ATTN"] = "1"  # as Megatron does for the attention of a model
    assert "NVTE_FLASH_ATTN" not in os.environ
    with pytest.raises(tpi.TpiError, match="NCCL_ALGO=Tree in the environment"):
        tpi.recipe("qwen3_toy", TOY, "numerics=tree")


@pytest.mark.parametrize(
    "change, said",
    (
        (_set_size, "num_attention_heads"),
        (_misspell, "did you mean"),
        (_add_hook, r"_pre_wrap_hooks: tpi\.pretrain cannot record"),
        (_replace_data, r"dataset\.tokenizer: tpi\.pretrain cannot record"),
    ),
)
def test_what_may_not_be_set(change, said):
    config = tpi.recipe("qwen3_toy", TOY)
    change(config)
    with pytest.raises(tpi.TpiError, match=said):
        tpi.pretrain(config)


def test_another_program_s_container_and_another_number_of_ranks_are_refused():
    config = tpi.recipe("qwen3_toy", TOY, tp=2)
    with pytest.raises(tpi.TpiError, match="2 ranks have this layout, and this process is one: torchrun --nproc"):
        tpi.pretrain(config)
    delattr(config, megatron.MADE)
    with pytest.raises(tpi.TpiError, match=r"takes what tpi\.recipe returns"):
        tpi.pretrain(config)


def test_variables_that_cuda_has_started_without_are_refused(monkeypatch):
    config = compose("qwen3_toy", device="gpu").config
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(tpi.TpiError, match=r"CUBLAS_WORKSPACE_CONFIG=:4096:8.*: CUDA has started without"):
        megatron._rank(config).__enter__()


def _bridges(mesh, folder, numerics, callback, patched=False):
    """A Bridge program of one's own: losses and gradient norms. callback: whether it writes a ledger, too. patched:
    whether it is in patch mode.
    """
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Seen(Callback):
        def __init__(self):
            self.steps = []

        def on_train_step_end(self, context):
            loss = (context.loss_dict or {}).get("lm loss")
            self.steps.append((None if loss is None else loss.item(), float(context.grad_norm)))

    os.environ |= {"RANK": str(mesh.rank), "WORLD_SIZE": str(mesh.size)}
    seen, path = Seen(), folder / f"{numerics}-{mesh.size}"
    with cpu.installed(), registry.applied(), tpi.invariant() if patched else nullcontext():
        weights = {"numerics.initial_weights": "invariant"}
        config = tpi.recipe("qwen3_toy", TOY, weights, tp=mesh.size, numerics=numerics)
        pretrain(config, forward_step, callbacks=[seen, *([tpi.LedgerCallback(path)] if callback else [])])
    return seen.steps


def test_bridges_own_pretrain_refuses_what_it_would_compute_in_part(tmp_path):
    with pytest.raises(RuntimeError, match=r"gradient norm, cross entropy.*train it by tpi\.pretrain"):
        on_ranks(1, 8, _bridges, tmp_path, "tree", False)


def test_a_ledger_of_ones_own_bridge_program(tmp_path):
    """It changes nothing, names what the run is, and is comparable for every layout."""
    plain, recorded = (on_ranks(1, 8, _bridges, tmp_path, "deterministic", callback) for callback in (False, True))
    assert plain == recorded
    ledger = tpi.Ledger.open(tmp_path / "deterministic-1")
    assert [(step.loss.value, step.grad_norm.value) for step in ledger] == recorded[0]
    assert ledger.identity["model.num_layers"] == 1
    assert {"data.kind", "data.digest"} <= ledger.identity.keys()
    assert len(ledger[0].gradients) == 10
    assert ledger[1].moments
    on_ranks(2, 8, _bridges, tmp_path, "deterministic", True)
    assert tpi.compare(tmp_path / "deterministic-1", tmp_path / "deterministic-2").exit_status == 1


@pytest.mark.release
def test_patch_mode_makes_bridges_own_program_invariant(tmp_path):
    """The control is above: without, the losses differ."""
    for ranks in (1, 2):
        on_ranks(ranks, 8, _bridges, tmp_path, "deterministic", True, True)
    assert tpi.compare(tmp_path / "deterministic-1", tmp_path / "deterministic-2").identical
    ledger = tpi.Ledger.open(tmp_path / "deterministic-2")
    assert ledger.numerics == {"mode": "tree", "virtual_shards": 8}
    assert ledger.identity["numerics.data_shards"] == ledger.identity["numerics.context_shards"] == 1


@pytest.mark.release
def test_a_torchrun_program_has_the_ledger_of_tpi_train(shared):
    """Control: another seed is another experiment."""
    folder = shared.folder
    (folder / "script.py").write_text(SCRIPT)
    train = ["-m", "tp_invariant_recipes", "train", *WORDS, "run.dir=trained"]  # forks have other mock data
    subprocess.run([sys.executable, *train], cwd=folder, check=True)
    for ranks, name, words in ((1, "one", ()), (2, "two", ("tp=2",)), (1, "control", ("seed=7",))):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run([*command, "script.py", name, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert ledgers.steps(folder / "one") == ledgers.steps(folder / "trained")
    assert ledgers.steps(folder / "two") == ledgers.steps(folder / "trained")
    for name in ("one", "two"):
        shared("compare", "trained", name, status=0)
    first = [json.loads((folder / name / "ledger.jsonl").open().readline()) for name in ("trained", "one")]
    assert first[0]["identity_hash"] == first[1]["identity_hash"]
    assert first[0]["notes"] == first[1]["notes"]
    shared("compare", "trained", "control", status=2)


@pytest.mark.release
def test_a_users_program_runs_with_every_name(tmp_path):
    program = ROOT / "tests/unit/api/user_program.py"
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"True False 1 FirstDifference\(.*step=1,", done.stdout)
    assert "0 ['reference', 'identical']" in done.stdout
    assert done.stdout.endswith("did you mean 'tp'?\niters=few: training steps: expected int, such as 4\n")


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/first-run.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("identical: 3 steps" in output for output in shown)
    assert any("did you mean 'tp'?" in output for output in shown)
    assert not any("outputs" in cell and cell.execution_count is None for cell in notebook.cells)

# SPDX-License-Identifier: Apache-2.0
"""A patch applies to the code that needs it and to no other, and leaves nothing behind."""

import dataclasses
import importlib
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tp_invariant_recipes import replacement
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.launch import hang
from tp_invariant_recipes.machine import versions
from tp_invariant_recipes.patches import bridge, core, registry, te_grouped
from tp_invariant_recipes.patches import patch as code
from tp_invariant_recipes.patches.patch import Function, Patch, within
from tp_invariant_recipes.patches.te_grouped import place_of_flag
from tp_invariant_recipes.replacement import applied
from tp_invariant_recipes.settings.run_config import RunConfig

GRAPHS = {"device": {"kind": "gpu"}, "model": {"cuda_graph_impl": "transformer_engine"}}
NAME = "te-grouped-linear-graph"

# Transformer Engine's GroupedLinear, in so far as the patch is concerned.
SOURCE = '''
import torch


class FP8GlobalStateManager:
    capturing, tensor = False, None

    @classmethod
    def fp8_graph_capturing(cls):
        return cls.capturing

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls):
        return cls.tensor


class _GroupedLinear(torch.autograd.Function):
    seen = []

    @staticmethod
    def forward(ctx, inp, non_tensor_args, *weights_and_biases):
        """Docstring."""
        (
            m_splits,
            is_first_microbatch,
            skip_fp8_weight_update,
            debug,
        ) = non_tensor_args
        _GroupedLinear.seen.append((m_splits, is_first_microbatch, skip_fp8_weight_update, debug))
        return inp * weights_and_biases[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


class GroupedLinear:
    weight = torch.ones(1)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        arguments = (m_splits, is_first_microbatch, None, "debug")
        if torch.is_grad_enabled():
            return _GroupedLinear.apply(inp, arguments, self.weight)
        return _GroupedLinear.forward(None, inp, arguments, self.weight)
'''


@pytest.fixture
def installs(tmp_path, monkeypatch):
    """Install a Transformer Engine of this version and source; returns its folder."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in _loaded():  # the placeholder, where Bridge is loaded; monkeypatch puts it back
        monkeypatch.delitem(sys.modules, name)

    def install(version: str, source: str = SOURCE, start: str = "") -> Path:
        for information in tmp_path.glob("*.dist-info"):
            (information / "METADATA").unlink()
            information.rmdir()
        folder = tmp_path / "transformer_engine"
        (folder / "pytorch/module").mkdir(parents=True, exist_ok=True)
        for package, text in (("", ""), ("pytorch", start), ("pytorch/module", "")):
            (folder / package / "__init__.py").write_text(text)
        (folder / "pytorch/module/grouped_linear.py").write_text(source)
        metadata = tmp_path / f"transformer_engine-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
        importlib.invalidate_caches()
        versions.installed.cache_clear()
        return folder

    yield install
    versions.installed.cache_clear()
    for name in _loaded():
        del sys.modules[name]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]


@pytest.fixture
def patch(installs, monkeypatch) -> Patch:
    """The row, made for the small source above, alone in the table."""
    file = installs("0") / te_grouped.FILE
    known = te_grouped.PATCH.functions
    functions = tuple(Function(f.file, f.name, {"here": str(code.fingerprint(file, f.name))}) for f in known)
    made = dataclasses.replace(te_grouped.PATCH, functions=functions)
    monkeypatch.setattr(registry, "PATCHES", (made,))
    return made


@pytest.mark.parametrize(
    "version, state",
    (
        ("2.9.0", "applies"), ("2.12.0", "applies"), ("2.14.0+71bbefbf", "applies"), ("2.16.1", "applies"),
        ("2.17.0.dev0+abc", "applies"), ("2.17.0rc1", "applies"), ("2.17.0", "not needed"),
        ("2.17.0+abc", "not needed"), ("2.20.2", "not needed"),
    ),
)  # fmt: skip
def test_the_versions_that_need_it_get_it(installs, patch, version, state):
    installs(version)
    verdict = patch.verdict()
    assert verdict.state == state
    assert version in verdict.reason
    with registry.applied(RunConfig(GRAPHS)) as names:
        assert names == ([NAME] if state == "applies" else [])


@pytest.mark.parametrize(
    "change, state",
    (
        (("inp * weights_and_biases[0]", "inp*weights_and_biases[0]  # faster"), "applies"),
        (("Docstring.", "Other words."), "applies"),
        (('        """Docstring."""\n', ""), "applies"),
        (("inp * weights_and_biases[0]", "weights_and_biases[0] * inp"), "refused"),
        (("m_splits, is_first_microbatch, None", "m_splits, is_first_microbatch, False"), "refused"),
        (("class GroupedLinear:", "class Grouped:"), "refused"),
        (("import torch\n", "import torch (\n"), "refused"),
    ),
)
def test_only_known_code_is_patched(installs, patch, change, state):
    assert change[0] in SOURCE
    folder = installs("2.13.0", SOURCE.replace(*change, 1))
    assert patch.verdict().state == state
    (folder / te_grouped.FILE).unlink()
    assert patch.verdict().state == "refused"


def test_a_run_with_a_refused_patch_does_not_start(installs, patch):
    installs("2.13.0", SOURCE.replace("inp *", "2 * inp *"))
    with pytest.raises(ConfigError) as error, registry.applied(RunConfig(GRAPHS)):
        pytest.fail("the block must not run")
    (problem,) = error.value.problems
    assert problem.startswith("transformer-engine 2.13.0 has an unknown _GroupedLinear.forward (pytorch/module/")
    assert f"needs patch {NAME}" in problem
    assert problem.endswith(f"patches.off=[{NAME}]")


@pytest.mark.parametrize(
    "device, graphs, refused",
    (
        ("gpu", "transformer_engine", True), ("gpu", "local", True), ("gpu", "none", False), ("gpu", None, False),
        ("cpu", "transformer_engine", False),
    ),
)  # fmt: skip
def test_a_run_that_does_not_come_to_the_code_starts_without(installs, patch, device, graphs, refused):
    installs("2.13.0", SOURCE.replace("inp *", "2 * inp *"))
    tree = {"device": {"kind": device}, "model": {"cuda_graph_impl": graphs}}
    assert bool(registry.problems(RunConfig(tree))) is refused
    installs("2.13.0")
    with registry.applied(RunConfig(tree)) as names:
        assert bool(names) is refused


def test_of_an_unknown_run_every_installed_package_counts(installs, patch):
    installs("2.13.0", SOURCE.replace("inp *", "2 * inp *"))
    assert len(registry.problems()) == 1
    installs("2.13.0")
    with registry.applied() as names:
        assert names == [NAME]


@pytest.mark.parametrize("unused, imported", (((), True), (("transformer_engine.",), False)))
def test_what_a_process_never_uses_is_neither_imported_nor_replaced(installs, patch, unused, imported):
    installs("2.13.0")
    with registry.applied(unused=unused):
        assert ("transformer_engine.pytorch.module.grouped_linear" in sys.modules) is imported


@pytest.mark.parametrize(
    "sections, names",
    (
        ({}, set()),
        ({"optimizer": {"optimizer": "sgd"}}, {"core-sgd-state"}),
        ({"model": {"num_moe_experts": 8}}, {"core-empty-optimizer"}),
        (
            {"model": {"num_moe_experts": 8, "add_bias_linear": True, "transformer_impl": "local"}},
            {"core-empty-optimizer", "core-expert-bias"},
        ),
        ({"model": {"mtp_num_layers": 1}}, {"bridge-local-mtp"}),
        ({"model": {"use_cpu_initialization": True}}, {"bridge-cpu-initialization"}),
        ({"weights": {"folder": "x"}}, {"bridge-local-names"}),
        ({"ddp": {"overlap_param_gather": True}, "model": {"cuda_graph_impl": "local"}}, set()),
        (
            {"ddp": {"overlap_param_gather": True}, "model": {"cuda_graph_impl": "full_iteration"}},
            {"core-gathers-in-graphs"},
        ),
    ),
)
def test_a_patch_is_for_the_runs_that_reach_its_code(sections, names):
    config = RunConfig({"device": {"kind": "cpu"}, "model": {}, "optimizer": {"optimizer": "adam"}} | sections)
    conditional = [patch for patch in registry.PATCHES if patch.reached is not None]
    assert {patch.name for patch in conditional if patch.concerns(config)} == names


def test_off(installs, patch):
    for source in (SOURCE, SOURCE.replace("inp *", "2 * inp *")):
        installs("2.13.0", source)
        with registry.applied(RunConfig(GRAPHS | {"patches": {"off": [NAME]}})) as names:
            assert names == []
    assert patch.verdict(off=True).state == "off"


def test_unknown_names_are_reported_with_the_known_ones():
    names = [patch.name for patch in registry.PATCHES]
    tree = {"device": {"kind": "cpu"}, "model": {}, "patches": {"off": ["te-grouped", names[0], "nothing"]}}
    with pytest.raises(ConfigError) as error, registry.applied(RunConfig(tree)):
        pytest.fail("the block must not run")
    assert [problem.partition(":")[0] for problem in error.value.problems] == [
        "patches.off=te-grouped",
        "patches.off=nothing",
    ]
    assert all(name in error.value.problems[0] for name in names)


def test_the_key_can_be_set():
    assert compose("qwen3_toy", [], device="cpu").config.section("patches") == {"off": []}
    assert compose("qwen3_toy", [f"patches.off=[{NAME}]"], device="cpu").config.section("patches") == {"off": [NAME]}
    with pytest.raises(ConfigError, match=r"patches\.off"):
        compose("qwen3_toy", ["patches.off=3"], device="cpu")


@pytest.mark.parametrize("experts", (None, 8))
@pytest.mark.parametrize("latent", (False, True))
def test_local_layers_save_norms_as_transformer_engine_does(experts, latent):
    """Its layers have a norm before experts, and one in each linear layer that follows a norm."""
    from megatron.core.models.gpt import gpt_layer_specs

    before = gpt_layer_specs.get_gpt_layer_local_submodules
    with replacement.applied(core.CHECKPOINTS[-1].replacements):
        changed = gpt_layer_specs.get_gpt_layer_local_submodules
        layer = changed(num_experts=experts, multi_latent_attention=latent, normalization="RMSNorm")
    names = layer.sharded_state_dict_keys_map
    assert ("pre_mlp_layernorm." in names) == (experts is None)
    assert ("input_layernorm." in names) == ("self_attention.kv_layernorm." not in names) == (not latent)
    stock = before(num_experts=experts, multi_latent_attention=latent, normalization="RMSNorm")
    assert (stock.sharded_state_dict_keys_map == names) == (experts is None and not latent)  # the control


def test_nothing_is_needed_where_there_is_no_package(patch, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "transformer_engine").is_dir()])
    importlib.invalidate_caches()
    assert patch.verdict().state == "not needed"


def test_nor_where_there_is_a_placeholder(installs, patch, monkeypatch):
    installs("2.12.0")
    placeholder = ModuleType("transformer_engine")
    placeholder.__path__ = []
    placeholder.__spec__ = ModuleSpec("transformer_engine", loader=None, is_package=True)
    monkeypatch.setitem(sys.modules, "transformer_engine", placeholder)
    assert patch.verdict().state == "not needed"
    del placeholder.__spec__
    assert patch.verdict().state == "not needed"


@pytest.mark.parametrize("error", ("OSError('libcuda.so.1')", "ImportError('transformer_engine_torch')"))
def test_a_package_that_cannot_be_imported_stays_unchanged(installs, patch, error):
    installs("2.12.0", start=f"raise {error}")
    assert patch.verdict().state == "applies"
    with registry.applied(RunConfig(GRAPHS)) as names:
        assert names == []


def test_the_table_is_read_without_importing_what_it_is_for(installs, tmp_path):
    installs("2.12.0")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tp_invariant_recipes.patches import registry\n"
        "print([verdict.state for _, verdict in registry.verdicts()])\n"
        "assert not {'torch', 'transformer_engine', 'megatron.core', 'megatron.bridge'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout


def test_the_code_is_the_very_same_afterwards(installs, patch):
    installs("2.12.0")
    module = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
    before = [dict(vars(thing)) for thing in (module, module.GroupedLinear, module._GroupedLinear)]
    with registry.applied(RunConfig(GRAPHS)):
        assert vars(module.GroupedLinear)["forward"] is not before[1]["forward"]
        assert vars(module._GroupedLinear)["forward"] is not before[2]["forward"]
    after = [dict(vars(thing)) for thing in (module, module.GroupedLinear, module._GroupedLinear)]
    for first, other in zip(before, after, strict=True):
        assert first.keys() == other.keys()
        assert all(first[name] is other[name] for name in first)


@pytest.mark.parametrize("gradients", (True, False))
@pytest.mark.parametrize("first", (True, False, None))
@pytest.mark.parametrize("patched", (True, False))
def test_a_capture_hands_on_the_flag_and_is_no_first_micro_batch(installs, patch, patched, first, gradients):
    installs("2.12.0")
    module = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
    layer, state, seen = module.GroupedLinear(), module.FP8GlobalStateManager, module._GroupedLinear.seen
    x, tensor = torch.ones(1, requires_grad=gradients), torch.zeros(1)
    with applied(patch.replacements if patched else ()), torch.set_grad_enabled(gradients):
        for capturing, held in ((True, tensor), (True, None), (False, tensor)):
            state.capturing, state.tensor = capturing, held
            assert layer.forward(x, [1], is_first_microbatch=first).item() == 1
    cured = ([1], False, tensor, "debug")
    plain = ([1], first, None, "debug")
    wanted = [cured if patched else plain, plain, plain]
    assert [item[:2] + item[3:] for item in seen] == [item[:2] + item[3:] for item in wanted]
    assert all(first[2] is other[2] for first, other in zip(seen, wanted, strict=True))


def test_an_autograd_function_without_the_flag_is_not_patched(installs, patch):
    installs(
        "2.12.0", SOURCE.replace("skip_fp8_weight_update,", "skip,").replace("microbatch, skip_f", "microbatch, f")
    )
    module = importlib.import_module("transformer_engine.pytorch.module.grouped_linear")
    with pytest.raises(ValueError, match="skip_fp8_weight_update"):
        place_of_flag(module._GroupedLinear.forward)
    with pytest.raises(ValueError, match="non_tensor_args"):
        place_of_flag(module.GroupedLinear.forward)


@pytest.mark.parametrize("patch", registry.PATCHES, ids=lambda patch: patch.name)
def test_rows_are_whole(patch):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+", patch.name)
    assert [other.name for other in registry.PATCHES].count(patch.name) == 1
    assert patch.why
    assert patch.replacements
    if patch.form is None:
        assert patch.upstream
        assert patch.functions
        for function in patch.functions:
            assert len(set(function.known.values())) == len(function.known)
            for versions, digits in function.known.items():
                assert re.fullmatch("[0-9a-f]{16}", digits)
                named = re.findall(r"\d[\d.]+", versions)
                assert named
                assert all(within(version, patch.versions) for version in named)


def installed_core(tmp_path, monkeypatch, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(code, "folder", lambda package: tmp_path)


@pytest.mark.parametrize("body, fits", (("a = 1", True), ("a = b", False), ("b = 1", False)))
def test_a_form_has_a_text_and_lacks_another(tmp_path, monkeypatch, body, fits):
    installed_core(tmp_path, monkeypatch, {"file.py": f"def function():\n    {body}\ndef other():\n    a = b\n"})
    assert code.Form("file.py", "function", has="a", lacks="b")() is fits
    assert not code.Form("file.py", "absent", lacks="b")()


WRITER = "dist_checkpointing/strategies/filesystem_async.py"
MANAGER = "def get_write_results_queue(mode=None):\n    return Manager()\n"


@pytest.mark.parametrize(
    "source, needed",
    (
        (MANAGER, True),
        ("def get_write_results_queue():\n    return SimpleQueue()\ndef other():\n    Manager()\n", False),
        ("", False),
    ),
)
def test_a_manager_for_every_save_is_detected_in_the_code(tmp_path, monkeypatch, source, needed):
    installed_core(tmp_path, monkeypatch, {WRITER: source})
    assert core.SAVE.verdict().state == ("applies" if needed else "not needed")


@pytest.mark.parametrize(
    "files, needed",
    (
        (("datasets/helpers_cpp.cpython-312.so",), True),
        (("datasets/helpers_cpp.cpython-312.so", "datasets/Makefile"), False),
        (("datasets/helpers.cpp",), False),
    ),
)
def test_compiled_helpers_without_a_makefile_are_located_in_the_folder(tmp_path, monkeypatch, files, needed):
    installed_core(tmp_path, monkeypatch, dict.fromkeys(files, ""))
    assert bridge.HELPERS.verdict().state == ("applies" if needed else "not needed")


def test_neither_is_needed_without_megatron(monkeypatch):
    monkeypatch.setattr(code, "folder", lambda package: None)
    for patch in (core.SAVE, bridge.HELPERS):
        assert patch.verdict().state == "not needed"


@pytest.fixture
def own_queue(monkeypatch):
    """Megatron-Core's function as the patch replaces it, beside a module without a queue."""
    name = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    module = SimpleNamespace(_results_queue=None)
    for parent, _, child in (name.rpartition("."),):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(**{child: module}))
    monkeypatch.setitem(sys.modules, name, module)
    return core.queue_in_this_process(lambda: None)


def test_a_save_within_the_process_starts_no_manager(own_queue):
    assert isinstance(own_queue(), queue.Queue)


@pytest.mark.timeout(60)
def test_the_manager_of_a_killed_rank_ends(own_queue):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()

    def save() -> None:
        own_queue("fork")
        sender.send([child.pid for child in multiprocessing.active_children()])
        time.sleep(60)

    process = context.Process(target=save)
    process.start()
    sender.close()
    (manager,) = receiver.recv()
    for number in (signal.SIGTERM, signal.SIGHUP):  # of SLURM or a terminal, to every process: the rank still saves
        os.kill(manager, number)
    time.sleep(0.3)
    assert hang.state(manager) not in ("", "Z")
    process.kill()
    process.join()
    assert receiver.poll(20)
    with pytest.raises(EOFError):  # what it has open is closed: it has ended
        receiver.recv()


@pytest.mark.parametrize(
    "kind, options, buffers", (("SGD", {"momentum": 0.9}, 2), ("SGD", {}, 0), ("Adam", {}, 0)), ids=str
)
def test_the_state_of_sgd_is_its_momentum_and_nothing_of_other_optimizers(kind, options, buffers):
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = getattr(torch.optim, kind)(weights, lr=0.1, **options)
    core.momentum(optimizer)
    assert [state.keys() for state in optimizer.state.values()] == [{"momentum_buffer"}] * buffers


@pytest.mark.parametrize("patched", (False, True))
def test_a_captured_step_gathers_weights_that_digests_have_gathered(patched):
    """Megatron's flag is reset where the host runs a backward pass, which a replay does not."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets

    start = core.gathered_again(Buckets.start_param_sync) if patched else Buckets.start_param_sync
    gathered = []
    group = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_param_gather=True, use_distributed_optimizer=False),
        param_gather_handle=SimpleNamespace(wait=lambda: gathered.append(1)),
        param_gather_dispatched=True,
        _post_param_sync=lambda: None,
        intra_distributed_optimizer_instance_size=1,
    )
    start(group, force_sync=True)
    assert gathered
    assert group.param_gather_dispatched is not patched
    start(group)
    assert group.param_gather_dispatched

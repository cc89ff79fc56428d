# SPDX-License-Identifier: Apache-2.0
"""Bridge with packages that wait is Bridge as it imports itself: the same names, registrations and recipes."""

import json
import os
import subprocess
import sys

import pytest

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.sources import hf_models
from tp_invariant_recipes.start.lazy_imports import DEFERRED, EAGER

# What a process sees of Bridge while packages wait, and after each of them has been asked for something.
PROGRAM = """
import json, sys
import torch
from tp_invariant_recipes.start import bridge, lazy_imports

def waiting():
    return sorted(next(iter(w.row.modules)) for w in sys.meta_path if isinstance(w, lazy_imports.Waiting))

bridge.load()
seen = {"at the start": waiting()}

import modelopt.torch.distill as mtd, modelopt.torch.opt.plugins as plugins
from megatron.bridge.training.train import get_tensor_shapes_adjust_fn_for_distillation as adjust
from megatron.bridge.training.utils.config_utils import PreTrainedConfig
from megatron.core import parallel_state
from modelopt.torch.opt.dynamic import DynamicModule
model = torch.nn.Linear(1, 1)
seen["without ModelOpt"] = [
    isinstance(model, mtd.DistillationModel), isinstance(model, DynamicModule), isinstance(model, PreTrainedConfig),
    plugins.save_modelopt_state([model], {}), plugins.save_sharded_modelopt_state([model], "nowhere"),
    plugins.restore_modelopt_state([model], {}), parallel_state.get_virtual_pipeline_model_parallel_rank(),
]
seen["then"] = waiting()

from megatron.bridge import AutoBridge
from transformers import AutoConfig
seen["registered at transformers"] = [type(AutoConfig.for_model(one)).__module__ for one in ("step3p7", "qwen3")]
from megatron.bridge.models.conversion.model_bridge import get_model_bridge
import datasets, megatron.bridge.recipes, wandb
seen["supported"] = sorted(AutoBridge.list_supported_models())
seen["registered"] = sorted(str(key) for key in get_model_bridge._exact_types)
seen["recipes"] = sorted(vars(megatron.bridge.recipes))
mtd.convert, wandb.init, datasets.Dataset
seen["room for data"] = datasets.builder.has_sufficient_disk_space(1 << 90)
import torch._dynamo.eval_frame
torch._inductor.config.max_autotune, sys.modules["torch.fx.experimental.symbolic_shapes"].ShapeEnv
seen["in the end"] = waiting()
names = {name: sys.modules[name] for later in lazy_imports.DEFERRED for name in later.modules}
seen["names"] = {name: sorted(vars(module)) for name, module in names.items() if name != "transformers"}
seen["kinds"] = {name: str(type(module)) for name, module in names.items()}
seen["modules"] = sorted(n for n in sys.modules if n.startswith(("megatron.", "modelopt.", "wandb.")))
print(json.dumps(seen))
"""


def _printed(program, *arguments, eager="0"):
    """The last lines of what a program prints, in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, EAGER: eager}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.release
def test_what_waits_until_somebody_asks_is_what_is_imported_at_the_start():
    waits, eager = (json.loads(_printed(PROGRAM, eager=eager)[-1]) for eager in ("0", "1"))
    assert waits["at the start"] == waits["then"] == sorted(next(iter(later.modules)) for later in DEFERRED)
    assert waits["in the end"] == eager["at the start"] == []
    assert waits["room for data"] is True  # Bridge's own check, set before the package was imported
    assert set(eager["modules"]) <= set(waits["modules"])
    for name in eager.keys() - {"at the start", "then", "in the end", "modules"}:
        assert waits[name] == eager[name], name


@pytest.mark.parametrize("later", DEFERRED, ids=lambda later: next(iter(later.modules)))
def test_the_rows_are_about_the_installed_versions(later):
    """Otherwise starts are slow, and nothing says so: read the imports of the new version, then change the row."""
    for distribution, version in later.versions.items():
        assert version in (None, installed(distribution))


@pytest.mark.release
def test_bridge_can_be_imported_after_transformers():
    """As `weights=FOLDER` does it; where Transformer Engine is missing, its placeholder must be there by then."""
    program = "import transformers\nfrom tp_invariant_recipes.start import bridge\nbridge.load()\nprint('imported')"
    assert _printed(program) == ["imported"]


COMPILER = """
import sys, torch
from tp_invariant_recipes.cpu_host import cpu
from tp_invariant_recipes.start import bridge, lazy_imports
compile = torch.compile
bridge.load()
assert torch.compile is compile
import torch._dynamo
waiting = lambda: [lazy_imports.waits("torch._dynamo"), "sympy" not in sys.modules]

torch.use_deterministic_algorithms(True)
graphs, x = [], torch.ones(3, requires_grad=True)
plain = torch._dynamo.disable(lambda x: x + 1)
with cpu.installed():
    y = torch.compile(plain)(x) * x
(dx,) = torch.autograd.grad(y, x, torch.ones(3))
optimizer = torch.optim.AdamW([x])
optimizer.step()
try:
    torch.autograd.grad(x * 2, x, torch.ones(4))
except RuntimeError as error:
    print("Mismatch in shape" in str(error))
print(dx.tolist(), waiting())

def keep(graph, _):
    graphs.append(len([node for node in graph.graph.nodes if node.op == "call_function"]))
    return graph.forward

print(torch.compile(lambda x: plain(x * 2) * 3, backend=keep)(torch.ones(3)).tolist(), graphs, waiting())
print(torch._inductor.config.deterministic, torch.are_deterministic_algorithms_enabled())
"""


@pytest.mark.release  # it compiles twice, for 40 s
def test_torchs_compiler_waits_until_something_is_compiled():
    """Steps on a CPU need none of it; then it leaves out what it was told not to compile, and has its option."""
    shape, steps, compiled, options = _printed(COMPILER)
    assert (shape, options) == ("True", "True True")
    assert steps == "[3.0, 3.0, 3.0] [True, True]"
    assert compiled == "[9.0, 9.0, 9.0] [1, 1] [False, False]"
    assert _printed(COMPILER, eager="1")[:2] == [shape, steps.replace("True", "False")]


SHAPES_ALONE = """
from tp_invariant_recipes.start import bridge, lazy_imports
bridge.load()
from torch._subclasses.fake_tensor import FakeTensorMode
import torch
with FakeTensorMode():
    print(tuple((torch.ones(2, 3) @ torch.ones(3, 4)).shape))
print(torch._dynamo.config.__spec__.name, lazy_imports.waits("torch._dynamo"))
"""


def test_a_dtensor_can_be_the_first_to_ask_for_the_compiler():
    """It computes shapes by tensors without values, whose modes import the compiler's options."""
    assert _printed(SHAPES_ALONE) == ["(2, 4)", "torch._dynamo.config False"]


CONVERTER = """
import json, sys
from pathlib import Path
from tp_invariant_recipes.start import bridge
bridge.load()
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.sources import hf_models, weights
folder, left = Path(sys.argv[1]), []
for family in sorted(hf_models.FAMILIES, key=lambda family: family.package == "olmoe"):
    config = {"architectures": [family.architecture], "model_type": family.model_type}
    (folder / "config.json").write_text(json.dumps(config))
    with registry.applied():
        converter = weights.from_config(folder)
    left.append(type(converter._model_bridge).__name__)
below = "megatron.bridge.models."
packages = {name.split(".")[3] for name in sys.modules if name.startswith(below) and name.count(".") > 3}
print(json.dumps([left, sorted(packages)]))
"""


@pytest.mark.release
def test_a_folders_family_is_imported_alone(tmp_path):
    """One after the other, those of tpi; Bridge has fifty more packages."""
    converters, packages = json.loads(_printed(CONVERTER, tmp_path)[-1])
    assert len(set(converters)) == len(hf_models.FAMILIES)
    assert not {"bailing", "kimi", "stepfun", "qwen_vl", "mamba"} & {*packages}


EXPORT = """
import sys
from pathlib import Path
from tp_invariant_recipes.start import bridge
bridge.load_models()
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.sources import weights
folder = Path(sys.argv[1])
with registry.applied(unused=weights.unused(folder)):
    converter = weights.from_config(folder)
print(type(converter._model_bridge).__name__)
print("megatron.bridge.training.pretrain" in sys.modules, "megatron.bridge.models.gemma" in sys.modules)
"""


@pytest.mark.release
def test_an_export_imports_no_training_and_no_other_family(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    assert _printed(EXPORT, tmp_path)[-2:] == ["Qwen3Bridge", "False False"]

"""What a recipe's own source uses decides whether its answer may be kept: nothing that no record shows."""

from pathlib import Path

import pytest

from tp_invariant_recipes.sources import recipe_reads

PLAIN = (
    "import os\nos.environ['A'], os.getenv('B'), os.path.exists('c')",
    "import os.path\nos.path.exists('c')",
    "import os.path as path\npath.exists('c')",
    "from os import environ, path",
    "import torch\nx = torch.bfloat16, torch.nn.functional.silu",
    "import torch.nn.functional as F",
    "from torch.nn import functional",
    "import sys\nsys.path.insert(0, 'x')",
    "from megatron.bridge.recipes.common import _pretrain_common as common",
    "import mine.own\nfrom mine import own\nfrom . import other",
    "from pathlib import Path\nPath('a').glob('*')",
    "cfg.optimizer, cfg.profiling, cfg.copy",
)
NOT_PLAIN = (
    "import time",
    "import numpy",
    "import a, random",
    "from datetime import datetime",
    "def f():\n    from time import time",
    "import os\nos.getpid()",
    "import os as o\no.urandom(1)",
    "import os\nf(os)",
    "from os import urandom",
    "from os import *",
    "import sys\nsys.argv",
    "import sys\nsys.modules['time']",
    "import torch\ntorch.rand(1)",
    "import torch.cuda",
    "import torch.cuda as c",
    "from torch.cuda import device_count",
    "from torch import cuda",
    "import torch as t\ngetattr(t, 'rand')(1)",
    "import pathlib\npathlib.os.getpid()",
    "import warnings\nx = warnings.sys",
    "from pathlib import os",
    "__import__('time')",
    "eval('1')",
    "exec('import time')",
    "__builtins__['x']",
)


@pytest.mark.parametrize("source", PLAIN)
def test_what_a_record_shows_may_be_used(source):
    assert recipe_reads.not_plain(source.encode(), {"mine"}) is None


@pytest.mark.parametrize("source", NOT_PLAIN)
def test_what_no_record_shows_may_not(source):
    assert recipe_reads.not_plain(source.encode(), {"mine"})


def test_the_record_has_what_was_read_and_refuses_the_rest(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with recipe_reads.recorded(None) as reads:
        (tmp_path / "a.txt").read_text()
        (tmp_path / "none").exists()
        list(tmp_path.iterdir())
    assert reads.files[str(tmp_path / "a.txt")] is not None
    assert reads.files[str(tmp_path / "none")] is None
    assert str(tmp_path) in reads.folders
    assert recipe_reads.unchanged({str(tmp_path / "none"): None}, reads.folders)
    (tmp_path / "b.txt").touch()
    assert not recipe_reads.unchanged({}, reads.folders)


@pytest.mark.parametrize(
    "deed", (lambda file: file.write_text("a"), lambda file: file.unlink(), lambda _: Path("/proc/stat").read_text())
)
def test_what_is_no_reading_is_refused(tmp_path, deed):
    file = tmp_path / "a.txt"
    file.write_text("a")
    with recipe_reads.recorded(None) as reads:
        deed(file)
    assert reads.refused

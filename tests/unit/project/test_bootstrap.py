"""scripts/bootstrap, with a Python and a uv that only write down how they are called."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "scripts/lock" / platform.machine()

# What the script calls. Nothing else is on its PATH: the machine's own Python and uv stay out of these tests.
TOOLS = ("bash", "cat", "cp", "cut", "dirname", "flock", "grep", "ln", "mkdir", "paste")
TOOLS += ("realpath", "rm", "sed", "sha256sum", "sort", "uname")

PYTHON = """#!/bin/bash
echo "python $*" >>{log}
case "$*" in
{lacks}
*version_info[[]:2]*) echo {version} ;;
*--modules*) exit 1 ;;
*"-m venv"*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
*"--target "*) cat >{log}.lock && mkdir -p "${{@: -1}}/bin" && cp {uv} "${{@: -1}}/bin/uv" ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >>{log}
[ "${{@: -1}}" != - ] || cat >/dev/null
case "$*" in
{lacks}
"venv "*) mkdir -p "${{@: -1}}/bin" && cp {python} "${{@: -1}}/bin/python" && cp "$0" "${{@: -1}}/bin/uv" ;;
esac
"""


class Machine:
    """A checkout in an empty world, to which a test adds Pythons and uv."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkout = folder / "checkout"
        self.venv = self.checkout / ".venv"
        self.log = folder / "log"
        self.path = [folder / "bin", folder / "tools"]
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        (folder / "tools").mkdir()
        for tool in TOOLS:
            (folder / "tools" / tool).symlink_to(shutil.which(tool))
        self.python("made/python")
        self.uv("made/uv")

    def script(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return file

    def python(self, path: str, version: str = "3.12", lacks: str = "") -> Path:
        """A Python that fails at commands that contain `lacks`."""
        return self.stand_in(path, PYTHON, lacks, version=version, uv=self.folder / "made/uv")

    def uv(self, path: str, lacks: str = "") -> Path:
        return self.stand_in(path, UV, lacks, python=self.folder / "made/python")

    def stand_in(self, path: str, text: str, lacks: str, **values: object) -> Path:
        lacks = lacks and f'*"{lacks}"*) exit 1 ;;'
        return self.script(path, text.format(log=self.log, lacks=lacks, **values))

    def architecture(self, system: str, machine: str) -> Path:
        """What `uname` says from now on."""
        case = f'case "$1" in -s) echo {system} ;; -m) echo {machine} ;; *) echo {system} {machine} ;; esac'
        return self.script("bin/uname", f"#!/bin/bash\n{case}\n")

    def bootstrap(self, *options: str, **variables: str) -> subprocess.CompletedProcess:
        env = {"PATH": ":".join(map(str, self.path)), "HOME": str(self.folder / "home"), **variables}
        command = [self.checkout / "scripts/bootstrap", *options]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """What was called since the last time we asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def installed(machine):
    machine.python("bin/python3.12")
    machine.uv("bin/uv")
    result = machine.bootstrap()
    assert result.returncode == 0, result.stderr
    return machine


def test_another_system_is_named_before_any_of_its_tools_is_used(machine):
    """macOS has no `realpath -m`."""
    machine.architecture("Darwin", "arm64")
    machine.script("bin/realpath", "#!/bin/bash\necho realpath: illegal option -- m >&2; exit 1\n")
    result = machine.bootstrap()
    assert result.returncode == 2
    assert result.stderr == "bootstrap: the locks are for Linux on x86-64 and aarch64; this is Darwin arm64\n"


def venvs(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("uv venv")]


def syncs(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("uv pip sync")]


# --- which Python, which uv ---------------------------------------------------------------------------------


def chosen(machine: Machine, **variables: str) -> str:
    result = machine.bootstrap("--plan", **variables)
    assert result.returncode == 0, result.stderr
    assert not machine.venv.exists()
    return result.stdout.splitlines()[0].removeprefix("python: ")


def test_path_comes_before_pyenv_and_pyenv_before_uv(machine):
    assert chosen(machine) == "3.12, which uv finds or downloads"
    machine.python("pyenv/versions/3.12.9/bin/python3.12")
    newest = machine.python("pyenv/versions/3.12.10/bin/python3.12")
    assert chosen(machine, PYENV_ROOT=str(machine.folder / "pyenv")) == str(newest)
    machine.script("bin/python3.12", "#!/bin/bash\necho 'command not found' >&2; exit 127\n")  # a shim
    machine.python("bin/python3", version="3.11")
    assert chosen(machine, PYENV_ROOT=str(machine.folder / "pyenv")) == str(newest)
    python = machine.python("bin/python3.12")
    assert chosen(machine, PYENV_ROOT=str(machine.folder / "pyenv")) == str(python)


def test_the_python_that_the_user_names_wins(machine):
    machine.python("bin/python3.12")
    named = str(machine.python("mine/python"))
    assert chosen(machine, PYTHON=named) == named


@pytest.mark.parametrize("lacks", ("", "import ensurepip"), ids=("ensurepip", "pip only"))
def test_without_uv_the_pip_of_an_older_python_installs_the_locked_one(machine, lacks):
    machine.python("bin/python3", version="3.11", lacks=lacks)
    result = machine.bootstrap()
    assert result.returncode == 0, result.stderr
    calls = machine.calls()
    (fetch,) = (call for call in calls if "-m pip install" in call)
    assert {"--require-hashes", "--no-deps"} <= set(fetch.split())
    # The other tools need a newer Python than uv does.
    (entry,) = re.findall(r"^uv==(?:.*\\\n)*.*\n", (LOCK / "tools.txt").read_text(), re.MULTILINE)
    assert (machine.folder / "log.lock").read_text() == entry
    assert venvs(calls) == [f"uv venv --quiet --allow-existing --python 3.12 {machine.venv}"]
    assert not list(machine.checkout.glob(".venv-*"))


# What is wrong with the machine, options, variables, the end of the error.
REFUSED = {
    "nothing": (lambda machine: None, (), {}, "pip or ensurepip: sudo apt install python3-venv"),
    "no pip": (lambda machine: machine.python("bin/python3", "3.11", lacks="import"), (), {}, "install python3-venv"),
    "no 3.12": (lambda machine: machine.uv("home/.local/bin/uv", lacks="venv"), (), {}, "PYTHON=/path/to/python3.12 …"),
    "older": (lambda machine: machine.python("bin/old", "3.11"), (), {"PYTHON": "old"}, "not a Python 3.12 that runs"),
    "riscv": (lambda machine: machine.architecture("Linux", "riscv64"), (), {}, "aarch64; this is Linux riscv64"),
    "macOS": (lambda machine: machine.architecture("Darwin", "aarch64"), (), {}, "aarch64; this is Darwin aarch64"),
    "option": (lambda machine: None, ("--gpus",), {}, "unknown option --gpus; see the head of scripts/bootstrap"),
    "no GPU": (lambda machine: machine.python("bin/python3.12"), ("--gpu",), {}, "make TORCH_CUDA_ARCH_LIST=9.0 gpu"),
    "theirs": (lambda machine: (machine.folder / "bin").mkdir(), (), {"VENV": "../bin"}, "away, or set VENV=…"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_one_error_and_nothing_is_touched(machine, case):
    make, options, variables, end = REFUSED[case]
    make(machine)
    result = machine.bootstrap(*options, **variables)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("bootstrap: ")
    assert result.stderr.endswith(end + "\n")
    assert not machine.venv.exists()


# --- install and stamp --------------------------------------------------------------------------------------


def test_first_call_installs_with_hashes_and_compiles_and_the_second_does_nothing(installed):
    calls = installed.calls()
    (sync,) = syncs(calls)
    assert {"--require-hashes", "--compile-bytecode", "--no-build-isolation"} <= set(sync.split())
    assert re.findall(r"lock/\w+/(\w+)\.txt", sync) == ["tools", "base", "dev", "torch", "megatron"]
    assert any("--editable ." in call for call in calls)
    assert any("schema.write_field_table(field_table.in_environment())" in call for call in calls[-2:])
    assert "numerics=portable" in calls[-1]
    assert installed.bootstrap().returncode == 0
    assert installed.calls() == []


@pytest.mark.parametrize("machine_name", ("x86_64", "aarch64"))
def test_an_architecture_has_its_own_locks_and_takes_no_other(machine, machine_name):
    machine.architecture("Linux", machine_name)
    machine.python("bin/python3.12")
    machine.uv("bin/uv")
    result = machine.bootstrap()
    assert result.returncode == 0, result.stderr
    calls = machine.calls()
    (sync,) = syncs(calls)
    assert set(re.findall(r"scripts/lock/(\w+)/", "\n".join(calls))) == {machine_name}
    assert f"--python-platform {machine_name}-manylinux_2_40" in sync


# Each has the word numba.
CHANGED = (LOCK.relative_to(ROOT) / "base.txt", "pyproject.toml", "scripts/bootstrap")


@pytest.mark.parametrize("file", CHANGED, ids=str)
def test_a_change_is_installed_into_the_same_venv(installed, file):
    """But not a change of what linters and pytest read, which is most of pyproject.toml."""
    path = installed.checkout / file
    path.write_text(path.read_text().replace("max-complexity = 15", "max-complexity = 16"))
    installed.calls()
    assert installed.bootstrap().returncode == 0
    assert installed.calls() == []
    path.write_text(path.read_text().replace("numba", "Numba"))
    assert installed.bootstrap().returncode == 0
    calls = installed.calls()
    assert (len(syncs(calls)), venvs(calls)) == (1, [])


def test_a_killed_install_begins_anew(machine):
    machine.python("bin/python3.12")
    uv = machine.uv("bin/uv")
    uv.write_text(uv.read_text().replace('case "$*" in', 'case "$*" in\n"pip sync"*) kill -KILL $PPID ;;'))
    assert machine.bootstrap().returncode != 0
    leftover = machine.venv / "half-a-package"
    leftover.touch()
    machine.uv("bin/uv")
    machine.calls()
    assert machine.bootstrap().returncode == 0
    assert len(venvs(machine.calls())) == 1
    assert not leftover.exists()


def test_a_moved_checkout_begins_anew(installed):
    installed.calls()
    installed.checkout = installed.checkout.rename(installed.folder / "moved")
    assert installed.bootstrap().returncode == 0
    assert len(venvs(installed.calls())) == 1


def test_kernels_are_built_for_the_named_gpus_and_kept(installed):
    installed.script("bin/g++", "#!/bin/bash\n")
    installed.calls()
    assert installed.bootstrap("--gpu", TORCH_CUDA_ARCH_LIST="9.0").returncode == 0
    calls = installed.calls()
    assert "/gpu.txt" in syncs(calls)[0]
    (build,) = (call for call in calls if "/kernels.txt" in call)
    assert {"--require-hashes", "--no-build-isolation", "archs=9.0"} <= set(build.split())
    assert installed.bootstrap().returncode == 0
    assert installed.calls() == []


# --- containers ---------------------------------------------------------------------------------------------


def lacking(machine: Machine, packages: tuple[str, ...], **variables: str) -> set[str]:
    """What .venv gets beside a Python that has only these packages; otherwise this Python is real."""
    machine.script("bin/python3.12", f'#!/bin/bash\nexec {sys._base_executable} -S "$@"\n')
    site = machine.folder / "site-packages"
    for name in packages:
        module = site / name.replace("-", "_").replace("megatron_", "megatron/")
        module.mkdir(parents=True)
        (module / "__init__.py").touch()
        (site / f"{name.replace('-', '_')}-1.0.dist-info").mkdir()
    result = machine.bootstrap("--plan", PYTHONPATH=str(site), **variables)
    assert result.returncode == 0, result.stderr
    return set(re.findall(r"^lacking: (.*)==", result.stdout, re.MULTILINE))


def test_in_nemo_only_the_light_packages_that_are_lacking_come_along(machine):
    there = ("torch", "numpy", "megatron-core", "megatron-bridge", "transformer-engine", "rich", "pydantic")
    names = lacking(machine, there)
    assert {"hydra-core", "omegaconf", "typer", "xxhash", "pytest", "ruff"} <= names
    assert not names & {*there, "transformers"}


def test_a_pytorch_container_also_lacks_megatron(machine):
    names = lacking(machine, ("torch", "transformer-engine"), NVIDIA_PYTORCH_VERSION="26.09")
    assert {"megatron-core", "megatron-bridge", "transformers", "hydra-core"} <= names
    assert not names & {"torch", "torchvision", "triton", "numpy", "nvidia-cublas", "transformer-engine"}


def test_a_cuda_image_without_pytorch_is_no_such_container(machine):
    assert lacking(machine, (), NVIDIA_PRODUCT_NAME="CUDA") == set()


def test_a_venv_sees_the_packages_of_the_container(machine):
    lacking(machine, ("torch",))
    command = [machine.folder / "bin/python3.12", ROOT / "scripts/lacking.py", "--site"]
    env = os.environ | {"PYTHONPATH": str(machine.folder / "site-packages")}
    line = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    code = f"{line}\nimport torch; print(torch.__file__)"
    seen = subprocess.run([sys._base_executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(machine.folder / "site-packages/torch/__init__.py")

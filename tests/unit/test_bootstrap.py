"""scripts/bootstrap, with interpreters and installers that only write down how they are called."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("tools", "base", "dev", "torch", "megatron", "gpu", "kernels")

# What the script calls. Nothing else is on its PATH: the machine's own Python and uv stay out of these tests.
TOOLS = ("bash", "cat", "cp", "cut", "dirname", "flock", "grep", "ln", "mkdir", "mktemp", "paste")
TOOLS += ("realpath", "rm", "sed", "sha256sum", "sort", "uname")

PYTHON = """#!/bin/bash
echo "python $*" >>{log}
case "$*" in
*version_info*) echo {version} ;;
*"-m venv"*)
    mkdir -p "${{@: -1}}/bin"
    cp "$0" "${{@: -1}}/bin/python"
    cp "${{0%/*}}/installer" "${{@: -1}}/bin/uv"
    ;;
*--modules*) exit 1 ;;
esac
"""
INSTALLER = """#!/bin/bash
echo "uv $*" >>{log}
"""


class Machine:
    """A checkout in an empty world, to which a test adds Pythons."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkout = folder / "checkout"
        self.venv = self.checkout / ".venv"
        self.log = folder / "log"
        self.path = [folder / "tools"]
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        (folder / "tools").mkdir()
        for tool in TOOLS:
            (folder / "tools" / tool).symlink_to(shutil.which(tool))

    def script(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return file

    def python(self, path: str, version: str = "3.12") -> Path:
        file = self.script(path, PYTHON.format(version=version, log=self.log))
        self.script(f"{Path(path).parent}/installer", INSTALLER.format(log=self.log))
        return file

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


def chosen(result: subprocess.CompletedProcess) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.splitlines()[0].removeprefix("python: "))


# --- which Python -------------------------------------------------------------------------------------------


def is_told_how_to_get_python(result: subprocess.CompletedProcess) -> bool:
    hints = r"apt install.*pyenv install.*uv python install.*make PYTHON="
    return result.returncode == 2 and bool(re.search(hints, result.stderr, re.DOTALL))


def test_a_machine_without_any_python_is_told_four_ways_to_get_it(machine):
    result = machine.bootstrap("--plan")
    assert is_told_how_to_get_python(result)
    assert "Neither uv nor a Python (3.8 or newer)" in result.stderr
    assert not machine.venv.exists()


def test_python_on_path_is_used(machine):
    python = machine.python("bin/python3.12")
    machine.path.insert(0, python.parent)
    assert chosen(machine.bootstrap("--plan")) == python


def test_a_shim_that_fails_and_an_older_python3_are_passed_over(machine):
    shim = machine.script("shims/python3.12", "#!/bin/bash\necho 'command not found' >&2; exit 127\n")
    older = machine.python("old/python3", version="3.11")
    real = machine.python("home/.pyenv/versions/3.12.7/bin/python3.12")
    machine.path[:0] = [shim.parent, older.parent]
    assert chosen(machine.bootstrap("--plan")) == real


def test_the_newest_of_pyenv_is_used(machine):
    machine.python("elsewhere/versions/3.12.9/bin/python3.12")
    newest = machine.python("elsewhere/versions/3.12.10/bin/python3.12")
    assert chosen(machine.bootstrap("--plan", PYENV_ROOT=str(machine.folder / "elsewhere"))) == newest


def test_uv_is_asked_even_where_it_is_not_on_path(machine):
    python = machine.python("managed/python3.12")
    machine.script("home/.local/bin/uv", f"#!/bin/bash\necho {python}\n")
    assert chosen(machine.bootstrap("--plan")) == python


def test_the_python_that_the_user_names_wins_or_is_refused(machine):
    machine.path.insert(0, machine.python("bin/python3.12").parent)
    named = machine.python("mine/python")
    assert chosen(machine.bootstrap("--plan", PYTHON=str(named))) == named

    older = machine.python("old/python", version="3.11")
    result = machine.bootstrap("--plan", PYTHON=str(older))
    assert result.returncode == 2
    assert f"PYTHON={older}" in result.stderr


def test_a_python_that_uv_installed_is_found_without_uv(machine):
    """Say by an earlier call, whose uv is gone; --plan and UV_OFFLINE show that nothing is fetched."""
    python = machine.python("home/.local/share/uv/python/cpython-3.12.16-linux-x86_64-gnu/bin/python3.12")
    assert chosen(machine.bootstrap("--plan", UV_OFFLINE="1")) == python

    moved = machine.python("pythons/cpython-3.12.17-linux-x86_64-gnu/bin/python3.12")
    assert chosen(machine.bootstrap("--plan", UV_PYTHON_INSTALL_DIR=str(machine.folder / "pythons"))) == moved


# --- a Python from uv, with interpreters and installers that only write down --------------------------------

OLDER = PYTHON.replace('case "$*" in', 'case "$*" in\n{lacks}', 1)
UV = """#!/bin/bash
echo "uv $*" >>{log}
pythons=$HOME/.local/share/uv/python/cpython-3.12.16/bin
case "$*" in
"python install"*) mkdir -p "$pythons" && cp {new} {new}/../installer "$pythons" ;;
*"--managed-python"*) echo "$pythons/python3.12" ;;
esac
"""


@pytest.fixture
def older(machine):
    """python3 is 3.11; the uv that its pip installs puts a 3.12 into its own folder."""
    new = machine.python("downloads/python3.12")
    machine.python("older/python3", version="3.11")
    machine.script("older/installer", UV.format(log=machine.log, new=new).replace("/python3.12/..", ""))
    machine.path.insert(0, machine.folder / "older")
    machine.new = machine.folder / "home/.local/share/uv/python/cpython-3.12.16/bin/python3.12"
    return machine


def lacks(machine: Machine, *tests: str) -> None:
    """Make the older Python fail at the tests whose commands contain these words."""
    answers = "\n".join(f'*"{test}"*) exit 1 ;;' for test in tests)
    machine.script("older/python3", OLDER.format(version="3.11", log=machine.log, lacks=answers))


def left_overs(machine: Machine) -> list[Path]:
    """Of uv, which was needed for a moment only."""
    return list(machine.checkout.glob(".venv-*"))


def test_the_plan_names_who_installs_python_and_installs_nothing(older):
    result = older.bootstrap("--plan")
    assert result.returncode == 0
    python, locks = result.stdout.splitlines()
    assert python.startswith(f"python: pip of {older.folder}/older/python3 installs uv, which installs 3.12 into ")
    assert python.endswith(str(older.new.parents[2]))
    assert re.findall(r"lock/(\w+)\.txt", locks) == ["tools", "base", "dev", "torch", "megatron"]
    assert not [call for call in older.calls() if "install" in call or "-m venv" in call]
    assert not older.venv.exists()


def test_without_python_312_pip_installs_uv_and_uv_installs_python(older):
    result = older.bootstrap()
    assert result.returncode == 0, result.stderr
    assert "there is no Python 3.12 here" in result.stderr
    assert f"from {older.new}" in result.stderr
    calls = older.calls()
    uv = next(place for place, call in enumerate(calls) if call.startswith("python -m pip install"))
    assert {"--require-hashes", "--no-deps"} <= set(calls[uv].split())
    assert "uv python install 3.12" in calls[uv:]
    assert len(sync(calls)) == 1
    assert left_overs(older) == []


def test_uv_is_installed_from_its_own_entry_of_the_lock(older):
    """The other tools need a newer Python than uv does."""
    keep = OLDER.format(version="3.11", log=older.log, lacks=f'*"-m pip"*) cp "${{@: -1}}" {older.folder}/uv.txt ;;')
    older.script("older/python3", keep)
    assert older.bootstrap().returncode == 0
    (entry,) = re.findall(r"^uv==(?:.*\\\n)*.*\n", (ROOT / "scripts/lock/tools.txt").read_text(), re.MULTILINE)
    assert (older.folder / "uv.txt").read_text() == entry


def test_without_ensurepip_pip_installs_uv_into_a_folder(older):
    lacks(older, "import ensurepip")
    result = older.bootstrap()
    (install,) = (call for call in older.calls() if "-m pip install" in call)
    assert f"--target {older.checkout}/.venv-uv-" in install
    # This pip installs nothing.
    assert is_told_how_to_get_python(result)
    assert "pip of" in result.stderr
    assert left_overs(older) == []
    assert not older.venv.exists()


@pytest.mark.parametrize("tests", (("import ensurepip", "import pip"), (">= (3, 8)",)), ids=("no pip", "too old"))
def test_a_python_that_cannot_install_uv_is_passed_over(older, tests):
    lacks(older, *tests)
    result = older.bootstrap()
    assert is_told_how_to_get_python(result)
    assert "Neither uv nor a Python (3.8 or newer)" in result.stderr
    assert not [call for call in older.calls() if "install" in call]


def test_the_uv_that_is_here_is_used_and_pip_is_not_asked(older):
    shutil.copy(older.folder / "older/installer", older.folder / "older/uv")
    plan = older.bootstrap("--plan").stdout
    assert plan.startswith(f"python: {older.folder}/older/uv installs 3.12 into ")
    older.calls()
    assert older.bootstrap().returncode == 0
    calls = older.calls()
    assert calls.index("uv python install 3.12") < calls.index(f"python -m venv {older.venv}")


@pytest.mark.parametrize(
    "setting", ("UV_OFFLINE=1", "UV_OFFLINE=True", "UV_PYTHON_DOWNLOADS=never", "UV_PYTHON_DOWNLOADS=manual")
)
@pytest.mark.parametrize("options", ((), ("--plan",)), ids=("install", "plan"))
def test_who_forbids_downloads_is_told_so_and_nothing_is_fetched(older, setting, options):
    result = older.bootstrap(*options, **dict([setting.split("=")]))
    assert is_told_how_to_get_python(result)
    assert f"{setting} forbids to download one, so nothing was downloaded" in result.stderr
    assert not [call for call in older.calls() if "install" in call]
    assert not older.venv.exists()


@pytest.mark.parametrize("setting", ("UV_OFFLINE=0", "UV_OFFLINE=", "UV_PYTHON_DOWNLOADS=automatic"))
def test_other_values_forbid_nothing(older, setting):
    assert older.bootstrap(**dict([setting.split("=")])).returncode == 0


def test_where_python_312_is_there_uv_installs_none(older):
    older.path.insert(0, older.python("bin/python3.12").parent)
    shutil.copy(older.folder / "older/installer", older.folder / "older/uv")
    assert older.bootstrap().returncode == 0
    assert not [call for call in older.calls() if "python install" in call]


# --- a Python from uv, with real ones and a mirror of our own -----------------------------------------------

ARCHIVE = "20261110/cpython-3.12.99%2B20261110-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
STRIPPED = {"test", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "tkinter", "turtledemo"}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory) -> Path:
    """A folder as UV_PYTHON_INSTALL_MIRROR wants it, with this Python in it; uv knows its hash from downloads.json."""
    folder = tmp_path_factory.mktemp("mirror")
    archive = folder / ARCHIVE.replace("%2B", "+")
    archive.parent.mkdir()
    prefix = Path(sys.base_prefix)

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(entry.name).name
        return None if name in STRIPPED or name.startswith("config-") else entry

    with tarfile.open(archive, "w:gz", compresslevel=1) as stream:
        stream.add(Path(sys._base_executable).resolve(), "python/bin/python3.12")
        stream.add(prefix / "lib/python3.12", "python/lib/python3.12", filter=keep)
        for library in prefix.glob("lib/libpython3.12.so.1.0"):
            stream.add(library, f"python/lib/{library.name}")
    build = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": 3,
        "minor": 12,
        "patch": 99,
        "prerelease": "",
        "url": f"https://github.com/astral-sh/python-build-standalone/releases/download/{ARCHIVE}",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "variant": None,
        "build": "20261110",
    }
    for name, sha256 in (("downloads", build["sha256"]), ("other-hash", "0" * 64)):
        builds = {"cpython-3.12.99-linux-x86_64-gnu": build | {"sha256": sha256}}
        (folder / f"{name}.json").write_text(json.dumps(builds))
    return folder


@pytest.fixture
def real(machine, mirror) -> Machine:
    """python3 is a real one that says it is 3.11; its pip finds a uv that is real for `uv python` only."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None or importlib.util.find_spec("ensurepip") is None:
        pytest.skip("needs uv and ensurepip")
    case = f'case "$*" in *version_info[[]:2]*) echo 3.11 ;; *) exec {sys._base_executable} "$@" ;; esac'
    machine.path.insert(0, machine.script("older/python3", f"#!/bin/bash\n{case}\n").parent)
    script = f'#!/bin/bash\necho "uv $*" >>{machine.log}\n[ "$1" != python ] || exec {uv} "$@"\n'
    machine.uv = machine.script("uv/uv", script)
    wheel = machine.folder / "wheels/uv-9.9-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as stream:
        stream.write(machine.uv, "uv-9.9.data/scripts/uv")
        stream.writestr("uv-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 9.9\n")
        stream.writestr("uv-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        stream.writestr("uv-9.9.dist-info/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock = machine.checkout / "scripts/lock/tools.txt"
    lock.write_text(f"# Only uv.\nuv==9.9 \\\n    --hash=sha256:{sha256}\n")
    machine.downloads = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheel.parent),
        "UV_PYTHON_INSTALL_MIRROR": mirror.as_uri(),
        "UV_PYTHON_DOWNLOADS_JSON_URL": (mirror / "downloads.json").as_uri(),
        "UV_HTTP_RETRIES": "0",
    }
    return machine


def installed_pythons(machine: Machine) -> Iterator[Path]:
    return (machine.folder / "home/.local").glob("**/python3.12")


@pytest.mark.release  # in `make test`: the same with stand-ins for uv and pip
def test_python_comes_from_a_mirror(real):
    result = real.bootstrap(**real.downloads)
    assert result.returncode == 0, result.stderr
    code = "import sys; print(sys._base_executable)"
    base = subprocess.run([real.venv / "bin/python", "-c", code], capture_output=True, text=True, check=True).stdout
    assert base.startswith(str(real.folder / "home/.local/share/uv/python/cpython-3.12"))
    assert len(sync(real.calls())) == 1
    assert left_overs(real) == []
    assert not list((real.folder / "home").glob(".local/bin/*"))

    shutil.rmtree(real.venv)
    assert real.bootstrap(UV_OFFLINE="1", **real.downloads).returncode == 0
    assert not [call for call in real.calls() if "python install" in call]


@pytest.mark.parametrize(
    "change, reason",
    (
        ({"UV_PYTHON_INSTALL_MIRROR": "http://127.0.0.1:1"}, "http://127.0.0.1:1/20261110/cpython-3.12.99"),
        ({"UV_PYTHON_DOWNLOADS_JSON_URL": "other-hash.json"}, "Hash mismatch"),
    ),
    ids=("down", "another archive"),
)
def test_a_mirror_that_fails_leaves_nothing_and_its_reason_stands_above_the_hints(real, mirror, change, reason):
    real.path[0] = real.uv.parent  # it would see through our older Python
    change = {key: value if "://" in value else (mirror / value).as_uri() for key, value in change.items()}
    result = real.bootstrap(**real.downloads | change)
    assert is_told_how_to_get_python(result)
    assert result.stderr.index(reason) < result.stderr.index("uv cannot install one; its reason is above")
    assert not real.venv.exists()
    assert not list(installed_pythons(real))
    assert left_overs(real) == []


# --- install and stamp --------------------------------------------------------------------------------------


def sync(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("uv pip sync")]


@pytest.fixture
def installed(machine):
    machine.path.insert(0, machine.python("bin/python3.12").parent)
    assert machine.bootstrap().returncode == 0
    return machine


def test_first_call_installs_with_hashes_and_compiles(installed):
    calls = installed.calls()
    assert any("-m venv" in call for call in calls)
    assert any("-m pip install" in call and "--require-hashes" in call and "tools.txt" in call for call in calls)
    (install,) = sync(calls)
    assert {"--require-hashes", "--compile-bytecode", "--no-build-isolation"} <= set(install.split())
    assert re.findall(r"lock/(\w+)\.txt", install) == ["tools", "base", "dev", "torch", "megatron"]
    assert any(f"--editable {installed.checkout}" in call for call in calls)
    assert any("schema.write_field_table(field_table.in_environment())" in call for call in calls[-2:])


def test_second_call_does_nothing(installed):
    installed.calls()
    assert installed.bootstrap().returncode == 0
    assert installed.calls() == []


@pytest.mark.parametrize("file", ("scripts/lock/base.txt", "pyproject.toml"))
def test_a_change_is_installed_into_the_same_venv(installed, file):
    installed.calls()
    with (installed.checkout / file).open("a") as stream:
        stream.write("# changed\n")
    assert installed.bootstrap().returncode == 0
    calls = installed.calls()
    assert len(sync(calls)) == 1
    assert not any("-m venv" in call for call in calls)


def test_a_killed_install_begins_anew(machine):
    machine.path.insert(0, machine.python("bin/python3.12").parent)
    machine.script("bin/installer", "#!/bin/bash\nkill -KILL $PPID\n")
    assert machine.bootstrap().returncode != 0
    left_over = machine.venv / "half-a-package"
    left_over.touch()

    machine.python("bin/python3.12")
    machine.calls()
    assert machine.bootstrap().returncode == 0
    assert any("-m venv" in call for call in machine.calls())
    assert not left_over.exists()


def test_a_moved_checkout_begins_anew(installed):
    installed.calls()
    installed.checkout = installed.checkout.rename(installed.folder / "moved")
    assert installed.bootstrap().returncode == 0
    assert any("-m venv" in call for call in installed.calls())
    assert installed.bootstrap().returncode == 0
    assert installed.calls() == []


def test_a_venv_of_someone_else_is_left_alone(installed):
    theirs = installed.folder / "theirs"
    (theirs / "bin").mkdir(parents=True)
    result = installed.bootstrap(VENV=str(theirs))
    assert result.returncode == 2
    assert "not made by this script" in result.stderr
    assert list(theirs.iterdir()) == [theirs / "bin"]


def test_without_ensurepip_uv_installs_uv(machine):
    python = machine.python("bin/python3.12")
    text = python.read_text().replace('case "$*" in', 'case "$*" in\n*"import ensurepip"*) exit 1 ;;', 1)
    machine.script("bin/python3.12", text)
    machine.path.insert(0, python.parent)
    result = machine.bootstrap()
    assert result.returncode == 2
    assert "python3.12-venv" in result.stderr
    assert not machine.venv.exists()

    machine.script("home/.local/bin/uv", f'#!/bin/bash\necho "own uv $*" >>{machine.log}\n')
    machine.calls()
    assert machine.bootstrap().returncode == 0
    calls = machine.calls()
    assert any("-m venv --without-pip" in call for call in calls)
    assert any(call.startswith("own uv pip install") and "--require-hashes" in call for call in calls)


def test_without_a_gpu_to_build_for_nothing_is_touched(installed):
    stamp = (installed.venv / ".bootstrap").read_text()
    result = installed.bootstrap("--gpu")
    assert result.returncode == 2
    assert "TORCH_CUDA_ARCH_LIST" in result.stderr
    assert (installed.venv / ".bootstrap").read_text() == stamp


def test_kernels_are_built_for_the_named_gpus_and_kept(installed):
    installed.script("bin/g++", "#!/bin/bash\n")
    installed.calls()
    assert installed.bootstrap("--gpu", TORCH_CUDA_ARCH_LIST="9.0").returncode == 0
    calls = installed.calls()
    assert "lock/gpu.txt" in sync(calls)[0]
    (build,) = (call for call in calls if "lock/kernels.txt" in call)
    assert {"--require-hashes", "--no-build-isolation", "archs=9.0"} <= set(build.split())

    assert installed.bootstrap().returncode == 0
    assert installed.calls() == []


def test_other_processors_are_told_that_the_locks_do_not_fit(machine):
    machine.path.insert(0, machine.python("bin/python3.12").parent)
    machine.script("bin/uname", "#!/bin/bash\necho Linux aarch64\n")
    result = machine.bootstrap()
    assert result.returncode == 2
    assert "Linux aarch64" in result.stderr


# --- containers ---------------------------------------------------------------------------------------------


@pytest.fixture
def container(machine):
    """A Python whose only packages are those that the test adds; otherwise it is real."""
    python = machine.script("bin/python3.12", f'#!/bin/bash\nexec {sys._base_executable} -S "$@"\n')
    machine.path.insert(0, python.parent)
    machine.site = machine.folder / "site-packages"

    def add(*packages: str) -> None:
        for package in packages:
            name, version = package.split("==")
            module = machine.site / name.replace("-", "_").replace("megatron_", "megatron/")
            module.mkdir(parents=True)
            (module / "__init__.py").touch()
            (machine.site / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()

    machine.add = add
    return machine


def lacking(machine: Machine, **variables: str) -> set[str]:
    result = machine.bootstrap("--plan", PYTHONPATH=str(machine.site), **variables)
    assert result.returncode == 0, result.stderr
    return set(re.findall(r"^lacking: (.*)==", result.stdout, re.MULTILINE))


def test_in_nemo_only_the_light_packages_that_are_lacking_come_along(container):
    container.add("torch==2.9", "numpy==1.26", "megatron-core==0.15", "megatron-bridge==0.4")
    container.add("transformer-engine==2.8", "rich==13.7", "pydantic==2.7")
    names = lacking(container)
    assert {"hydra-core", "omegaconf", "typer", "xxhash", "pytest", "ruff"} <= names
    assert not names & {"torch", "numpy", "megatron-core", "megatron-bridge", "transformer-engine"}
    assert not names & {"rich", "pydantic", "transformers"}


def test_a_pytorch_container_also_lacks_megatron(container):
    container.add("torch==2.9", "transformer-engine==2.8")
    names = lacking(container, NVIDIA_PYTORCH_VERSION="26.09")
    assert {"megatron-core", "megatron-bridge", "transformers", "hydra-core"} <= names
    assert not names & {"torch", "torchvision", "triton", "numpy", "nvidia-cublas", "transformer-engine"}


def test_a_cuda_image_without_pytorch_is_no_such_container(container):
    result = container.bootstrap("--plan", NVIDIA_PRODUCT_NAME="CUDA")
    assert result.stdout.splitlines()[1].endswith("torch.txt scripts/lock/megatron.txt")
    assert "lacking" not in result.stdout


def test_a_venv_sees_the_packages_of_the_container(container):
    container.add("torch==2.9")
    command = [container.folder / "bin/python3.12", ROOT / "scripts/lacking.py", "--site"]
    env = os.environ | {"PYTHONPATH": str(container.site)}
    line = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    code = f"{line}\nimport torch; print(torch.__file__)"
    seen = subprocess.run([sys._base_executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(container.site / "torch/__init__.py")


# --- locks and kernels --------------------------------------------------------------------------------------


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / f"scripts/lock/{lock}.txt").read_text().splitlines()
    return dict(line.removesuffix(" \\").split("==") for line in lines if re.match(r"[a-z]", line))


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_versions_and_hashes_and_nothing_else(lock):
    text = (ROOT / f"scripts/lock/{lock}.txt").read_text()
    entry = r"[a-z0-9-]+==[a-z0-9.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(rf"(# .*\n)+({entry})+", text)


def test_no_package_is_in_two_locks():
    names = [name for lock in LOCKS for name in pins(lock)]
    assert len(names) == len(set(names))


def test_the_locks_satisfy_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {name: version for lock in LOCKS for name, version in pins(lock).items()}
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    for requirement in map(Requirement, project["dependencies"] + extras):
        assert requirement.specifier.contains(locked[requirement.name]), requirement


def test_nvcc_compiles_for_the_named_architectures_only(machine):
    machine.script("cuda/bin/nvcc", '#!/bin/bash\necho "$*"\n')
    env = os.environ | {"CUDA_HOME": str(machine.folder / "cuda"), "TORCH_CUDA_ARCH_LIST": "9.0 10.3"}
    command = [ROOT / "scripts/nvcc", "-c", "a.cu", "-gencode", "arch=compute_75,code=sm_75", "-o", "a.o"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    wanted = "-gencode arch=compute_90,code=sm_90 -gencode arch=compute_103,code=sm_103"
    assert result.stdout == f"-c a.cu -o a.o {wanted}\n"

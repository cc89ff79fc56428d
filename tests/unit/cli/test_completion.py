"""What the shell offers at TAB: the words that tpi answers with, and a real bash that is typed into."""

import os
import pty
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tp_invariant_recipes.cli import completion as shells
from tp_invariant_recipes.config import completion
from tp_invariant_recipes.settings import conf_files, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.tables import field_table

TPI = f'#!/bin/sh\nexec {sys.executable} -m tp_invariant_recipes "$@"\n'


def words_completed(incomplete: str, *, several: bool = False) -> list[str]:
    return [word for word, _ in completion.overrides(incomplete, several=several)]


def test_models_with_what_they_are():
    assert [name for name, _ in completion.models("")] == ["recipe=", *conf_files.groups()["model"]]
    assert all(summary for name, summary in completion.models("") if name != "recipe=")
    assert completion.models("qwen3_8") == [("qwen3_8b", "Qwen3-8B: 36 layers, untied embeddings.")]
    assert completion.models("gpt2") == []


def test_keys_are_short_ones_groups_and_sections():
    offered = completion.overrides("")
    groups = [f"{group}=" for group in conf_files.groups() if group != "model"]
    sections = [f"{section}." for section in sorted(schema.SECTIONS)]
    assert [word for word, _ in offered] == [*(f"{key}=" for key in SHORT_KEYS), *groups, *sections]
    assert dict(offered)["tp="] == "tensor-parallel degree"
    assert dict(offered)["data="] == "mock, text"


# What is typed, and what is offered for it.
OFFERED = (
    ("dev", ["device=", "device."]),
    ("se", ["seq=", "seed="]),
    ("numerics=t", ["numerics=tree"]),
    ("numerics.g", ["numerics.grad_norm="]),
    ("numerics.grad_norm=", ["numerics.grad_norm=exact", "numerics.grad_norm=fp64"]),
    ("run.", ["run.dir=", "run.hang_timeout=", "run.verify="]),
    ("run.hang_timeout=", ["run.hang_timeout=auto", "run.hang_timeout=off"]),
    ("slurm.ex", ["slurm.exclusive="]),
    ("slurm.exclusive=", ["slurm.exclusive=true", "slurm.exclusive=false"]),
    ("cluster.env", ["cluster.environment."]),
    ("model.tensor_model_", ["model.tensor_model_parallel_size="]),
    ("model.attention_backend=u", ["model.attention_backend=unfused"]),
    ("optimizer.use_dist", ["optimizer.use_distributed_optimizer="]),
    ("tokenizer.vocab_inc", ["tokenizer.vocab_includes_eod="]),
    ("mixed_precision.bf", ["mixed_precision.bf16="]),
    ("tp=", ["tp=1", "tp=2", "tp=4", "tp=8"]),
    ("sp=", ["sp=true", "sp=false"]),
    ("seq=", []),
    ("tpp", []),
    ("nothing.", []),
    ("nothing.x=", []),
)


@pytest.mark.parametrize("typed, offered", OFFERED, ids=[typed for typed, _ in OFFERED])
def test_an_override_is_offered_as_it_begins(typed, offered):
    assert words_completed(typed) == offered


def test_further_values_are_offered_where_a_key_may_have_several():
    assert words_completed("tp=1,", several=True) == ["tp=1,2", "tp=1,4", "tp=1,8"]
    assert words_completed("numerics=tree,s", several=True) == ["numerics=tree,stock"]
    assert words_completed("tp=1,") == []


def test_without_bridges_table_only_its_fields_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(field_table, "in_environment", lambda: tmp_path / "none")
    assert words_completed("model.num") == []
    assert words_completed("slurm.ti") == ["slurm.time="]


@pytest.fixture
def ask(cli, monkeypatch) -> Callable[..., list[str]]:
    """The lines of the answer to a line; text: what bash would replace."""

    def asking(line: str, shell: str = "zsh", text: str = "") -> list[str]:
        for name, value in ((shells.SHELL, shell), (shells.LINE, line), (shells.TEXT, text)):
            monkeypatch.setenv(name, value)
        ended = cli()
        assert (ended.status, ended.err) == (0, "")
        return ended.out.splitlines()

    return asking


# A line up to the cursor, and the answer's words; the first says whether files may stand there.
LINES = (
    ("tpi tra", ["words", "train"]),
    ("tpi data pre", ["words", "prepare"]),
    ("tpi train qwen3_8", ["words", "qwen3_8b"]),
    ("tpi train qwen3_8b tp=2 device=", ["words", "device=cpu", "device=gpu"]),
    ("tpi train --resume runs/a ite", ["words", "iters="]),
    ("tpi train --resume ", ["files"]),
    ("tpi train qwen3_8b --trace 1:2 ite", ["words", "iters="]),
    ("tpi train qwen3_8b --launcher sl", ["words", "slurm"]),
    ("tpi init ", ["words", "recipe", "sft", "lora", "cluster"]),
    ("tpi init l", ["words", "lora"]),
    ("tpi train qwen3_8b --re", ["words", "--resume"]),
    ("tpi train qwen3_8b tp=1,", ["words"]),
    ("tpi verify qwen3_8b tp=1,2,", ["words", "tp=1,2,4", "tp=1,2,8"]),
    ("tpi submit qwen3_8b --verify tp=4,", ["words", "tp=4,1", "tp=4,2", "tp=4,8"]),
    ('tpi verify qwen3_8b "tp=1,', ["words", "tp=1,2", "tp=1,4", "tp=1,8"]),
    ("tpi train qwen3_8b data.path=bo", ["files"]),
    ("tpi compare runs/", ["files"]),
    ("tpi doctor x", ["words"]),
    ("tpi nothing x", ["words"]),
)


@pytest.mark.parametrize("line, answer", LINES, ids=[line for line, _ in LINES])
def test_the_answer_to_a_line(ask, line, answer):
    assert [told.partition("\t")[0] for told in ask(line)] == answer


def test_bash_is_told_what_it_replaces(ask):
    assert ask("tpi train qwen3_toy numerics=t", "bash", "t") == ["words", "tree"]
    assert ask("tpi train qwen3_toy numerics=t", "bash", "numerics=t") == ["words", "numerics=tree"]
    assert ask("tpi train qwen3_toy model.attention_backend=un", "fish") == [
        "words",
        "model.attention_backend=unfused\t",
    ]


def test_the_script_of_an_earlier_version_is_told_nothing(ask):
    assert ask("tpi train qwen3_toy numerics=t", "complete_bash") == []


def read(terminal: int, until: str, seconds: float = 60) -> str:
    """What comes from a terminal, up to a mark."""
    message, deadline = "", time.monotonic() + seconds
    while until not in message:
        assert time.monotonic() < deadline, message
        if select.select([terminal], [], [], 0.5)[0]:
            message += os.read(terminal, 4096).decode()
    return message


@pytest.fixture(scope="module")
def typed_in_bash(tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """Type into an interactive bash that has loaded `tpi --show-completion`; the command line that is there then."""
    folder = tmp_path_factory.mktemp("bash")
    (folder / "tpi").write_text(TPI)
    (folder / "tpi").chmod(0o755)
    (folder / "books.txt").touch()
    (folder / "script").write_text((shells.SHELLS / "tpi.bash").read_text())
    (folder / "rc").write_text(f"PS1='> ' PATH={folder}:$PATH\nsource script\nbind 'set bell-style none'\n")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "dumb", "PYTHONPATH": str(Path(__file__).parents[3])}
        os.execvp("bash", ["bash", "--noprofile", "--rcfile", "rc", "-i"])
    read(terminal, "> ")

    def typing(keys: str) -> str:
        os.write(terminal, keys.encode() + b"|")  # the mark comes when the shell has dealt with all before it
        message = read(terminal, "|")
        os.write(terminal, b"\x15")  # Ctrl-U clears the line
        return message.replace("\r", "").split("> ")[-1].removesuffix("|").split("\x15")[-1].lstrip("\b \x1b[K")

    yield typing
    os.close(terminal)
    os.waitpid(child, 0)


# Keys, and the command line after them.
KEYS = (
    ("tpi train qwen3_toy numerics=t\t", "tpi train qwen3_toy numerics=tree "),
    ("tpi train qwen3_toy slurm.exc\t", "tpi train qwen3_toy slurm.exclusive="),
    ("tpi verify qwen3_toy numerics=tree,st\t", "tpi verify qwen3_toy numerics=tree,stock "),
    ("tpi train qwen3_toy data.path=bo\t", "tpi train qwen3_toy data.path=books.txt "),
)


@pytest.mark.parametrize("keys, line", KEYS, ids=[keys.strip() for keys, _ in KEYS])
def test_a_real_bash_completes(typed_in_bash, keys, line):
    assert typed_in_bash(keys) == line


@pytest.mark.parametrize("shell", shells.INSTALL_PATHS)
def test_the_script_is_installed_where_the_shell_loads_it(cli, monkeypatch, tmp_path, shell):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    place, loaded = shells.INSTALL_PATHS[shell]
    for _ in range(2):  # a second time changes nothing
        ended = cli("--install-completion")
        assert ended.status == 0, ended.err
        assert (
            (tmp_path / place).read_text()
            == (shells.SHELLS / f"tpi.{shell}").read_text()
            == cli("--show-completion").out
        )
        if loaded:
            line = loaded[1].format(file=tmp_path / place)
            assert (tmp_path / loaded[0]).read_text() == f"{line}\n"


def test_another_shell_is_refused(cli, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    ended = cli("--show-completion")
    assert ended.status == 2
    assert "SHELL=/bin/tcsh: completion is for bash, zsh, fish, as in SHELL=bash" in ended.err

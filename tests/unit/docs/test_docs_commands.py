# SPDX-License-Identifier: Apache-2.0
"""Every command line in the documents is one that `tpi` takes, and its overrides make a run."""

import re
from collections.abc import Iterator

import pytest

from tests.unit.docs.commands import names, options, parsed
from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features.verify import configurations
from tp_invariant_recipes.features.verify.configurations import Problems
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.schema import BRIDGE_SECTIONS
from tp_invariant_recipes.sizing import available_memory

HELP_LINES = [
    (f"tpi {name} --help", part)
    for name, command in names().items()
    for line in (command.help or "").splitlines()
    for part in re.split(r" [;|] |\$\(|\)", line.strip())
    if re.match(r"tpi [a-z]+ .*[\w/=-]$", part) and "…" not in part
]
LINES = [(document.name, line) for document in DOCUMENTS for line in document.commands] + HELP_LINES
SPANS = [(document.name, span) for document in DOCUMENTS for span in document.spans if re.match(r"tpi [a-z-]", span)]
# Options of other programs that the documents name.
FOREIGN = {
    "--device",  # scripts/make-certificates
    "--list",  # scripts/gpu
    "--password",  # of a program that tpi redacts
    "--regen-all",  # pytest-regressions
    # sbatch's and srun's
    "--array", "--comment", "--cpus-per-task", "--exclusive", "--gres", "--mail-type", "--mem", "--nodes", "--parsable",
    "--requeue", "--reservation", "--signal", "--mpi", "--container-writable",
    # of apptainer
    "--bind", "--nv",
    # of mlflow
    "--backend-store-uri",
    # of scripts/bootstrap, torchrun, run_recipe.py, pre-commit, pytest, uv, pip and tensorboard
    "--collect-only", "--continue", "--gpu", "--hook-type", "--hypothesis-profile", "--logdir", "--no-deps",
    "--newest", "--nproc-per-node", "--nproc_per_node", "--stock", "--only-downloads", "--plan", "--python-platform",
    "--recipe", "--require-hashes", "--show-urls",
    "--wheel-dir",
}  # fmt: skip


def typed(line: str) -> str:
    """The line as one would type it: without what may be left out, and with a word for what stands for others."""
    line = re.sub(r"\[[A-Z_]+ ?(?:…|\.\.\.)\]", "", line)  # [RUN_C …]
    line = re.sub(r"\[(-[^\]]*)\]", r"\1", line)  # [--all]
    line = re.sub(r"\bMODEL\b", "qwen3_toy", line)
    line = re.sub(r"\bSECONDS\b|\bN\b", "3", line)
    line = re.sub(r"^(tpi \w+) …", r"\1 qwen3_toy", line)
    return re.sub(r"(?<=\s)…|(?<==)…", "", line)


def test_a_line_is_one_that_tpi_takes():
    assert len(LINES) > 30
    wrong = {}
    for name, line in LINES:
        try:
            parsed(typed(line))
        except (Exception, SystemExit) as error:
            wrong[name, line] = error
    assert wrong == {}


def test_a_command_in_a_sentence_has_a_name_and_options_that_there_are():
    first = {name.split()[0] for name in names()}
    wrong = []
    for document, span in SPANS:
        words = [word.split("=")[0] for word in span.split()]
        known = " ".join(words[1:3]) in names() or words[1] in first
        if not known or not {word for word in words if re.match(r"--?[a-z]", word)} <= options():
            wrong.append(f"{document}: {span}")
    assert SPANS
    assert wrong == []


def test_an_option_is_one_that_there_is_and_each_command_is_documented():
    text = "\n".join(text for document in DOCUMENTS for text in (*document.spans, *document.code))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - options() - FOREIGN == set()
    assert [command for command in names() if not re.search(rf"\btpi {command}\b", text)] == []


def composable() -> list[tuple[str, str, bool]]:
    """Model and overrides of the lines that make runs, of a matrix with all their values; each once.

    The third is whether the overrides say how large the model is.
    """
    results = {}
    for _, line in LINES:
        try:
            command, given = parsed(typed(line))
        except Exception:  # the test above says so, of this line alone
            continue
        # Two configurations of any kind; a recipe, of which only Bridge knows what it is.
        if given.get("diff") or str(given.get("model")).startswith("recipe="):
            continue
        if command in ("train", "show", "submit", "verify", "bench", "audit"):
            words = [*(given.get("overrides") or ())]
            if command == "audit":  # of stock numerics unless told otherwise
                words = ["numerics=stock", *words, *(given["against"] or ())]
            words += [f"ledger.trace={given['trace']}"] if given.get("trace") else []
            sized = not any(word.startswith("model.") and not _is_tpis(word) for word in words)
            if any(word.startswith("model.moe_layer_freq") for word in words):  # a number for each layer
                words = [word for word in words if not word.startswith("model.num_layers")]
            results[given.get("model") or "qwen3_toy", " ".join(map(_here, filter(_is_tpis, words))), sized] = None
    return list(results)


def _here(word: str) -> str:
    """Any cluster of a user's is as good as one of ours."""
    return "cluster=h100" if word == "cluster=mysite" else word


SIZES = ("model.num_layers", "model.num_attention_heads", "model.num_query_groups", "peft", "peft.dim")


def _is_tpis(word: str) -> bool:
    """Whether what an override sets is known without Megatron-Bridge, which tests/distributed asks."""
    path = word.partition("=")[0]
    known = {*SIZES, *(key.path for key in SHORT_KEYS.values())}
    return path.partition(".")[0] not in BRIDGE_SECTIONS or path in known


def rows() -> Iterator[tuple[str, str, bool]]:
    """The lines, longest first. Those that repeat words of others are composed in `make test-all` alone."""
    seen: set[str] = set()
    for model, overrides, sized in sorted(composable(), key=lambda row: -len(row[1].split())):
        new = {model, *overrides.split()} - seen
        seen |= new
        yield pytest.param(model, overrides, sized, marks=() if new else pytest.mark.release)


def unfit(model: str, overrides: str) -> list[str]:
    """Why runs of a line do not fit the GPUs of the cluster that it names, or an H200; raises if it makes no run.

    Of a matrix, its first and its last cell that can run.
    """
    words = overrides.split()
    words = words if "cluster=" in overrides else ["cluster=h200", *words]
    _, choices = configurations.spread(parse_all(words), [])
    configs, problems = [], Problems()
    for order in (choices, choices[:0:-1]):
        for choice in order:
            with problems.recording(choice.label):
                configs.append(compose(model, choice.overrides, device="gpu").config)
                break
    if not configs:
        problems.raise_any()
    tight = [available_memory.warning(config, here=False) for config in configs]
    return [
        *(line for config in configs for line in available_memory.problems(config, here=False)),
        *filter(None, tight),
    ]


@pytest.mark.parametrize("model, overrides, sized", rows())
def test_the_overrides_make_runs_that_fit(model, overrides, sized):
    model = model if model.startswith(("qwen3", "nemotron3", "moonlight")) else "qwen3_toy"  # RUN, of --resume
    result = unfit(model, overrides)
    assert result == [] or not sized

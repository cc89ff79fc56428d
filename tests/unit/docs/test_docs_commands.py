"""Every command line in the documents is one that `tpi` takes, and its overrides make a run."""

import re

import pytest

from tests.unit.docs.commands import names, options, parsed
from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.schema import BRIDGE_SECTIONS

LINES = [(document.name, line) for document in DOCUMENTS for line in document.commands]
SPANS = [(document.name, span) for document in DOCUMENTS for span in document.spans if re.match(r"tpi [a-z-]", span)]
# Options of other programs that the documents name.
FOREIGN = {
    "--device",  # scripts/make-certificates
    "--imports",  # scripts/measure-starts
    "--list",  # scripts/gpu
    "--repeat",
    "--tp",
    # sbatch's and srun's
    "--array", "--comment", "--cpus-per-task", "--exclusive", "--gres", "--mail-type", "--mem", "--nodes", "--parsable",
    "--requeue", "--reservation", "--signal", "--mpi", "--container-writable",
    # of apptainer
    "--bind", "--nv",
    # of mlflow
    "--backend-store-uri",
    # of scripts/bootstrap, torchrun, run_recipe.py, pre-commit, pytest, uv, pip and tensorboard
    "--collect-only", "--continue", "--gpu", "--hook-type", "--hypothesis-profile", "--logdir", "--no-deps",
    "--nproc_per_node", "--only-downloads", "--plan", "--recipe", "--show-urls", "--wheel-dir",
}  # fmt: skip


def typed(line: str) -> str:
    """The line as one would type it: without what may be left out, and with a word for what stands for others."""
    line = re.sub(r"\[[A-Z_]+ ?(?:…|\.\.\.)\]", "", line)  # [RUN_C …]
    line = re.sub(r"\[(-[^\]]*)\]", r"\1", line)  # [--all]
    line = re.sub(r"\bMODEL\b", "qwen3_toy", line)
    line = re.sub(r"\bSECONDS\b|\bN\b", "3", line)
    line = re.sub(r"^(tpi \w+) …", r"\1 qwen3_toy", line)
    return re.sub(r"(?<=\s)…|(?<==)…", "", line)


def test_there_are_lines():
    assert len(LINES) > 30


@pytest.mark.parametrize("name, line", LINES)
def test_a_line_is_one_that_tpi_takes(name, line):
    parsed(typed(line))


def test_a_command_in_a_sentence_has_a_name_and_options_that_there_are():
    first = {one.split()[0] for one in names()}
    wrong = []
    for document, span in SPANS:
        words = [word.split("=")[0] for word in span.split()]
        known = " ".join(words[1:3]) in names() or words[1] in first
        if not known or not {word for word in words if re.match(r"--?[a-z]", word)} <= options():
            wrong.append(f"{document}: {span}")
    assert SPANS
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_an_option_is_one_that_there_is(document):
    text = "\n".join((*document.spans, *document.code))
    found = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert found - options() - FOREIGN == set()


@pytest.mark.parametrize("command", names())
def test_a_command_is_documented(command):
    texts = [text for document in DOCUMENTS for text in (*document.spans, *document.code)]
    assert any(re.search(rf"\btpi {command}\b", text) for text in texts)


def composable() -> list[tuple[str, str]]:
    """Model and overrides of the lines that make runs, of a matrix those of its first cell; each once."""
    found = {}
    for _, line in LINES:
        try:
            command, given = parsed(typed(line))
        except Exception:  # the test above says so, of this line alone
            continue
        # Two configurations of any kind; a recipe, of which only Bridge knows what it is.
        if given.get("diff") or str(given.get("model")).startswith("recipe="):
            continue
        if command in ("train", "show", "submit", "verify", "sweep", "bench", "audit"):
            words = [*(given.get("overrides") or ())]
            if command == "audit":  # of stock numerics unless told otherwise
                words = ["numerics=stock", *words, *(given["against"] or ())]
            words += [f"ledger.trace={given['trace']}"] if given.get("trace") else []
            if command in ("verify", "sweep") or given.get("verify") or given.get("sweep"):
                words = [word.partition(",")[0] for word in words]
            found[given.get("model") or "qwen3_toy", " ".join(map(_here, filter(_ours, words)))] = None
    return list(found)


def _here(word: str) -> str:
    """Any cluster of a user's is as good as one of ours."""
    return "cluster=h100" if word == "cluster=mysite" else word


def _ours(word: str) -> bool:
    """Whether what an override sets is known without Megatron-Bridge, which tests/distributed asks."""
    path = word.partition("=")[0]
    return path.partition(".")[0] not in BRIDGE_SECTIONS or path in {key.path for key in SHORT_KEYS.values()}


@pytest.mark.parametrize("model, overrides", composable())
def test_the_overrides_make_a_run(model, overrides):
    words = overrides.split()
    model = model if model.startswith(("qwen3", "nemotron3", "moonlight")) else "qwen3_toy"  # RUN, of --resume
    assert compose(model, words, device="gpu").model == model

# SPDX-License-Identifier: Apache-2.0
"""Wrong command lines, drawn by Hypothesis: each ends with status 2 and one message, and leaves nothing behind.

They run in this process, where an import of Megatron-Bridge fails the test.
"""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.settings import conf_files, field_table, schema
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.schema import BRIDGE_SECTIONS, PROVIDERS

MESSAGE = re.compile(r"^(error|not comparable): |^╭─ Error ─", re.M)
IN_JSON = re.compile(r'^  "error": "', re.M)  # of --json, on standard output
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

FIELDS: dict[str, dict[str, list[str] | None]] = json.loads(field_table.FIELDS.read_text())["classes"]
SECTIONS = {name: FIELDS[PROVIDERS[0] if name == "model" else path] for name, path in BRIDGE_SECTIONS.items()}
# The sections that every run has.
COMMON = ("model", "train", "optimizer", "scheduler", "ddp", "dataset", "tokenizer", "checkpoint", "logger", "dist")
PLAIN = {f"{s}.{n}": {*types} for s in COMMON for n, types in SECTIONS[s].items() if types}
GROUPS = {name: known for name, known in conf_files.groups().items() if name != "model"}
ALONE = (  # what comes before the overrides of a command that composes a run
    "train qwen3_toy", "train qwen3_moe_toy seq=32", "train qwen3_toy tp=2 --json", "show qwen3_toy",
    "show nemotron3_nano_toy device=gpu", "submit qwen3_toy slurm.time=5 device=cpu --dry-run",
    "verify qwen3_toy pp=1,2", "bench qwen3_toy --modes stock,tree", "audit qwen3_toy --against pp=2",
)  # fmt: skip
COMMANDS = "train compare verify certify report bisect bench audit submit jobs logs wait cancel show models doctor data"
WRONG_TYPES = {
    "int": ("abc", "1.5", "[1,2]", "{a:1}", "true", "'x y'", "1e-3"),
    "float": ("abc", "[0.1]", "{a:1}", "true", "1,5.5", "0.1.2"),
    "bool": ("maybe", "2", "[true]", "3.5", "{a:true}"),
}


@st.composite
def typos(draw, words, taken):
    """A word with a slip of the keyboard, which is none of those that are taken."""
    word = draw(st.sampled_from(sorted(words)))
    at = draw(st.integers(0, len(word) - 1))
    other = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_0"))
    slips = (word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[:at] + other + word[at + 1 :])
    slips += (word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],)
    return draw(st.sampled_from(slips).filter(lambda made: made and made != word and made not in taken))


def values(keys, wrong):
    """KEY=VALUE of any of these keys and wrong values."""
    return st.builds("{}={}".format, st.sampled_from(sorted(keys)), st.sampled_from(wrong))


@st.composite
def out_of_range(draw):
    numbers = sorted(key for key, types in PLAIN.items() if types & {"int", "float"} and "bool" not in types)
    key = draw(st.sampled_from(numbers))
    section, _, name = key.partition(".")
    wrong = [v for v in (-1, -5, 0, 70000, -(2**40), 2**70) if typed_rules.wrong({section: {name: v}})]
    return f"{key}={draw(st.sampled_from(wrong or ['nan', '-inf'] if key not in typed_rules.INFINITE else ['nan']))}"


# Texts in the place of an override: characters that are none of tpi's, empty ones, quotes, and words of a shell.
TEXTS = (
    "ｔｐ=2", "tp=２", "tр=2", "tp\u200b=2", "\u202etp=2", "tp=2\u00a0", "🎉=1", "seed=٣", "tp=½",
    "model.num_layers=二", "tp=\udcff", "\udcfe=1", "tp=2\u2028pp=2", "lr=1e−3", "lr=1，5", "", "=",
    "=2", "tp=", "tp", " ", "\t", "==", "lr=",
    "model.=1", ".num_layers=1", "model=", "numerics=", "model..num_layers=2", "model.num_layers=",
    "+", "++", "++=1",
    "mixed_precision.=x", "tp=2 pp=2", "'tp=2'", "tp='2", "tp=[1,", "tp={a", "tp=(2)", "tp=${", "tp=${x", "tp=$(2)",
    "tp=\\2", "tp=[]", "tp=2\n", "|", "&&", ">log", "2>&1", ";", "tp=2,", "#", "*", "~", "~tp", "-", "$HOME", "..",
    "tp:2", "tp==2", "tp->2", "--tp=2", "-tp=2", "tp+=2", *(f"tp={code}" for code in ("\x1b[31m",
    "\x07", "\x9b31m")),
    *(f"{key}=${{{text}}}" for key in ("run.dir", "data.json_key", "tp") for text in ("oc.env:HOME", "now:%Y", "x:1")),
    "mixed_precision.fp8=e4m3", "checkpoint.load=a", "cluster=\x1b]0;owned\x07.yaml", "numerics.virtual_shards=3",
    "model.num_attention_heads=7", "model.hidden_size=7", "tp=3", "pp=3", "mbs=3", "dp=5",
    "tokenizer.vocab_size=100000",
    "scheduler.lr_warmup_iters=1000", "data.path=a.txt", "validation.eval_interval=5", "tp=range(1,4)",
    "seed=choice(1,2)",
)  # fmt: skip
OVERRIDES = st.one_of(
    st.sampled_from(TEXTS),
    typos({*SHORT_KEYS, *SECTIONS}, {*SHORT_KEYS, *SECTIONS, *GROUPS, *schema.SECTIONS}).map("{}=1".format),
    st.sampled_from(COMMON).flatmap(lambda s: typos(SECTIONS[s], SECTIONS[s]).map(lambda name: f"{s}.{name}=1")),
    st.sampled_from(sorted(GROUPS)).flatmap(lambda g: typos(GROUPS[g], GROUPS[g]).map(lambda option: f"{g}={option}")),
    *(values([k for k, types in PLAIN.items() if types - {"null"} == {t}], wrong) for t, wrong in WRONG_TYPES.items()),
    values([key.name for key in SHORT_KEYS.values() if key.type is int], ("-1", "nan", "9" * 26, "1.5", "abc", "null")),
    out_of_range(),
)
WHOLE = (
    "train tp=2",
    "submit qwen3_toy --against a.txt slurm.time=5", "train",
    "submit qwen3_toy --dir b slurm.time=5 --dry-run", "train qwen3_toy --resume a --continue", "train --resume a",
    "train --resume a run.dir=b", "train qwen3_toy checkpoint.ckpt_step=5", "verify qwen3_toy tp=1,2 run.dir=x",
    "show",
    "verify qwen3_toy tp=2", "bench qwen3_toy iters=5", "bench qwen3_toy --modes stock,nothing",
    "train qwen3_toy --foo",
    "audit qwen3_toy --against tp=2 ledger.trace=1:2", "models qwen3_toyy", "doctor now", "compare a.txt", "cancel",
    "compare none n\x07o", "certify none", "report runs", "bisect none *", "train --resume a.txt", "logs ~nobody/x",
    "train qwen3_toy cluster=no/such.yaml", "train qwen3_toy --config none", "train qwen3_toy --config a.txt",
    "train qwen3_toy checkpoint.pretrained_checkpoint=a.txt", "verify qwen3_toy tp=1,2 --against none",
    "data prepare none", "bench qwen3_toy --steps -1", "train qwen3_toy ledger.trace=3:",
    "audit qwen3_toy --reference =",
)  # fmt: skip
LINES = st.one_of(
    st.sampled_from(WHOLE).map(str.split),
    typos({*COMMANDS.split()}, {*COMMANDS.split()}).map(lambda command: [command, "qwen3_toy"]),
    typos({*conf_files.groups()["model"]}, conf_files.groups()["model"]).map(lambda model: ["show", model]),
    st.tuples(st.sampled_from(ALONE), OVERRIDES, st.sampled_from(("", "iters=3", "seed=5"))).map(
        lambda line: [*line[0].split(), line[1], *line[2].split()]
    ),
)


@pytest.fixture
def stocked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the lines find: a text, a cluster's file, an empty folder, no SLURM."""
    folder = tmp_path / "here"
    (folder / "a").mkdir(parents=True)
    (folder / "a.txt").write_text("neither a run nor a checkpoint\n")
    (folder / "site.yaml").write_text("# @package _global_\ndefaults:\n  - local\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def problem(status: int, out: str, err: str) -> str | None:
    """What is wrong with how a command ended."""
    if "Traceback" in err or "defect of tpi" in err:
        return "a traceback"
    if "[Errno" in out + err:
        return "a number of an error"
    messages = len(MESSAGE.findall(err)) + len(IN_JSON.findall(out))
    if (status, messages) != (2, 1):
        return f"status {status}, {messages} messages"
    return "control characters" if CONTROL.search(out + err) else None


@pytest.mark.timeout(600)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=LINES)
def test_each_is_one_message_and_leaves_nothing(cli, stocked_folder, words):
    before = {file: file.read_bytes() for file in stocked_folder.rglob("*") if file.is_file()}
    ended = cli(*words)
    assert problem(ended.status, ended.out, ended.err) is None, ended
    assert {file: file.read_bytes() for file in stocked_folder.rglob("*") if file.is_file()} == before

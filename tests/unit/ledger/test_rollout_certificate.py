"""Certificates of rollouts: the same bytes for the same rollouts, and every change is refused."""

import hashlib
import json

import pytest

from tests.unit.features.rollouts.test_rollout_requests import completion
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.rollouts import lines
from tp_invariant_recipes.ledger import certificate, rollout_certificate

IDENTITY = {
    "schema": 1,
    "weights": {"digest": "ab"},
    "numerics": {"mode": "portable", "product": "k in order 1"},
    "overrides": [],
    "requests": {"sha256": "00", "count": 2},
    "tokenizer": None,
    "sampling": {"seed": 1},
    "digests": True,
}


def rollouts(folder, identity=IDENTITY, name="r.jsonl", tokens=(9, 2)):
    folder.mkdir(exist_ok=True)
    whole = folder / "whole"
    rows = [completion("a", 0, tokens, digests=(1, 2)), completion("b", 0, digests=(3, 4))]
    whole.write_bytes(b"".join(lines.line((5,), row, None) for row in rows))
    output.publish(whole, folder / name, identity)
    return folder / name


def test_the_same_rollouts_have_one_certificate(tmp_path):
    first, second = rollouts(tmp_path / "a"), rollouts(tmp_path / "b", name="other.jsonl")
    data = rollout_certificate.certify(first)
    assert rollout_certificate.certify(second) == data
    assert rollout_certificate.certify(rollouts(tmp_path / "c", tokens=(9, 3))) != data
    assert rollout_certificate.certify(rollouts(tmp_path / "d", IDENTITY | {"weights": {"digest": "ac"}})) != data
    file = tmp_path / "r.tpicert"
    file.write_bytes(data)
    checked = rollout_certificate.check(file)
    assert rollout_certificate.is_kind(file)
    assert not rollout_certificate.is_kind(first)
    words = rollout_certificate.summary_words(checked.summary)
    assert words == "2 completions of 2 requests, 4 tokens, numerics=portable, with digests of the vocabulary"
    with pytest.raises(LedgerError, match="and not just"):
        certificate.check(file)


def test_changes_are_refused(tmp_path):
    file = rollouts(tmp_path / "a")
    data = rollout_certificate.certify(file)
    target = tmp_path / "r.tpicert"
    for place in range(0, len(data), 37):
        target.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(LedgerError, match="not a whole certificate"):
            rollout_certificate.check(target)


def test_a_sealed_lie_is_refused(tmp_path):
    """Members that do not belong together, sealed again."""
    data = rollout_certificate.certify(rollouts(tmp_path / "a"))
    target = tmp_path / "r.tpicert"
    members, manifest = certificate.unpack(target, data, rollout_certificate.MEMBERS, rollout_certificate.KIND)
    kept = {name: members[name] for name in rollout_certificate.MEMBERS}
    for summary, why in (
        (manifest.summary | {"tokens": 5}, "its summary does not fit"),
        (manifest.summary, None),
    ):
        target.write_bytes(certificate.pack(kept, rollout_certificate.KIND, summary))
        if why:
            with pytest.raises(LedgerError, match=why):
                rollout_certificate.check(target)
        else:
            assert rollout_certificate.check(target).summary == summary
    kept["rollouts.jsonl"] = b"{}\n"
    target.write_bytes(certificate.pack(kept, rollout_certificate.KIND, manifest.summary))
    with pytest.raises(LedgerError, match="not rollouts"):
        rollout_certificate.check(target)


def test_other_files_are_refused(tmp_path):
    file = rollouts(tmp_path / "a")
    with pytest.raises(LedgerError, match="is not a run directory, nor a file of tpi generate"):
        rollout_certificate.certify(tmp_path / "a" / "whole.jsonl")
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(LedgerError, match="was changed since tpi wrote it"):
        rollout_certificate.certify(file)
    scores = rollouts(tmp_path / "b", {name: value for name, value in IDENTITY.items() if name != "requests"})
    with pytest.raises(LedgerError, match="is of tpi score"):
        rollout_certificate.certify(scores)


def test_meta_names_the_bytes(tmp_path):
    file = rollouts(tmp_path / "a")
    written = json.loads(output.meta(file).read_text())[rollout_certificate.WRITTEN]
    assert written == {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "lines": 2}
    assert output.WRITTEN == rollout_certificate.WRITTEN

# SPDX-License-Identifier: Apache-2.0
"""How far a tensor is from the reference's, and the shape of its error: recordings of two ranks made by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tp_invariant_recipes.comparison import deviation, reported_norm
from tp_invariant_recipes.comparison.deviation import StepDumps, TensorDeviation
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.features.audit import workflow as audit
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.dumps import GRADIENT_NORM, LOSS_SHARE
from tp_invariant_recipes.observe.dump_writer import DumpWriter
from tp_invariant_recipes.runs.sweep_dir import AuditedRun

ROWS, COLUMNS = 64, 32
OUTPUT = "forward/decoder.layers.0.mlp/output"
TO_INPUT = "backward/decoder.layers.0.mlp/output"
WEIGHT = "gradients/decoder.layers.0.mlp.linear_fc2.weight"
ROUNDING = 2.0**-8


def table(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, seed: int) -> torch.Tensor:
    return x * (1 + ROUNDING * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


EXACT = {OUTPUT: table(1), TO_INPUT: table(2), WEIGHT: table(3)}


def write(
    folder: Path, ranks: list[dict[str, list[TensorPart]]], share: float = 1.0, norm: float | None = None
) -> None:
    """A recording of step 1: for each rank its pieces of each tensor."""
    for rank, own in enumerate(ranks):
        writer = DumpWriter(folder, rank, len(ranks))
        for name, pieces in own.items():
            for piece in pieces:
                writer.add(name, "float32", (ROWS, COLUMNS), piece)
        [first, *_] = ranks[0][WEIGHT]
        length = norm or float((first.values if len(first.values) == ROWS else EXACT[WEIGHT]).double().norm())
        for name, value in ((GRADIENT_NORM, length), (LOSS_SHARE, share)):
            writer.add(name, "float32", (1,), TensorPart(torch.tensor([[value]]), 0, 0))
        writer.close_step(1)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, list[TensorPart]]:
    return {name: [TensorPart(values, 0, 0)] for name, values in tensors.items()}


@pytest.fixture
def judged(tmp_path):
    """Given what two ranks of a run have: what is found."""
    reference = AuditedRun(tmp_path / "reference")
    write(reference.path, [whole(EXACT)])
    for n in (1, 2, 3):
        moved = {name: rounded(values, 10 * n + k) for k, (name, values) in enumerate(EXACT.items())}
        write(reference.dithered(n).path, [whole(moved)], norm=float(EXACT[WEIGHT].double().norm()) * (1 + n / 100))

    def judge(*ranks: dict[str, list[TensorPart]], **more: float) -> dict[str, TensorDeviation]:
        write(tmp_path / "run", list(ranks), **more)
        results, omitted = audit.judged(AuditedRun(tmp_path / "run"), reference, [1])
        assert omitted == []
        return {result.name: result for result in results}

    return judge


def changed(name: str, values: torch.Tensor) -> dict[str, list[TensorPart]]:
    return whole(EXACT | {name: values})


def test_what_rounding_does_is_within_it_and_the_order_is_that_of_data_flow(judged):
    results = judged(whole({name: rounded(values, 99) for name, values in EXACT.items()}))
    assert list(results) == [OUTPUT, TO_INPUT, WEIGHT, GRADIENT_NORM]
    assert all(0.5 < results[name].factor < 1.6 for name in EXACT)
    assert not any(result.beyond for result in results.values())


# A wrong gradient, and the shape of its error.
SHAPES = (
    (lambda x: 2 * x, "constant ratio 2 (added twice)"), (lambda x: x / 4, "constant ratio 0.25 (1/4)"),
    (lambda x: 1.1 * x, "constant ratio 1.1"), (lambda x: 0 * x, "zero"),
    (lambda x: x * math.nan, "not finite numbers"), (lambda x: torch.cat([x[3:], torch.zeros(3, COLUMNS)]), None),
    (lambda x: x.roll(1, 0), "rows shifted by -1"), (lambda x: x.flip(0), "rows in another order"),
    (lambda x: torch.cat([x[:-1], torch.zeros(1, COLUMNS)]), "1 of 64 rows are zero"), (lambda x: x + table(7), None),
)  # fmt: skip


@pytest.mark.parametrize("wrong, shape", SHAPES)
def test_a_wrong_tensor_is_beyond_rounding_and_its_error_has_a_shape(judged, wrong, shape):
    result = judged(changed(WEIGHT, wrong(EXACT[WEIGHT])), norm=1.0)
    assert (result[WEIGHT].beyond, result[WEIGHT].module) == (True, "decoder.layers.0.mlp.linear_fc2")
    if shape is not None:
        assert result[WEIGHT].shape == shape
    assert not result[OUTPUT].beyond


def test_one_wrong_row_of_many_is_not_diluted(judged):
    wrong = EXACT[OUTPUT].clone()
    wrong[5] *= 1.2
    error = float((wrong - EXACT[OUTPUT]).norm() / EXACT[OUTPUT].norm() / ROUNDING)
    assert error / deviation.MARGIN < 2  # the tensor as a whole is hardly beyond
    assert judged(changed(OUTPUT, wrong))[OUTPUT].factor > 2 * deviation.MARGIN


def test_the_wrong_ranks_are_named(judged):
    halves = [
        whole(EXACT) | {WEIGHT: [TensorPart(EXACT[WEIGHT][n * 32 : n * 32 + 32] * (1 + n), n * 32, 0)]} for n in (0, 1)
    ]
    result = judged(*halves)[WEIGHT]
    assert (result.ranks, result.all_ranks) == ((1,), 2)
    assert result.shape == "constant ratio 2 (added twice), right on ranks 0"


@pytest.mark.parametrize("at_once", (1, 5 * COLUMNS))
def test_rows_that_are_read_in_blocks_are_those_of_the_whole(judged, monkeypatch, at_once):
    """Of pieces in every other row and half of the columns, as tensor-parallel ranks have them."""
    values = rounded(EXACT[WEIGHT], 99)
    values[1::2, 16:] *= 1.5
    rows, columns = (slice(0, None, 2), slice(1, None, 2)), (slice(0, 16), slice(16, 32))
    parts = [
        whole({name: EXACT[name] for name in (OUTPUT, TO_INPUT)})
        | {WEIGHT: [TensorPart(values[row, column].contiguous(), row.start, column.start, 2) for row in rows]}
        for column in columns
    ]
    results = [judged(*parts)[WEIGHT]]
    monkeypatch.setattr(reported_norm, "CACHED", at_once)
    results.append(judged(*parts)[WEIGHT])
    assert [result.ranks for result in results] == [(1,), (1,)]
    assert results[1].factor == pytest.approx(results[0].factor, rel=1e-9)


def test_a_norm_of_the_gradients_themselves_is_megatrons(judged, tmp_path, monkeypatch):
    monkeypatch.setattr(reported_norm, "CACHED", 5 * COLUMNS)
    judged(whole(EXACT))
    assert reported_norm.ratio(dumps.read_step(tmp_path / "run", 1)) == pytest.approx(1, rel=1e-6)


def test_the_spacing_of_the_modules_numbers_is_the_least_that_rounding_moves(judged, tmp_path):
    """Where no dithered repetition differs from the reference. A quarter of it, relative to the tensor's RMS."""
    judged(whole(EXACT))
    reference = dumps.read_step(tmp_path / "reference", 1)
    write(tmp_path / "off", [changed(OUTPUT, EXACT[OUTPUT] * (1 + 2.0**-22))])
    results, _ = deviation.judge(StepDumps(1, dumps.read_step(tmp_path / "off", 1), reference, (reference,)))
    assert {result.name: result.factor for result in results}[OUTPUT] == pytest.approx(
        2.0**-22 / (2.0**-23 / 4), rel=0.2
    )


@pytest.mark.parametrize("worse, beyond", ((3.5, False), (4.5, True)))
def test_another_expert_may_be_chosen_whose_score_is_as_near_as_rounding_moves_scores(tmp_path, worse, beyond):
    """Four times that far, times the margin. The first of two tokens goes to the second expert."""
    router, moved = "decoder.layers.0.mlp.router", 2.0**-6
    best, other = torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([[0.0, 1], [1, 0]])
    scores = torch.tensor([[0.75, 0.75 - worse * deviation.MARGIN * moved], [0.9, 0.1]])
    for name, chosen, source in (
        ("run", other, scores),
        ("reference", best, scores),
        ("dithered", best, scores + moved),
    ):
        writer = DumpWriter(tmp_path / name, 0, 1)
        named = {
            f"forward/{router}/output.1": chosen,
            f"choices/{router}/scores": source,
            f"choices/{router}/own": chosen,
        }
        for key, values in named.items():
            writer.add(key, "float32", (2, 2), TensorPart(values, 0, 0))
        writer.close_step(1)
    run, reference, dithered = (dumps.read_step(tmp_path / name, 1) for name in ("run", "reference", "dithered"))
    results = {item.name: item for item in deviation.judge(StepDumps(1, run, reference, (dithered,)))[0]}
    assert results[f"choices/{router}"].beyond is beyond


def test_parts_that_were_not_summed_are_known_as_such(judged):
    part = table(8)
    result = judged(changed(WEIGHT, part), changed(WEIGHT, EXACT[WEIGHT] - part))[WEIGHT]
    assert result.shape == "each rank has a partial result: the sum over 2 ranks is right"
    result = judged(changed(WEIGHT, part), changed(WEIGHT, 2 * EXACT[WEIGHT] - part))[WEIGHT]
    assert result.shape == "each rank has a partial result: the mean over 2 ranks is right"


def test_gradients_inside_are_scaled_by_the_ranks_that_average_them(judged):
    doubled = changed(TO_INPUT, 2 * EXACT[TO_INPUT])
    assert not judged(doubled, share=2.0)[TO_INPUT].beyond
    assert judged(doubled, share=1.0)[TO_INPUT].shape == "constant ratio 2 (added twice)"


def test_a_norm_is_that_of_the_gradients(judged):
    length = float(EXACT[WEIGHT].double().norm())
    assert not judged(whole(EXACT), norm=length * (1 + 1e-5))[GRADIENT_NORM].beyond
    assert judged(whole(EXACT), norm=length * (1 - 1e-4))[GRADIENT_NORM].beyond  # far within what rounding moves


def test_a_norm_that_leaves_few_parameters_out_names_them(judged, tmp_path):
    """Sinks have a millionth of the squares: less than a sum in fp32 may be off, unless their squares explain it."""
    sinks = "gradients/decoder.layers.{}.self_attention.core_attention.softmax_offset"
    small = {sinks.format(layer): table(20 + layer) * 3e-3 for layer in (0, 1)}
    everything, half = EXACT | small, ROWS // 2
    square = sum(float(values.double().square().sum()) for name, values in everything.items() if "gradients/" in name)
    omitted = sum(float(values[half:].double().square().sum()) for values in small.values())
    ranks = [
        whole(EXACT) | {name: [TensorPart(values[at : at + half], at, 0)] for name, values in small.items()}
        for at in (0, half)
    ]
    judged(whole(EXACT))
    write(tmp_path / "right", [whole(everything)], norm=math.sqrt(square))
    reference = dumps.read_step(tmp_path / "right", 1)
    for name, norm, words in (
        ("whole", square, None),
        ("left-out", square - omitted, "of decoder.layers.*.self_attention.core_attention.softmax_offset it counts"),
    ):
        write(tmp_path / name, ranks, norm=math.sqrt(norm))
        far, why = reported_norm.distance(dumps.read_step(tmp_path / name, 1), reference)
        assert (far > deviation.MARGIN, bool(why)) == (words is not None, words is not None)
        assert words is None or why.startswith(words)


def test_without_dithered_repetitions_nothing_is_known(tmp_path):
    for name in ("run", "reference"):
        write(tmp_path / name, [whole(EXACT)])
    with pytest.raises(LedgerError, match="has no dithered repetition"):
        audit.judged(AuditedRun(tmp_path / "run"), AuditedRun(tmp_path / "reference"), [1])


def test_recordings_are_judged_by_the_command(tmp_path, judged, cli):
    judged(changed(OUTPUT, 2 * EXACT[OUTPUT]))
    ended = cli("audit", "--recorded", str(tmp_path / "run"), str(tmp_path / "reference"), "--dir", str(tmp_path / "a"))
    assert ended.status == 1
    assert "not compared" not in ended.out
    assert "beyond rounding: the output of decoder.layers.0.mlp [64, 32] is" in ended.out
    assert "constant ratio 2 (added twice)" in (tmp_path / "a/audit.json").read_text()


def test_a_verdict_within_rounding_counts_what_was_not_compared(tmp_path, judged, cli):
    judged(whole(EXACT))
    words = ("audit", "--recorded", str(tmp_path / "run"), str(tmp_path / "reference"), "--dir")
    for file in (tmp_path / "run").rglob("*.safetensors"):
        file.unlink()
    write(tmp_path / "run", [whole(EXACT) | {WEIGHT: [TensorPart(EXACT[WEIGHT][:32], 0, 0)]}])
    ended = cli(*words, str(tmp_path / "b"))
    assert ended.status == 0
    assert "; 1 tensor not compared" in ended.out
    assert "; 1 tensor not compared" in (tmp_path / "b/audit.json").read_text()


def test_the_values_of_dumps_are_read_exactly(tmp_path):
    writer = DumpWriter(tmp_path, 0, 1)
    values = {"bfloat16": table(1).bfloat16(), "float32": table(2), "bool": table(3) > 0}
    for name, x in values.items():
        writer.add(f"forward/{name}/output", name, (ROWS, COLUMNS), TensorPart(x, 0, 0))
    writer.close_step(1)
    read = dumps.read_step(tmp_path, 1)
    for name, x in values.items():
        assert np.array_equal(read.values(f"forward/{name}/output"), x.double().numpy())

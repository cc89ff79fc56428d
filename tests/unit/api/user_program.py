# SPDX-License-Identifier: Apache-2.0
"""A user's program with every public name: test_names.py type-checks it, tests/distributed/api runs it."""

import sys
from pathlib import Path
from typing import Any

import tp_invariant_recipes as tpi

TOY: dict[str, object] = {"model.num_layers": 1, "seq": 32, "iters": 2, "numerics.initial_weights": "invariant"}


class Sampler:
    """A callback of Bridge's, that samples before the first step."""

    completions: list[tpi.Completion]

    def on_train_start(self, context: Any) -> None:
        engine = tpi.Engine(context.model)
        self.completions = engine.generate([tpi.Request("a", (1, 2, 3), tpi.Sampling(max_new_tokens=2))])
        engine.release()


def main(folder: Path) -> None:
    one: tpi.Run = tpi.train("qwen3_toy", TOY, {"run.dir": folder / "one"}, "device=cpu", "save=2", tp=1)
    other = tpi.train("qwen3_toy", TOY, {"run.dir": folder / "other"}, device="cpu", tp=2, numerics="deterministic")
    verdict = tpi.verify("qwen3_toy", TOY, tp=(1, 2), device="cpu", directory=folder / "verify")
    print(verdict, one.exit_status, [cell.state for cell in verdict.cells])
    same, different = tpi.compare(one, verdict.cells[1].run), tpi.compare(one, other)
    print(same.identical, different.identical, different.exit_status, different.first_difference, different.text)
    print(tpi.certify(one, out=folder / "one.tpicert").hash, tpi.Run(one.path).ledger.path == one.ledger.path)
    for step in tpi.Ledger.open(folder / "one.tpicert"):
        print(step.step, step.loss and step.loss.value, step.learning_rate.bits, sorted(step.gradients)[0])
    print(tpi.bisect(one, other, directory=folder / "bisect"))
    (folder / "sequences.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    print(tpi.score(one, folder / "sequences.jsonl", out=folder / "scores.jsonl").to_json())
    print(tpi.audit("qwen3_toy", TOY, tp=2, device="cpu", directory=folder / "audit").exit_status)
    with tpi.invariant(virtual_shards=8):
        print("a GPTModel that is built here is invariant")
    config, sampler = tpi.recipe("qwen3_toy", TOY, numerics="portable", device="cpu"), Sampler()
    tpi.pretrain(config, callbacks=[sampler, tpi.LedgerCallback(folder / "own")])
    print(len(sampler.completions[0].tokens), len(tpi.Ledger.open(folder / "own")))
    try:
        tpi.train("qwen3_toy", tpp=2, iters="few", device="cpu")
    except tpi.TpiError as error:
        print(*error.problems, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

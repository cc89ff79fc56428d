# SPDX-License-Identifier: Apache-2.0
"""GRPO on a toy task: what is the sum of two digits? Rollouts and trainer compute the same bits, in any layout.

    torchrun --nproc-per-node 1 examples/grpo.py runs/grpo-1             # then any key=value of tpi train, as iters=20
    torchrun --nproc-per-node 2 examples/grpo.py runs/grpo-2 tp=2
    tpi compare runs/grpo-1 runs/grpo-2                                  # identical

Each step samples 8 answers to each of 8 questions with the weights that it trains, and updates them by GRPO's clipped
objective (Shao et al., "DeepSeekMath", 2024) in Bridge's own training loop. Before each update it prints the largest
|log(p_trainer / p_rollout)| over all tokens, which is 0 exactly. RUN/rewards.jsonl and RUN/reward.svg have the curve.

A question is [a, PLUS, b, EQUALS]; the right answer is [a + b, END]. A number far from the sum earns less.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import tp_invariant_recipes as tpi

PLUS, EQUALS, END = 20, 21, 22  # tokens 0 to 19 are numbers
QUESTIONS, ANSWERS = 8, 8  # of a step
LENGTH = 16  # tokens that the trainer computes of a sequence, with padding
CLIP = 0.2
DEFAULTS = (
    *("numerics=portable", "iters=60", f"seq={LENGTH}", f"gbs={QUESTIONS * ANSWERS}", "mbs=8", "lr=1e-3"),
    *("model.vocab_size=32", "model.kv_channels=32", "cuda_graph=off", "validation.eval_iters=0", "save=0"),
)


def reward(question: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """1 for the sum and END; less without END, and for a number that is further away; 0 for no number."""
    if answer[0] >= PLUS:
        return 0.0
    near = 1 - abs(answer[0] - question[0] - question[2]) / 19
    return 0.75 * near**2 + (0.25 if answer[1:] == (END,) else 0.0)


def grpo(file: Path, engine: Callable[[Any], Any] | None = None) -> Any:
    """The callback of a rank. file: where rank 0 writes a line for each step. engine: what makes it; None: tpi's."""
    import torch
    import torch.distributed as dist
    from megatron.bridge.training import gpt_step
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.state import GlobalState

    sampling = tpi.Sampling(
        max_new_tokens=3, do_sample=True, top_k=0, num_return_sequences=ANSWERS, seed=1, eos_token_id=(END,)
    )

    class GRPO(Callback):
        """Samples before a step, and is the loss of its micro-batches."""

        def on_train_start(self, context: Any) -> None:
            self.engine = (engine or tpi.Engine)(context.model)

        def on_train_end(self, context: Any) -> None:
            self.engine.release()  # NCCL waits for the end of CUDA graphs before it ends a group of ranks

        def on_train_step_start(self, context: Any) -> None:
            step = context.state.train_state.step
            draw = Random(step)
            questions = [(draw.randrange(10), PLUS, draw.randrange(10), EQUALS) for _ in range(QUESTIONS)]
            requests = [tpi.Request(f"{step}/{n}", tokens, sampling) for n, tokens in enumerate(questions)]
            self.engine.refit()
            with torch.no_grad():
                answers = self.engine.generate(requests)
            self._collect(questions, answers)
            self.figures = {"step": step + 1} | self.figures
            self.done, self.largest = 0, torch.zeros((), device="cuda")

        def _collect(self, questions: list[Any], answers: list[tpi.Completion]) -> None:
            """Tensors of a row an answer: tokens, labels, mask, log-probabilities of the rollout, advantage."""
            shape = len(answers), LENGTH
            self.tokens, self.labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
            self.mask, self.old = torch.zeros(shape), torch.zeros(shape)
            rewards = [reward(questions[n // ANSWERS], answer.tokens) for n, answer in enumerate(answers)]
            self.advantage = torch.zeros(shape[0], 1)
            for n, answer in enumerate(answers):
                whole = [*questions[n // ANSWERS], *answer.tokens]
                scored = slice(len(whole) - len(answer.tokens) - 1, len(whole) - 1)
                self.tokens[n, : len(whole)] = torch.tensor(whole)
                self.labels[n, : len(whole) - 1] = torch.tensor(whole[1:])
                self.mask[n, scored] = 1
                self.old[n, scored] = torch.tensor(answer.log_probabilities)
                group = rewards[n // ANSWERS * ANSWERS :][:ANSWERS]
                self.advantage[n] = (rewards[n] - fmean(group)) / (pstdev(group) + 1e-4)
            exact = fmean(
                answer.tokens == (questions[n // ANSWERS][0] + questions[n // ANSWERS][2], END)
                for n, answer in enumerate(answers)
            )
            self.figures = {"reward": fmean(rewards), "exact": exact}

        def forward_step(self, state: GlobalState, data_iterator: Any, model: Any) -> Any:
            next(data_iterator)  # of generated data, whose place the answers take
            size = state.cfg.train.micro_batch_size
            rows = slice(self.done, self.done + size)
            self.done += size
            tokens, labels, mask, old, advantage = (
                tensor[rows].cuda() for tensor in (self.tokens, self.labels, self.mask, self.old, self.advantage)
            )
            positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
            output = model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels)

            def loss(losses: torch.Tensor) -> Any:
                log_ratio = (0.0 - losses - old) * mask
                self.largest = torch.maximum(self.largest, log_ratio.detach().abs().max())
                ratio = log_ratio.exp()
                objective = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                return gpt_step.masked_next_token_loss(mask, -objective)

            return output, loss

        def on_train_step_end(self, context: Any) -> None:
            if dist.get_rank() == 0:
                row = self.figures | {"largest_log_ratio": self.largest.item()}
                print("step {step}: largest |log-ratio| {largest_log_ratio:g}, reward {reward:.3f}".format(**row))
                with file.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")

    return GRPO()


def draw_curve(run: Path) -> None:
    """Write RUN/reward.svg."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (run / "rewards.jsonl").read_text().splitlines()]
    axes = (figure := Figure(figsize=(6, 3))).subplots()
    for name in ("reward", "exact"):
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name)
    axes.set(xlabel="step", ylabel="mean of 64 answers", ylim=(0, 1))
    axes.legend()
    figure.savefig(run / "reward.svg", bbox_inches="tight", metadata={"Date": None})


def main(folder: str, *words: str, engine: Callable[[Any], Any] | None = None) -> None:
    """Train on the ranks that torchrun has started. engine: as of `grpo`."""
    run = Path(folder)
    run.mkdir(parents=True, exist_ok=True)
    config = tpi.recipe("qwen3_toy", *DEFAULTS, *words)
    if config.model.tensor_model_parallel_size != int(os.environ.get("WORLD_SIZE", "1")):
        raise SystemExit("this example counts micro-batches of one data-parallel rank: start as many ranks as tp says")
    callback = grpo(run / "rewards.jsonl", engine)
    tpi.pretrain(config, callback.forward_step, [callback, tpi.LedgerCallback(run)])
    if os.environ.get("RANK", "0") == "0":
        draw_curve(run)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except tpi.TpiError as error:
        raise SystemExit(f"error: {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""verl's own worker of actor and rollout on a CPU, and GRPO's steps as verl's trainer makes them."""

import asyncio
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from tests import hf_folders

PROMPTS = ((5, 6, 7), (8, 9), (10,), (3, 4, 5, 6))
ANSWERS = 4  # to a prompt
PROMPT, RESPONSE, VOCABULARY = 8, 8, 64
# verl's defaults pack sequences and take Transformer Engine's attention and a fused loss, for which tpi has no
# invariant version; a CPU has no Transformer Engine.
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
OVERRIDES = (
    "actor_rollout_ref.model.use_remove_padding=false",
    f"+{TRANSFORMER}.transformer_impl=local",
    f"{TRANSFORMER}.attention_backend=auto",
    f"+{TRANSFORMER}.cross_entropy_loss_fusion=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.name=tpi",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={len(PROMPTS) * ANSWERS}",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_decay_steps=10",
    "actor_rollout_ref.actor.optim.total_training_steps=10",
    f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
    f"actor_rollout_ref.rollout.response_length={RESPONSE}",
)


def make_folder(folder: Path, *, chat: bool = False) -> Path:
    """A Hugging Face checkpoint of a small Qwen3, with a tokenizer of words. chat: whether messages are only joined."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    hf_folders.make(folder, hf_folders.model_section("qwen3_toy", f"model.vocab_size={VOCABULARY}"))
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    if chat:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def variables(rank: int, size: int) -> dict[str, str]:
    """What verl sets for its workers."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@contextmanager
def on_a_cpu():
    """In the block verl's worker finds the calls of a GPU."""
    import torch

    import tp_invariant_recipes as tpi
    from tp_invariant_recipes.cpu_host import cpu
    from tp_invariant_recipes.start import bridge

    bridge.load()
    with ExitStack() as stack:
        stack.enter_context(cpu.installed())
        stack.enter_context(tpi.invariant(virtual_shards=8, numerics="portable"))
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", return_value=(1 << 40, 1 << 40)))
        yield


def configuration(folder: Path, *overrides: str):
    """verl's configuration of a Megatron trainer."""
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_megatron_trainer", [f"actor_rollout_ref.model.path={folder}", *OVERRIDES, *overrides])


def worker(folder: Path, tp: int, *, bound: bool = True):
    """verl's worker. bound: whether its rollout is bound to its actor."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from tp_invariant_recipes.adapters import verl as adapter

    of_tp = (f"actor_rollout_ref.{part}.tensor_model_parallel_size={tp}" for part in ("actor.megatron", "rollout"))
    made = ActorRolloutRefWorker(configuration(folder, *of_tp).actor_rollout_ref, role="actor_rollout")
    made.init_model()
    if bound:
        adapter.bind(made)
    return made


class Batch:
    """Prompts, padded on the left, and answers, padded on the right, as verl's agent loops hand them on."""

    def __init__(self, prompts, answers):
        import torch

        self.rows = len(answers)
        self.ids, self.mask = torch.zeros(2, self.rows, PROMPT + RESPONSE, dtype=torch.int64)
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            span = slice(PROMPT - len(prompt), PROMPT + len(answer))
            self.ids[n, span], self.mask[n, span] = torch.tensor([*prompt, *answer]), 1
        self.answered = self.mask[:, PROMPT:].bool()

    def data(self, **columns):
        """A TensorDict without padding, as the trainer gives it to its workers."""
        from tensordict import TensorDict
        from verl.workers.utils.padding import left_right_2_no_padding

        fields = {
            "input_ids": self.ids, "attention_mask": self.mask, "position_ids": (self.mask.cumsum(1) - 1).clamp(min=0),
            "prompts": self.ids[:, :PROMPT], "responses": self.ids[:, PROMPT:], "response_mask": self.mask[:, PROMPT:],
        }  # fmt: skip
        return left_right_2_no_padding(TensorDict({n: t.clone() for n, t in (fields | columns).items()}, self.rows))

    def old_log_prob(self, worker):
        """[rows, RESPONSE] of verl's actor; None on a rank that returns nothing."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        data = self.data()
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=1.0)
        output = worker.compute_log_prob(data)
        return None if output is None else no_padding_2_padding(tu.get(output, "log_probs"), data).float()

    def update(self, worker, old, rewards):
        """A step of verl's optimizer by GRPO's advantages."""
        from verl.utils import tensordict_utils as tu

        groups = rewards.view(-1, ANSWERS)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        data = self.data(old_log_probs=old, advantages=advantages * self.mask[:, PROMPT:])
        tu.assign_non_tensor(
            data, calculate_entropy=False, global_batch_size=self.rows, mini_batch_size=self.rows, epochs=1, seed=1,
            dataloader_kwargs={"shuffle": False}, compute_loss=True, temperature=1.0,
        )  # fmt: skip
        worker.update_actor(data)


def set_variables(rank: int, size: int) -> None:
    """Of this process, which ends with the test."""
    os.environ |= variables(rank, size)


class Process:
    """A Ray actor with verl's worker, as verl's trainer starts one for a GPU."""

    def __init__(self, folder):
        set_variables(0, 1)
        self.host = on_a_cpu()
        self.host.__enter__()
        import torch.distributed as dist

        import tp_invariant_recipes.adapters.verl  # noqa: F401

        dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)  # verl takes NCCL
        self.worker_dict = {"actor_rollout": worker(folder, 1, bound=False)}

    def update_weights(self, step):
        asyncio.run(self.worker_dict["actor_rollout"].update_weights(global_steps=step, mode="naive"))

    def old_log_prob(self, prompts, answers):
        batch = Batch(prompts, answers)
        return batch.old_log_prob(self.worker_dict["actor_rollout"])[batch.answered].tolist()

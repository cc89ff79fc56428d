# SPDX-License-Identifier: Apache-2.0
"""verl's trainer program on a CPU: its inputs, and a module of `VERL_USE_EXTERNAL_MODULES` for its processes."""

import os
from pathlib import Path
from unittest import mock

from tests.adapters import verl_toy

TRAIN = "actor_rollout_ref"
# Those of a CPU, and of the toy: 4 prompts, 4 answers to each, a step for each batch.
OVERRIDES = (
    *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[console]"),
    *("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.total_epochs=9"),
    *("+ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=32"),
    "+ray_kwargs.ray_init.include_dashboard=false",
    *("data.train_batch_size=4", "data.max_prompt_length=8", "data.max_response_length=8"),
    *("data.dataloader_num_workers=0", "reward.num_workers=1", "algorithm.adv_estimator=grpo"),
    *(f"{TRAIN}.rollout.n=4", f"{TRAIN}.rollout.agent.num_workers=1", f"{TRAIN}.rollout.calculate_log_probs=true"),
    *(f"{TRAIN}.rollout.tensor_model_parallel_size=1", f"+{verl_toy.TRANSFORMER}.deterministic_mode=true"),
    *(each for each in verl_toy.OVERRIDES if "ppo_mini_batch_size" not in each and "steps" not in each),
    f"{TRAIN}.actor.ppo_mini_batch_size=4",
)


def make(folder: Path) -> list[str]:
    """A model with the special tokens that verl expects of a Qwen, prompts and a reward, as overrides."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    verl_toy.make_folder(folder / "model")
    special, count = ("<|im_start|>", "<|im_end|>", "\n"), verl_toy.VOCABULARY
    names = [*(f"t{n}" for n in range(count - len(special))), *special]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="t0"))
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    words.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", additional_special_tokens=[*special[:2]]
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "toy", "prompt": [{"role": "user", "content": f"t{n} t{n + 1} t{n + 2}"}],
            "reward_model": {"style": "rule", "ground_truth": "0"}, "extra_info": {"index": n},
        }
        for n in range(3, 19)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    reward = "def compute_score(solution_str, **_):\n    return sum(map(ord, solution_str)) % 7 / 7\n"
    (folder / "reward.py").write_text(reward)
    files = [f"data.{which}_files={folder}/prompts.parquet" for which in ("train", "val")]
    path = f"reward.custom_reward_function.path={folder}/reward.py"
    return [*OVERRIDES, *files, path, f"{TRAIN}.model.path={folder}/model"]


def _on_a_cpu() -> None:
    """verl's worker asks for NCCL, and computes in another thread than the one that imports it."""
    import torch
    import torch.distributed as dist

    from tp_invariant_recipes.cpu_host import cpu
    from tp_invariant_recipes.start import bridge

    initialize = dist.init_process_group

    def on_gloo(backend=None, device_id=None, **others):
        cpu.CudaMeansCpu().__enter__()
        initialize("gloo", **others)

    bridge.load()
    dist.init_process_group = on_gloo
    installed.append(cpu.installed())
    installed[0].__enter__()
    mock.patch.object(torch.cuda, "mem_get_info", return_value=(1 << 40, 1 << 40)).start()


installed: list = []
if "VERL_USE_EXTERNAL_MODULES" in os.environ and "RANK" in os.environ:
    _on_a_cpu()

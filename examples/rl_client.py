# SPDX-License-Identifier: Apache-2.0
"""GRPO with the rollouts of a server: sample over HTTP, score, update in Bridge's loop, push the weights, sample again.

    tpi train qwen3_toy numerics=portable model.vocab_size=32 model.kv_channels=32 seq=16 iters=1 save=1 run.dir=runs/0
    tpi export runs/0 runs/model                                         # any weights of this shape
    tpi serve runs/model tp=2 --port 30000
    torchrun --nproc-per-node 1 examples/rl_client.py runs/rl http://127.0.0.1:30000 runs/model iters=20

The task and the loss are those of examples/grpo.py. Each step prints the largest |log(p_trainer / p_server)| over all
sampled tokens, which is 0 exactly in any layout of both.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpo

import tp_invariant_recipes as tpi


class Server:
    """Samples as tpi.Engine does, from a server whose weights it replaces."""

    def __init__(self, model: list[Any], url: str, source: str, folder: Path) -> None:
        from megatron.bridge import AutoBridge

        self.model, self.url, self.folder, self.pushed = model, url, folder, 0
        self.bridge = AutoBridge.from_hf_pretrained(source)

    def post(self, route: str, **body: Any) -> Any:
        """Rank 0's answer, on every rank."""
        import torch.distributed as dist

        answer = [None]
        if dist.get_rank() == 0:
            with urlopen(Request(f"{self.url}/{route}", json.dumps(body).encode())) as response:
                answer = [json.load(response)]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def refit(self) -> None:
        """Give the server the weights of the model."""
        self.pushed += 1
        path = self.folder.absolute() / f"weights-{self.pushed}"
        self.bridge.save_hf_pretrained(self.model, path, show_progress=False)
        self.version = self.post("update_weights_from_disk", model_path=str(path))["weight_version"]

    def generate(self, requests: list[tpi.Request]) -> list[tpi.Completion]:
        """Completions of all requests, each with log-probabilities that the server's scores confirm."""
        sampling, prompts = requests[0].sampling, [[*request.tokens] for request in requests]
        params = {
            "n": sampling.num_return_sequences, "max_new_tokens": sampling.max_new_tokens, "temperature": 1.0,
            "stop_token_ids": [*sampling.eos_token_id], "sampling_seed": sampling.seed,
        }  # fmt: skip
        ids = [request.id for request in requests]
        answers = self.post("generate", input_ids=prompts, rid=ids, sampling_params=params, return_logprob=True)
        rows, completions = [], []
        for number, answer in enumerate(answers):
            meta, request = answer["meta_info"], number // sampling.num_return_sequences
            assert meta["weight_version"] == self.version
            values = tuple(value for value, *_ in meta["output_token_logprobs"])
            tokens, reason = tuple(answer["output_ids"]), meta["finish_reason"]["type"]
            completions.append(tpi.Completion(ids[request], meta["sample"], tokens, values, (), reason))
            rows.append({"prompt": prompts[request], "response": [*tokens]})
        scores = self.post("score", sequences=rows)["scores"]
        assert [tuple(score["logprobs"]) for score in scores] == [each.log_probabilities for each in completions]
        return completions

    def release(self) -> None:
        """The server stays."""


if __name__ == "__main__":
    run, url, source, *words = sys.argv[1:]
    grpo.main(run, *words, engine=partial(Server, url=url, source=source, folder=Path(run)))

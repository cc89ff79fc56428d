# SPDX-License-Identifier: Apache-2.0
"""Counters of a server in Prometheus' text format."""

from collections import defaultdict

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Name -> its type, and what it counts.
METRICS = {
    "tpi_requests_total": ("counter", "HTTP requests, by route and status"),
    "tpi_request_seconds_total": ("counter", "seconds from the head of a request to the end of its answer, by route"),
    "tpi_completions_total": ("counter", "completions that have ended, by finish reason"),
    "tpi_prompt_tokens_total": ("counter", "tokens of prompts"),
    "tpi_generation_tokens_total": ("counter", "tokens drawn, of completions that have ended"),
    "tpi_scored_tokens_total": ("counter", "tokens scored"),
    "tpi_weight_updates_total": ("counter", "updates of weights, by outcome"),
    "tpi_open_completions": ("gauge", "completions that wait or run"),
    "tpi_weights_info": ("gauge", "1, for the version of the weights"),
}
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """The values of METRICS, by labels."""

    def __init__(self) -> None:
        self._values: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter of METRICS."""
        self._values[name][tuple(labels.items())] += value

    def completed(self, reason: str, tokens: int) -> None:
        """Count a completion."""
        self.add("tpi_completions_total", finish_reason=reason)
        self.add("tpi_generation_tokens_total", tokens)

    def text(self, open_completions: int, version: str) -> str:
        """Return all, with the gauges of now."""
        self._values["tpi_open_completions"] = defaultdict(float, {(): open_completions})
        self._values["tpi_weights_info"] = defaultdict(float, {(("weight_version", version),): 1})
        lines = []
        for name, (kind, text) in METRICS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for labels, value in sorted((self._values[name] or {(): 0.0}).items()):
                named = ",".join(f'{label}="{of}"' for label, of in labels)
                lines.append(f"{name}{f'{{{named}}}' if named else ''} {value:.15g}")
        return "\n".join(lines) + "\n"

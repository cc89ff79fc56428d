# SPDX-License-Identifier: Apache-2.0
"""A plugin of NeMo-Run, in the manner of Bridge's `megatron.bridge.recipes.run_plugins`.

    run.run(task, executor=executor, plugins=[InvariantPlugin(ledger="/nemo_run/ledger")])

The task, a `run.Script` of Python or a `run.Partial` of Bridge's pretrain(), trains as `numerics=tree` does and writes
a ledger. Everything else of the task stays. docs/nemo-run.md says more.
"""

from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.errors import RunError, refuse
from tp_invariant_recipes.nemo import task as wrapped
from tp_invariant_recipes.start import needed

if not needed.there("nemo_run"):
    raise RunError("tp_invariant_recipes.nemo.plugin needs nemo-run, which is not installed here: pip install nemo-run")

import nemo_run

BRIDGES = ("megatron.bridge.training.pretrain", "pretrain")  # the module and the name of what a Partial may call


@dataclass(kw_only=True)
class InvariantPlugin(nemo_run.Plugin):
    """Adds `numerics=tree` and the ledger to a task.

    ledger:         folder for the ledger, as the task sees it; a new one for each task.
    virtual_shards: V, a power of two that every tp divides; the same in all tasks to compare.
    """

    ledger: str = "/nemo_run/ledger"
    virtual_shards: int = 8

    def setup(self, task: Any, executor: Any) -> None:
        """Change the task and the variables of its executor. Raises ConfigError listing all that it cannot cover."""
        variables = wrapped.variables(self.ledger, self.virtual_shards)
        problems = []
        for where, given in (("the executor", executor.env_vars), ("the task", getattr(task, "env", None) or {})):
            wrong = [name for name, value in variables.items() if given.get(name, value) != value]
            problems += [
                f"{where} sets {name}={given[name]}, and the plugin {name}={variables[name]}" for name in wrong
            ]
        refuse([*_problems(task), *problems])
        executor.env_vars.update(variables)
        if isinstance(task, nemo_run.Script):
            task.args = [*(["-m"] if task.m else []), task.path, *task.args]
            task.path, task.m = wrapped.RUNNER, True
        else:
            import fiddle

            fiddle.update_callable(task, wrapped.pretrain)


def _problems(task: Any) -> list[str]:
    if isinstance(task, nemo_run.Script):
        if task.inline:
            return ["an inline script has no file that Python could run: give the task a path"]
        if "python" not in task.entrypoint:
            return [f"entrypoint={task.entrypoint}: only scripts of Python are covered; entrypoint='python'"]
        return []
    function = getattr(task, "__fn_or_cls__", None)
    if (getattr(function, "__module__", None), getattr(function, "__name__", None)) == BRIDGES:
        return []
    name = getattr(function, "__qualname__", type(task).__name__)
    return [f"{name} is not Bridge's pretrain(), and what it calls is not seen: give the task {'.'.join(BRIDGES)}"]

"""Make a planned submission: let Bridge validate it, write its directory, hand its jobs to SLURM; or leave no trace."""

import shutil
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import RunError, TpiError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.jobs import registry, slurm_client
from tp_invariant_recipes.jobs.planned import PlannedSubmission
from tp_invariant_recipes.runs.lock import locked, locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir


def check(submission: PlannedSubmission) -> str | None:
    """Let Bridge validate the runs. Imports it, 10 to 20 s. Raises ConfigError.

    returns: why Bridge cannot validate on this machine, which may lack a driver or library of the nodes. They will.
    """
    try:
        submission.validate()
    except TpiError:
        raise
    except Exception as error:
        return f"the nodes will ask Megatron-Bridge, which fails here: {type(error).__name__}: {error}"
    return None


def execute(submission: PlannedSubmission) -> dict[str, Any]:
    """Write the directory and submit. Returns the contents of submission.json. Raises RunError.

    If SLURM refuses, the directory is removed, so that the corrected command can be repeated.
    """
    where = submission.directory
    new = not where.path.exists()
    ids: list[str] = []
    with locked(where) if submission.resumed else locked_empty(where):
        earlier = {f: f.read_bytes() for f in (where.script, where.submission) if submission.resumed and f.exists()}
        try:
            submission.write()
            where.logs.mkdir(parents=True, exist_ok=True)  # SLURM does not create it, and a job without its log fails
            for one in submission.scripts:
                where.write_text(one.file, one.text)
            where.write(where.submission, submission.as_dict())
            for number, one in enumerate(submission.scripts):
                ids.append(slurm_client.sbatch(one.file, submission.options(number, *ids)))
        except BaseException as error:
            try:
                slurm_client.cancel(ids)
            except RunError as other:
                raise RunError(
                    f"{error}\nand job {ids[0]}, submitted before it, could not be ended: {other}"
                ) from error
            if submission.resumed:
                _restore(where, earlier)
            else:
                _remove(where.path, whole=new)
            raise
        found = submission.as_dict(ids)
        try:
            registry.remember(where.path, ids)
            where.write(where.submission, found)
        except RunError as error:
            raise RunError(f"job {' and '.join(ids)} is submitted, but tpi jobs may not find it: {error}") from error
        return found


def _restore(where: RunDir, earlier: dict[Path, bytes]) -> None:
    """The files of an earlier submission, as they were."""
    for file in (where.script, where.submission):
        if file in earlier:
            write_atomically(file, earlier[file].decode())
        else:
            file.unlink(missing_ok=True)


def _remove(path: Path, *, whole: bool) -> None:
    """Remove the contents of a directory that was empty before; if `whole`, the directory itself."""
    if whole:
        shutil.rmtree(path, ignore_errors=True)
        return
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)

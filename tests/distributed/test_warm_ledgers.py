"""A run trained by ranks that have trained another has the ledger of a run with ranks of its own, byte for byte."""

import os

import pytest

WORDS = ("qwen3_toy", "tp=2", "seq=32", "gbs=2", "iters=2", "model.num_layers=1", "device=cpu")


def _note_process() -> None:
    """The rank that writes a ledger writes its process number beside it."""
    from tp_invariant_recipes.training.recorder import Recorder

    start = Recorder.on_train_start

    def on_train_start(self, context):
        start(self, context)
        (self.run_dir.path / "process").write_text(str(os.getpid()))

    Recorder.on_train_start = on_train_start


def _one(square: int, exponent: int) -> float:
    return 1.0


def _leave_another_norm() -> None:
    """A training leaves behind that every gradient norm is one."""
    from tp_invariant_recipes.numerics.sums import grad_norm
    from tp_invariant_recipes.training.digests import Digests

    _note_process()
    end = Digests.on_train_end

    def on_train_end(self, context):
        end(self, context)
        grad_norm._rounded_root = _one

    Digests.on_train_end = on_train_end


def _leave_it_unseen() -> None:
    from tp_invariant_recipes.training.process_state import ProcessState

    _leave_another_norm()
    ProcessState.restore = lambda self: []


@pytest.fixture(scope="module")
def cold(shared):
    shared("train", *WORDS, "seed=2", "run.dir=cold", status=0)
    return (shared.folder / "cold" / "ledger.jsonl").read_bytes()


# What happens in a rank, whether one process trains both runs, and whether the second has the ledger of a cold start.
CASES = (
    pytest.param(_note_process, True, True, id="warm"),
    pytest.param(_leave_another_norm, False, True, id="what differs ends the ranks"),
    pytest.param(_leave_it_unseen, True, False, id="the control: nobody looks"),
)


@pytest.mark.parametrize("before, warm, same", CASES)
def test_the_second_run_of_two(cold, tpi, before, warm, same):
    tpi("sweep", *WORDS, "seed=1,2", "--dir", "s", before=before, status=0)
    first, second = (tpi.folder / "s" / f"seed{seed}" for seed in (1, 2))
    assert ((first / "process").read_text() == (second / "process").read_text()) == warm
    assert ((second / "ledger.jsonl").read_bytes() == cold) == same

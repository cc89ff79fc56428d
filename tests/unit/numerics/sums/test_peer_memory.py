# SPDX-License-Identifier: Apache-2.0
"""Who decides that sums over ranks go through peers' memory; tests/gpu/test_peer_memory_gpu.py has the bits."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.cpu_host import cpu
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, Quantized
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.numerics.gemm import fp8 as fp8_products
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8
from tp_invariant_recipes.numerics.sums import symmetric_memory, tree
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.training.rank import adapt

GROUP = Mock(**{"size.return_value": 2, "rank.return_value": 0})


@pytest.fixture(autouse=True)
def choose(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "_choice", ["auto"])
    return symmetric_memory.choose


@pytest.fixture
def trial(monkeypatch):
    """A group whose trial ends as its value says."""
    outcome = Mock(return_value=True)
    monkeypatch.setattr(symmetric_memory, "Peers", Mock())
    monkeypatch.setattr(symmetric_memory, "_trial", outcome)
    monkeypatch.setattr(symmetric_memory, "_slow", lambda peers: None)
    monkeypatch.setattr(symmetric_memory, "_everywhere", lambda fine, *_: fine)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(symmetric_memory, "_hosts_problem", lambda *_: None)
    return outcome


def test_a_cpu_and_one_rank_ask_nobody():
    assert symmetric_memory.peers_of(GROUP, torch.zeros(1), 2**30) is None
    assert symmetric_memory.peers_of(None, torch.zeros(1), 2**30) is None


@pytest.mark.parametrize(
    "outcome, slow, words",
    (
        (True, None, "their memory"),
        (True, "barriers are slow", "NCCL: barriers are slow"),
        (False, None, "NCCL: sums are not bitwise identical"),
        (RuntimeError("no access\nC++"), None, "NCCL: no access"),
    ),
)
def test_the_trial_decides_and_says_so(trial, monkeypatch, capsys, outcome, slow, words):
    trial.side_effect = [outcome]
    monkeypatch.setattr(symmetric_memory, "_slow", lambda peers: slow)
    peers = symmetric_memory._tried(GROUP, torch.device("cpu"))
    assert (peers is not None) == (words == "their memory")
    assert capsys.readouterr().out == f"sums over 2 tensor-parallel ranks go through {words}\n"


@pytest.mark.parametrize(
    "value, size, asked", (("never", 2**30, 0), ("auto", 2**30, 1), ("auto", 2**10, 0), ("always", 2**10, 1))
)
def test_the_choice_decides_whether_a_trial_is_made(monkeypatch, choose, value, size, asked):
    choose(value)
    tried = Mock(return_value=None)
    monkeypatch.setattr(symmetric_memory, "_tried", tried)
    monkeypatch.setattr(symmetric_memory, "_peers", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert symmetric_memory.peers_of(GROUP, Mock(is_cuda=True), size) is None
    assert tried.call_count == asked


def test_gloo_is_not_tried(trial, monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    assert symmetric_memory._tried(GROUP, torch.device("cpu")) is None
    assert "NCCL: 2 ranks over gloo" in capsys.readouterr().out


def test_demanded_it_fails_where_it_cannot(trial, choose):
    choose("always")
    trial.return_value = False
    with pytest.raises(RunError, match=r"device.peer_memory=always.*not bitwise identical"):
        symmetric_memory._tried(GROUP, torch.device("cpu"))


def test_a_rank_follows_its_configuration(monkeypatch):
    monkeypatch.setattr(cpu, "installed", nullcontext)
    monkeypatch.setattr(registry, "applied", nullcontext)
    config = compose("qwen3_toy", ["device.peer_memory=never"], device="cpu").config
    with ExitStack() as stack:
        adapt(stack, config)
    assert symmetric_memory._choice == ["never"]


@pytest.mark.parametrize(
    "choice, counts, problem",
    (
        ("auto", (1, 1), None),
        ("auto", (0, 0), None),  # the driver does not tell
        ("auto", (1, 2), "another process uses a GPU of these ranks"),
        ("auto", (2, 1), "another process uses a GPU of these ranks"),
        ("always", (2, 2), None),
    ),
)
def test_gpus_that_others_use_are_given_to_nccl(choose, monkeypatch, choice, counts, problem):
    choose(choice)

    def gathered(every, here, group):
        every[:] = [(*here[:2], uuid, choice == "auto" and count > 1) for uuid, count in zip("ab", counts, strict=True)]
        assert here[3] == every[0][3]

    asked = []
    monkeypatch.setattr(gpus, "processes", lambda uuid: asked.append(uuid) or counts[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(uuid="a"))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    assert symmetric_memory._hosts_problem(GROUP, torch.device("cpu")) == problem
    assert asked == (["GPU-a"] if choice == "auto" else [])


@pytest.mark.parametrize(
    "choice, times, slow",
    (
        ("auto", (900.0, 90.0, 0.4), False),  # of 32 barriers; a busy host delays some
        ("auto", (90.0, 64.0, 80.0), True),
        ("always", (90.0, 64.0, 80.0), False),
    ),
)
def test_barriers_that_take_time_slices_are_given_to_nccl(choose, monkeypatch, choice, times, slow):
    choose(choice)
    taken = iter(times)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda enable_timing: Mock(**{"elapsed_time.side_effect": lambda end: next(taken)})
    )
    problem = symmetric_memory._slow(Mock())
    assert problem == ("a barrier takes 2.0 ms, as on shared GPUs" if slow else None)


class _Copying(symmetric_memory.Peers):
    """Rank 1 of 4, whose copies end when the stream waits for them."""

    def __init__(self):
        self.rank, self.size, self.group = 1, 4, GROUP
        self.started, self.ended = [], 0

    def copy(self, to, part):
        to.fill_(99)
        self.started.append((to, part))

    def copied(self):
        return len(self.started)

    def wait(self, event):
        for to, part in self.started[self.ended : event]:
            to.copy_(part)
        self.ended = max(self.ended, event)


def test_rows_of_any_size_go_to_every_rank(monkeypatch):
    """To the place of this rank in the inbox of each. A third exchange and one whose messages a guard digests: NCCL."""
    rows = [torch.full((n,), float(n)) for n in (3, 0, 5, 2)]
    peers, inboxes = _Copying(), [[torch.zeros(20) for _ in range(4)] for _ in range(2)]
    for buffer, views in (("sums", inboxes[0]), ("gathers", inboxes[1])):
        held = symmetric_memory.Buffer(Mock(**{"size.return_value": 4}), torch.device("cpu"))
        held.handle = Mock(**{"get_buffer.side_effect": lambda rank, shape, dtype, v=views: v[rank][: shape[0]]})
        held._size = 80
        setattr(peers, buffer, held)
    first, second = peers.start_exchange(rows), peers.start_exchange(rows)
    assert peers.start_exchange(rows) is None
    for exchange, views in ((first, inboxes[0]), (second, inboxes[1])):
        exchange.wait()  # for the peers
        assert exchange.inbox.shape == (4, 0)
        assert [view.nonzero().view(-1).tolist() for view in views] == [[3, 4, 5], [], [5, 6, 7, 8, 9], [2, 3]]
    assert (peers.sums.busy, peers.gathers.busy) == (False, False)
    monkeypatch.setattr(symmetric_memory, "listener", [Mock()])
    assert peers.start_exchange(rows) is None
    assert not peers.sums.busy


def test_slices_of_an_fp8_sum_are_sent_as_they_are_computed(monkeypatch):
    """Own rows last."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 128, generator=generator).to(E4M3) for n in (64, 32))
    a, b = (Quantized(x, torch.ones(())) for x in (rows, weight))
    peers, sent, inboxes = _Copying(), [], [torch.zeros(64, 32) for _ in range(4)]
    peers.sums = SimpleNamespace(begin=lambda *_: inboxes)
    send = symmetric_memory.PeerSum.send
    monkeypatch.setattr(symmetric_memory.PeerSum, "send", lambda s, to, x: sent.append((to, len(x))) or send(s, to, x))
    monkeypatch.setattr(tree, "peers_of", lambda *_: peers)
    mesh = VirtualMesh(4, 4, 1, GROUP)
    form = Fp8(False, E4M3)
    started = form.start_contraction(a, b, mesh, 1, forward=True, scatters=True, dtype=torch.bfloat16).sum
    assert sent == [(2, 16), (3, 16), (0, 16), (1, 16)]
    (whole,) = fp8_products.nodes(a, b, mesh, (128,))
    peers.wait(peers.copied())
    for peer, part in enumerate(whole.chunk(4)):
        got = started.parts[1] if peer == 1 else inboxes[peer].view(4, -1)[1]
        assert same_bits(got.view(16, 32), part)

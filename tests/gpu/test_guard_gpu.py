# SPDX-License-Identifier: Apache-2.0
"""A guard on a GPU: quiet where nothing is wrong, also in graphs; a planted fault is found and judged by the CPU."""

import pytest
import torch

from tests.gpu.commands import steps, tpi
from tp_invariant_recipes.features.guard.judge import Judge
from tp_invariant_recipes.ledger import evidence
from tp_invariant_recipes.numerics.gemm import defined, judge, sampling

pytestmark = pytest.mark.gpu

RUN = ("train", "qwen3_toy", "gbs=4", "iters=12")


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    done = tpi(folder, *RUN, "cuda_graph=off", "run.dir=off")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("graphs", ("off", "te", "full"))
@pytest.mark.parametrize("numerics", ("tree", "portable"))
def test_a_guard_is_quiet_and_changes_no_bit(unguarded, numerics, graphs):
    if (numerics, graphs) == ("portable", "te"):
        pytest.skip("numerics=portable captures the whole step only")
    words = (*RUN, f"cuda_graph={graphs}", f"numerics={numerics}", "guard=products", "guard.products=32")
    done = tpi(unguarded, *words, f"run.dir={numerics}-{graphs}")
    assert done.returncode == 0, done.stderr
    assert not list((unguarded / f"{numerics}-{graphs}").glob("guard/*.evidence"))
    if numerics == "tree":
        assert steps(unguarded, f"{numerics}-{graphs}") == steps(unguarded, "off")
    log = (unguarded / f"{numerics}-{graphs}" / "logs" / "rank-0.log").read_text()
    assert "guard: " in log  # how many checks there were


def test_experts_are_sampled_too(tmp_path):
    words = ("train", "qwen3_moe_toy", "gbs=2", "iters=4", "guard=products", "guard.products=64", "run.dir=run")
    done = tpi(tmp_path, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("graphs", ("off", "te", "full"))
def test_a_broken_tile_is_detected_and_judged_by_a_cpu(tmp_path, graphs):
    words = (*RUN, "iters=40", f"cuda_graph={graphs}", "guard=products", "run.dir=run")
    done = tpi(tmp_path, *words, module="tests.gpu.guard_planted")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "silent data corruption at step" in done.stderr
    assert "UUID GPU-" in done.stderr
    (file,) = (tmp_path / "run" / "guard").glob("*.evidence")
    result, _ = evidence.read(file)
    assert (result.detector, result.machine) == (evidence.PRODUCT, {})
    judged = tpi(tmp_path, "check", str(file))
    assert judged.returncode == 1, judged.stderr
    assert "computed on this CPU" in judged.stdout


def test_the_judge_reads_what_another_stream_has_still_to_compute():
    """Bridge trains with cuda_graph=te on a stream of its own; the judge's thread copies on the default one."""
    thread, actual = Judge(), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(1, 4):
            result = torch.zeros(1024, device="cuda")
            torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
            result.fill_(number)
            thread.submit(lambda result=result: actual.append(set(result.cpu().tolist())))
            thread.begin()
    thread.wait()
    thread.close()
    assert actual == [{1.0}, {2.0}, {3.0}]


@pytest.mark.usefixtures("settings_of_a_run")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("add", (False, True))
def test_a_sample_of_a_gpus_product_is_what_a_cpu_computes(dtype, add):
    sampler = sampling.Sampler(1, "a seed")
    a, b = torch.randn(300, 1024, device="cuda").to(dtype), torch.randn(1024, 520, device="cuda").to(dtype)
    out = torch.randn(300, 520, device="cuda")
    sampling.use(sampler)
    try:
        defined.compute(a, b, out, add)
    finally:
        sampling.use(None)
    (sample,) = sampler.samples
    on_host = {name: value.cpu() for name, value in vars(sample).items() if isinstance(value, torch.Tensor)}
    here = sampling.Sample(**vars(sample) | on_host)
    assert here.out.shape == (1, 16, 16)
    assert judge.difference(here.out, judge.expected(here)) is None
    here.out[0, 3, 4] += 1
    assert judge.difference(here.out, judge.expected(here)).outputs == 1

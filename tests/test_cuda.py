"""What only a GPU can show. Skipped where there is none."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.batched import BatchedTrainer, bytes_per_client, why_not_batched
from fedhist.clients.parcel import parcel_of
from fedhist.clients.reference import ReferenceTrainer
from fedhist.world.attacks import ATTACKS
from tests.clients.test_batched import Own, Recurrent, smooth
from tests.clients.test_tasks import KINDS, task_of
from tests.clients.test_trainers import OBJECTIVES, jobs
from tests.simulation.test_checkpoint import Stopped, assert_same, stop_after
from tests.strategies.test_conformance import ALL, K, N, P, arrived, close, parts, stream, updates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
SAMPLE = ["fedavg", "moon", "wkafl", "refl", "fedhist", "fedasync", "fedbuff + momentum", "ma", "fadas", "fedadam"]
CACHED = ["ca2fl:bits=4", "aced:tau_algo=4", "area", "nowcast"]


@pytest.mark.parametrize("name", ALL)
def test_a_captured_round_stays_right(name: str) -> None:
    """One CUDA graph, replayed for every round, gives what eager rounds give."""
    rounds = stream(24)
    expected = updates(ALL[name](), rounds)
    strategy = ALL[name]().setup(N, K, P, device="cuda")
    static = [each.cuda() for each in parts(rounds[0])]

    def step() -> Tensor:
        return strategy(arrived(*static, validate=False))

    state = {key: value.clone() for key, value in strategy.state_dict().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update = step()
    strategy.load_state_dict(state)
    seen = []
    for arrivals in rounds:
        for target, source in zip(static, parts(arrivals), strict=True):
            target.copy_(source)
        graph.replay()
        seen.append(update.cpu().clone())
    assert close(seen, expected, rtol=1e-3)


@pytest.mark.parametrize("method", [*SAMPLE, *CACHED, "port", "asyncfeded", "fedfa"])
def test_gpu_and_cpu_agree(task: fh.Task, method: str) -> None:
    runs = [fh.simulate(method, task, k=3, rounds=12, local=LOCAL, device=d, eval_every=4) for d in ("cpu", "cuda")]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-3)
    assert runs[0].staleness.tolist() == runs[1].staleness.tolist()


def test_a_captured_run_is_recorded(task: fh.Task, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="a recording is read with pydantic")
    fh.simulate("fedhist", task, k=3, rounds=100, local=LOCAL, device="cuda", eval_every=30, record=tmp_path)
    again = fh.replay(tmp_path, "fedhist")
    assert again.cosine.min() > 1 - 1e-5 and again.weight_distance.max() < 1e-3
    assert again.distance[-1] < 1e-3 * again.recorded_travelled


def test_a_captured_moving_average_is_that_of_the_cpu(task: fh.Task) -> None:
    options = {"k": 3, "rounds": 12, "local": LOCAL, "eval_every": 4, "ema": 0.8}
    cpu, gpu = (fh.simulate("fedhist", task, device=device, **options) for device in ("cpu", "cuda"))  # type: ignore[arg-type]
    assert cpu.loss == pytest.approx(gpu.loss, rel=1e-3)


@pytest.mark.parametrize("attack", [f"{name}:share=0.25" for name in ATTACKS])
def test_attacked_and_defended_runs_agree_with_the_cpu(task: fh.Task, attack: str) -> None:
    methods = ["fedavg", "refl + median", "fedhist + trimmed", "fedhist + krum", "fedhist + median + norm-clip"]
    trials = [fh.Trial(method, task, k=4, rounds=12, local=LOCAL, eval_every=4, attack=attack) for method in methods]
    cpu, gpu = (fh.simulate_many(trials, device=device) for device in ("cpu", "cuda"))
    for a, b in zip(cpu, gpu, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)
        np.testing.assert_allclose(a.weights, b.weights, atol=1e-3)


def test_a_strategy_with_state_of_its_own_is_not_captured(task: fh.Task) -> None:
    class Alternating(fh.Strategy):
        """Counts rounds in Python, which a replayed graph would not see."""

        count = 0

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            self.count += 1
            return arrivals.num_examples if self.count % 2 else 1 / arrivals.staleness

    runs = [fh.simulate(Alternating(), task, k=3, rounds=20, local=LOCAL, device=d) for d in ("cpu", "cuda")]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-3)
    np.testing.assert_allclose(runs[0].weights, runs[1].weights, rtol=1e-4)


def test_same_seed_same_bits_on_a_gpu() -> None:
    x, y = torch.randn(300, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 10
    task = fh.Task(fh.LeNet, x, y, fh.dirichlet(y, 12, 5.0), x, y)
    runs = [fh.compare(["fedavg", "fedhist"], task, k=3, rounds=30, seeds=2, device="cuda") for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert a.evaluations == b.evaluations
        assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


@pytest.mark.parametrize("method", ["fedhist", "moon", "refl", *CACHED, "fedfa + adam"])
def test_resumed_to_the_bit_on_a_gpu(task: fh.Task, tmp_path: Path, method: str) -> None:
    """Rounds before a stop came from another capture of the same graph than those after it."""
    pytest.importorskip("pydantic", reason="a checkpoint is read with pydantic")
    trials = [fh.Trial(method, task, k=2, rounds=90, local=LOCAL, seed=seed, eval_every=20) for seed in (0, 1)]
    whole = fh.simulate_many(trials, device="cuda")
    for round_ in (1, 40, 63, 64, 65):
        with pytest.raises(Stopped):
            fh.simulate_many(
                trials, device="cuda", checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(round_)
            )
    for a, b in zip(fh.simulate_many(trials, device="cuda", checkpoint=tmp_path), whole, strict=True):
        assert_same(a, b)


def test_a_client_with_broken_data_on_a_gpu(task: fh.Task) -> None:
    """Its run leaves the batch before the first bad upload and continues upload by upload; the other run stays."""
    broken = copy.deepcopy(task)
    broken.x[broken.client(0)] = torch.nan
    trials = [fh.Trial("fedhist", each, k=3, rounds=30, local=LOCAL, eval_every=10) for each in (broken, task)]
    left_out, fine = fh.simulate_many(trials, device="cuda")
    assert {(event["event"], event["client"]) for event in left_out.events} == {("rejected", 0)}
    assert not (left_out.clients == 0).any()
    assert fine.events == []
    expected = fh.simulate("fedhist", broken, k=3, rounds=30, local=LOCAL, eval_every=10, device="cpu")
    assert left_out.clients.tolist() == expected.clients.tolist()
    assert left_out.loss == pytest.approx(expected.loss, rel=1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_trainers_on_a_gpu_agree_with_the_cpu(task: fh.Task, image_task: fh.Task, objective: str) -> None:
    for each in (task, image_task):
        work = jobs(each, fh.LocalSGD(lr=0.1, steps=3, batch_size=5, momentum=0.5), OBJECTIVES[objective])
        width = parcel_of(each.layout, OBJECTIVES[objective]).row_width
        expected = torch.empty(len(work), width)
        ReferenceTrainer(torch.device("cpu")).start(work, list(expected))
        on_gpu = [
            replace(job, received=job.received.cuda(), previous=None if job.previous is None else job.previous.cuda())
            for job in work
        ]
        for trainer in (ReferenceTrainer(torch.device("cuda")), BatchedTrainer(torch.device("cuda"))):
            out = torch.empty(len(work), width, device="cuda")
            assert not trainer.start(on_gpu, list(out))
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-5)


def test_clients_that_cannot_be_batched_take_turns_on_a_gpu(task: fh.Task) -> None:
    options = {"k": 3, "rounds": 6, "local": LOCAL, "objective": Own(smooth), "eval_every": 3}
    with pytest.warns(UserWarning, match="clients are trained one after the other, .* Own counts the padding"):
        gpu = fh.simulate("fedavg", task, device="cuda", **options)  # type: ignore[arg-type]
    assert gpu.loss == pytest.approx(fh.simulate("fedavg", task, device="cpu", **options).loss, rel=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_models_on_a_gpu(kind: type[nn.RNNBase]) -> None:
    x, y = torch.randint(7, (40, 5), generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    task = fh.Task(lambda: Recurrent(kind), x, y, np.array_split(np.arange(40), 5), x, y)
    assert why_not_batched(task, fh.CrossEntropy(), torch.device("cuda")) is None
    gpu = fh.simulate("fedavg", task, k=2, rounds=4, local=LOCAL, eval_every=2, device="cuda")
    cpu = fh.simulate("fedavg", task, k=2, rounds=4, local=LOCAL, eval_every=2, device="cpu")
    assert gpu.loss == pytest.approx(cpu.loss, rel=1e-3)


def test_memory_for_batches_is_measured(task: fh.Task) -> None:
    small, large = (bytes_per_client(task, fh.CrossEntropy(), size, torch.device("cuda")) for size in (8, 512))
    assert large > small >= task.layout.size * 4


@pytest.mark.parametrize("kind", KINDS)
def test_any_task_on_a_gpu(tmp_path: Path, kind: str) -> None:
    """As on the CPU, the same bits again, and resumed to the bit."""
    task, local = task_of(kind), fh.Local(0.01, 2, 8, optimizer="adamw", clip_norm=1.0, schedule="cosine:warmup=2")
    trials = [
        fh.Trial(method, task, k=2, rounds=12, local=local, eval_every=4, seed=seed)
        for method in ("fedavg", "scaffold")
        for seed in (0, 1)
    ]
    cpu, gpu, again = (fh.simulate_many(trials, device=device) for device in ("cpu", "cuda", "cuda"))
    for a, b, c in zip(cpu, gpu, again, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=2e-3)
        assert b.loss == c.loss
    pytest.importorskip("pydantic", reason="a checkpoint is read with pydantic")
    with pytest.raises(Stopped):
        fh.simulate_many(trials, device="cuda", checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(7))
    for a, b in zip(fh.simulate_many(trials, device="cuda", checkpoint=tmp_path), gpu, strict=True):
        assert_same(a, b)

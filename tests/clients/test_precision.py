"""Training in fewer digits: the same meaning on every trainer, and a run of its own."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.clients.precision import products_in
from fedhist.clients.randomness import Keyed
from tests.clients.test_tasks import KINDS, task_of

BATCHED = [kind for kind in KINDS if kind not in ("statistics", "augmented")]
"""Kinds whose clients train at once in bfloat16; a CPU's batch normalisation over models does not mix types."""


def line(x: float) -> fh.Task:
    """Return a task whose gradient with respect to its one parameter is `x`."""
    data, y = torch.full((4, 1), x), torch.zeros(4)
    return fh.Task(
        lambda: nn.Linear(1, 1, bias=False), data, y, [[0, 1], [2, 3]], data, y, loss=lambda out, _: out[:, 0]
    )


@pytest.mark.parametrize("trainer", ["reference", "threaded", "native", "batched"])
def test_factors_are_rounded_and_the_model_is_not(trainer: str) -> None:
    """1 + 2⁻⁹ is a number of float32, and between two of bfloat16."""
    task, steps = line(1 + 2**-9), {}
    for precision in ("float32", "bfloat16"):
        local = fh.Local(lr=2**-10, steps=1, batch_size=2, precision=precision)
        if trainer == "native":
            with pytest.raises(fh.InvalidInput, match="the kernel has no"):
                fh.simulate("fedavg", task, k=1, rounds=1, local=local, trainer=trainer)
            continue
        history = fh.simulate("fedavg", task, k=1, rounds=1, local=local, trainer=trainer)
        assert history.model is not None
        (after,) = history.model.values()
        before = task.build(0).weight.detach()  # type: ignore[attr-defined]
        assert after.dtype == torch.float32
        steps[precision] = float((before - after) * 2**10)
    if steps:
        assert steps == {"float32": pytest.approx(1 + 2**-9, abs=2e-4), "bfloat16": pytest.approx(1, abs=2e-4)}


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_agree(kind: str) -> None:
    task, options = task_of(kind), {"k": 2, "rounds": 6, "eval_every": 2, "device": "cpu"}
    local = fh.Local(0.05, 2, 8, precision="bfloat16")
    trainers = ["reference", "threaded", "auto", *(["batched"] if kind in BATCHED else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = {name: fh.simulate("fedavg", task, local=local, trainer=name, **options) for name in trainers}  # type: ignore[arg-type]
        exact = fh.simulate("fedavg", task, local=fh.Local(0.05, 2, 8), trainer="reference", **options)  # type: ignore[arg-type]
    for run in runs.values():
        assert run.loss == pytest.approx(runs["reference"].loss, rel=2e-2)
        assert run.loss != exact.loss and run.loss == pytest.approx(exact.loss, rel=2e-2)
        assert run.setting["precision"] == "bfloat16"


def test_runs_of_either_precision_share_a_batch_with_nobody_else() -> None:
    arms = [fh.Arm("fedavg", name=each, precision=each) for each in ("float32", "bfloat16")]
    options = {"k": 2, "rounds": 4, "lr": 0.05, "trainer": "batched", "device": "cpu"}
    together = fh.compare(arms, task_of("tokens"), seeds=2, **options)  # type: ignore[arg-type]
    alone = [fh.compare([arm], task_of("tokens"), seeds=2, **options) for arm in arms]  # type: ignore[arg-type]
    assert [run.loss for run in together] == [run.loss for runs in alone for run in runs]


def test_a_checkpoint_is_of_one_precision(tmp_path: Path) -> None:
    options = {"k": 2, "rounds": 4, "checkpoint": tmp_path, "device": "cpu"}
    fh.simulate("fedavg", task_of("tokens"), precision="bfloat16", **options)  # type: ignore[arg-type]
    with pytest.raises(fh.FedHistError, match="precision is 'bfloat16' there and 'float32' here"):
        fh.simulate("fedavg", task_of("tokens"), **options)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused() -> None:
    task = task_of("tokens")
    with pytest.raises(fh.InvalidInput, match="precision='tf32' is what GPUs compute in, and this run is on the CPU"):
        fh.simulate("fedavg", task, k=2, rounds=2, precision="tf32", device="cpu")
    with pytest.raises(fh.InvalidInput, match="precision must be 'float32', 'tf32' or 'bfloat16', got 'half'"):
        fh.Local(precision="half")
    with pytest.raises(fh.InvalidInput, match="a loop trains in its own way; leave precision out"):
        fh.Local(loop=lambda *_, **__: None, precision="bfloat16")
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.arange(4) % 2
    wide = fh.Task(lambda: nn.Linear(2, 2, dtype=torch.float64), x, y, np.array_split(np.arange(4), 2), x, y)
    with pytest.raises(fh.InvalidInput, match="is for models in float32, and this one is torch.float64"):
        fh.simulate("fedavg", wide, k=2, rounds=2, precision="bfloat16", device="cpu")


def test_tf32_is_allowed_for_its_own_products_alone() -> None:
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [each.allow_tf32 for each in flags]
    for precision in ("float32", "tf32"):
        with pytest.raises(RuntimeError, match="stop"), products_in(precision):
            assert [each.allow_tf32 for each in flags] == ([True, True] if precision == "tf32" else before)
            raise RuntimeError("stop")
        assert [each.allow_tf32 for each in flags] == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="since PyTorch 2.9")
def test_flags_of_gpus_that_a_user_has_set_do_not_matter_on_a_cpu() -> None:
    """PyTorch refuses to read the older flags once one of the newer ones was set."""
    code = "import torch, fedhist as fh; torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
    code += "print(fh.simulate('fedavg', fh.load_task('digits', clients=4), k=2, rounds=2, device='cpu').rounds)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr


def test_random_numbers_of_few_digits_are_below_one() -> None:
    with Keyed(torch.tensor(3), 0):
        drawn = {each: torch.rand_like(torch.empty(50_000, dtype=each)) for each in (torch.float32, torch.bfloat16)}
    for values in drawn.values():
        assert float(values.min()) >= 0 and float(values.max()) < 1
        assert float(values.double().mean()) == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_is_batched_in_bfloat16(dropout: float, need_weights: bool) -> None:
    task = sequences(lambda: Attentive(dropout, need_weights))
    options = {
        "k": 2,
        "rounds": 6,
        "eval_every": 2,
        "device": "cpu",
        "local": fh.Local(0.05, 2, 8, precision="bfloat16"),
    }
    runs = [fh.simulate("fedavg", task, trainer=name, **options) for name in ("reference", "batched")]  # type: ignore[arg-type]
    assert runs[1].loss == pytest.approx(runs[0].loss, rel=2e-2)


@pytest.mark.parametrize("trainer", ["reference", "batched"])
def test_nothing_to_attend_to_gives_zero_as_in_pytorch(trainer: str) -> None:
    task = sequences(lambda: Attentive(0.2, need_weights=False))
    task.x[::5] = 0  # sequences of nothing but padding
    history = fh.simulate("fedavg", task, k=2, rounds=4, local=fh.Local(0.05, 2, 8), trainer=trainer, device="cpu")
    assert history.events == [] and np.isfinite(history.loss).all()


class Attentive(nn.Module):
    """Attention over sequences in which 0 is padding."""

    def __init__(self, dropout: float, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.embedding, self.out = nn.Embedding(6, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h, _ = self.attention(
            h, h, h, key_padding_mask=None if self.need_weights else x == 0, need_weights=self.need_weights
        )
        return self.out(h.mean(dim=1))


def sequences(model: Callable[[], nn.Module]) -> fh.Task:
    x, y = torch.randint(1, 6, (60, 7), generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    return fh.Task(model, x, y, np.array_split(np.arange(60), 6), x.clone(), y)

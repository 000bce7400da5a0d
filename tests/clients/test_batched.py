"""What can be trained as one batch, and how everything else is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import fedhist as fh
from fedhist.clients.batched import bytes_per_client, padded, why_not_batched
from fedhist.clients.objectives import Anchor, Batch, Objective
from fedhist.simulation import plan as planning

CPU = torch.device("cpu")
LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)


class Own:
    """An objective of the user's own."""

    uses_previous = False

    def __init__(self, loss: Callable[[Tensor, Batch], Tensor]) -> None:
        self.loss = loss

    def __call__(self, net: Callable[..., Tensor], params: object, anchor: Anchor, batch: Batch) -> Tensor:
        return self.loss(net(params, batch.x), batch)


def smooth(logits: Tensor, batch: Batch) -> Tensor:
    """Counts padding, since it takes the mean itself."""
    return F.cross_entropy(logits, batch.y, label_smoothing=0.1)


def smooth_without_padding(logits: Tensor, batch: Batch) -> Tensor:
    return batch.mean(F.cross_entropy(logits, batch.y, label_smoothing=0.1, reduction="none"))


class CountsPaddingInContrast(fh.Contrastive):
    """MOON with a plain mean, which shows only for clients that have a last model."""

    def __call__(self, net, params, anchor, batch):  # type: ignore[no-untyped-def]
        logits, z = net.features(params, batch.x)
        _, far = net.features(anchor.previous, batch.x)
        contrast = F.cosine_similarity(z, far.detach(), dim=1).mean()
        return batch.cross_entropy(logits) + anchor.has_previous * contrast


COUNTS = "Own counts the padding of clients with less data; use batch.mean() or batch.loss()"


def test_an_objective_that_counts_padding_is_not_batched(task: fh.Task) -> None:
    assert why_not_batched(task, Own(smooth), CPU) == COUNTS
    found = why_not_batched(task, CountsPaddingInContrast(), CPU)
    assert found == COUNTS.replace("Own", "CountsPaddingInContrast")
    for objective in (fh.CrossEntropy(), fh.Proximal(), fh.Contrastive(), Own(smooth_without_padding)):
        assert why_not_batched(task, objective, CPU) is None


def test_it_is_refused_where_batches_were_asked_for(task: fh.Task) -> None:
    options = {"k": 3, "rounds": 6, "local": LOCAL, "objective": Own(smooth)}
    with pytest.raises(fh.InvalidInput) as raised:
        fh.simulate("fedavg", task, trainer="batched", **options)  # type: ignore[arg-type]
    assert str(raised.value) == f"trainer='batched' cannot train these clients, use 'reference': {COUNTS}."


def test_and_trained_one_by_one_otherwise(task: fh.Task) -> None:
    """On a GPU "auto" is batched where that is possible; the plan looks at the device alone, so it needs none."""
    for objective, expected in ((Own(smooth), "reference"), (Own(smooth_without_padding), "batched")):
        trial = fh.Trial("fedavg", task, k=3, rounds=6, local=LOCAL, objective=objective)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert planned(trial) == expected
        sentence = f"clients are trained one after the other, since they cannot be batched: {COUNTS}."
        assert [str(each.message) for each in seen] == ([sentence] if expected == "reference" else [])


def planned(trial: fh.Trial) -> str:
    """Return the trainer that is chosen on a GPU, whose part the CPU plays."""

    class Pretended:
        type = "cuda"

    with pytest.MonkeyPatch.context() as patch:
        tried = planning.why_not_batched
        patch.setattr(planning, "why_not_batched", lambda task, objective, *_: tried(task, objective, CPU))
        (plan,) = planning.plan([trial], "auto", Pretended())  # type: ignore[arg-type]
    return plan.trainer


def test_corrected_objectives_agree_with_the_reference(task: fh.Task) -> None:
    """Clients differ in size, so that batches hold padding."""
    runs = [
        fh.simulate(
            "fedavg", task, k=3, rounds=6, local=LOCAL, objective=Own(smooth_without_padding), trainer=t, eval_every=2
        )
        for t in ("reference", "batched")
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-5)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.rnn, self.fc = nn.Embedding(7, 4), kind(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(x))
        return self.fc(hidden[:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_models_are_batched(kind: type[nn.RNNBase]) -> None:
    x, y = torch.randint(7, (40, 5), generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    task = fh.Task(lambda: Recurrent(kind), x, y, np.array_split(np.arange(40), 5), x, y)
    reference, batched, threaded = (
        fh.simulate("fedavg", task, trainer=trainer, k=2, rounds=4, local=LOCAL, eval_every=2)
        for trainer in ("reference", "batched", "auto")
    )
    assert batched.loss == pytest.approx(reference.loss, rel=1e-5)
    assert threaded.loss == pytest.approx(reference.loss, rel=1e-4)


class Packed(Recurrent):
    """Reads sequences of one length as if they had several."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = pack_padded_sequence(self.embedding(x), lengths, batch_first=True)
        return self.fc(self.rnn(packed)[1][0][0])


def test_packed_sequences_are_refused_before_the_first_round() -> None:
    x, y = torch.randint(7, (40, 5), generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    task = fh.Task(lambda: Packed(nn.LSTM), x, y, np.array_split(np.arange(40), 5), x, y)
    with pytest.raises(fh.InvalidInput, match="trainer='batched' cannot train these clients, use 'reference': "):
        fh.simulate("fedavg", task, trainer="batched", k=2, rounds=4, local=LOCAL)
    assert fh.simulate("fedavg", task, k=2, rounds=4, local=LOCAL).loss[-1] < 2


def test_the_modes_of_pytorch_are_as_before(task: fh.Task) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
        why_not_batched(task, fh.CrossEntropy(), CPU)
        assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_that_cannot_be_evaluated_in_a_batch_is_refused(make_task: Callable[..., fh.Task]) -> None:
    """Training alone would work: only its evaluation reads a value."""

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits if self.training or logits.sum().item() > -1e9 else 2 * logits

    reason = why_not_batched(make_task(model=lambda: Reads(5, 3)), fh.CrossEntropy(), CPU)
    assert reason is not None and "item()" in reason


def test_errors_of_the_objective_itself_are_not_hidden(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match=r"objective Own must return a scalar tensor, .* got float\."):
        why_not_batched(task, Own(lambda logits, batch: 0.5), CPU)  # type: ignore[arg-type, return-value]


def test_broken_data_are_no_reason(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    task.x[0] = torch.nan
    assert why_not_batched(task, fh.CrossEntropy(), CPU) is None


def test_padding_is_the_clients_own_and_weighs_nothing() -> None:
    index, weight = padded([[np.array([3, 4]), np.array([5])], [np.array([8])]], 3, 2)
    assert index.tolist() == [[[3, 4], [5, 3], [3, 3]], [[8, 8], [8, 8], [8, 8]]]
    assert weight.tolist() == [[[0.5, 0.5], [1, 0], [0, 0]], [[1, 0], [0, 0], [0, 0]]]


def test_a_cpu_plans_no_memory_for_batches(task: fh.Task) -> None:
    objective: Objective = fh.CrossEntropy()
    assert bytes_per_client(task, objective, 8, CPU) == 0


def test_images_in_the_order_of_channels_last() -> None:
    """As NumPy has them, with the channels moved to the front: vmap cannot ask for their order everywhere."""
    x, y = torch.randn(40, 6, 6, 4).permute(0, 3, 1, 2), torch.arange(40) % 2
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 2))
    options = {"k": 2, "rounds": 4, "local": fh.Local(0.1, 2, 8), "trainer": "batched", "device": "cpu"}
    tasks = [fh.Task(model, each, y, np.array_split(np.arange(40), 4), each, y) for each in (x, x.contiguous())]
    runs = [fh.simulate("fedavg", task, **options) for task in tasks]  # type: ignore[arg-type]
    assert runs[0].loss == runs[1].loss

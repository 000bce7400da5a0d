"""Recurrent layers written out against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence

from fedhist.clients.recurrent import WrittenOut

LAYERS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
    (nn.LSTM, {"proj_size": 3, "bias": False, "bidirectional": True}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 3, "bidirectional": True, "bias": False, "batch_first": True}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


def flat(result: Any) -> list[Tensor]:
    """Return the tensors of a layer's output and last states."""
    output, last = result
    return [output, *([last] if isinstance(last, Tensor) else last)]


@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_outputs_last_states_and_gradients_are_those_of_pytorch(kind: type[nn.RNNBase], options: Any) -> None:
    torch.manual_seed(0)
    layer, x = kind(4, 5, dtype=torch.float64, **options), torch.randn(3, 6, 4, dtype=torch.float64)
    sizes = [each.shape for each in flat(layer(x))[1:]]
    first = [torch.randn(size, dtype=torch.float64) for size in sizes]
    for start in ((), ((tuple(first) if len(first) > 1 else first[0]),)):
        found = []
        for mode in (torch.enable_grad(), WrittenOut()):
            with mode:
                result = flat(layer(x, *start))
            loss = sum(each.square().sum() for each in result)
            found.append([*result, *torch.autograd.grad(loss, [*layer.parameters()])])  # type: ignore[arg-type]
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_many_models_at_once_without_a_warning(kind: type[nn.RNNBase], recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, num_layers=2)
    models = {name: torch.randn(3, *each.shape) for name, each in layer.named_parameters()}
    x = torch.randn(3, 6, 2, 4)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, params, (x,))[0].square().sum()  # type: ignore[no-any-return]

    with WrittenOut():
        together = vmap(grad(loss))(models, x)
    assert not recwarn.list
    for i in range(3):
        alone = grad(loss)({name: each[i] for name, each in models.items()}, x[i])
        for name, each in alone.items():
            torch.testing.assert_close(together[name][i], each, rtol=1e-4, atol=1e-5)


def test_one_sequence_and_packed_ones() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(4, 5, batch_first=True)
    alone, packed = torch.randn(6, 4), pack_padded_sequence(torch.randn(2, 6, 4), [6, 3], batch_first=True)
    expected = layer(alone)[0], layer(packed)[0].data
    with WrittenOut():
        found = layer(alone)[0], layer(packed)[0].data
    torch.testing.assert_close(found, expected)

"""Recurrent layers written out, position by position.

PyTorch's own are single functions of cuDNN or oneDNN, which can neither be batched over clients nor be told which
random numbers to drop values by. Written out they are products and sums that can.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedhist.clients import kernels
from fedhist.clients.precision import as_autocast_has_it

State = tuple[Tensor, ...]
"""The hidden state, and of an LSTM its cell's."""
Cell = Callable[[Tensor, Tensor, State], State]
"""From what the input and the last hidden state contribute to all gates, and the last state, to the next."""
Drop = Callable[[Tensor, float], Tensor]


def _lstm(inputs: Tensor, hidden: Tensor, state: State) -> State:
    i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(inputs: Tensor, hidden: Tensor, state: State) -> State:
    (r, z, n), (r_hidden, z_hidden, n_hidden) = inputs.chunk(3, dim=-1), hidden.chunk(3, dim=-1)
    new = torch.tanh(n + torch.sigmoid(r + r_hidden) * n_hidden)
    return (new + torch.sigmoid(z + z_hidden) * (state[0] - new),)


def _tanh(inputs: Tensor, hidden: Tensor, _: State) -> State:
    return (torch.tanh(inputs + hidden),)


def _relu(inputs: Tensor, hidden: Tensor, _: State) -> State:
    return (torch.relu(inputs + hidden),)


_CELLS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
_POSITIONS: dict[Any, Cell] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}
RECURRENT = tuple(_CELLS)
"""The functions that ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call."""


def drops(args: Sequence[Any]) -> bool:
    """Whether a call of one of them drops values between its layers."""
    return not _is_packed(args) and args[5] > 0 and bool(args[6]) and args[4] > 1


def _is_packed(args: Sequence[Any]) -> bool:
    """Whether sequences of different lengths are packed into one, whose positions have fewer and fewer examples."""
    return not isinstance(args[3], bool)


def written_out(function: Any, args: Sequence[Any], drop: Drop = F.dropout) -> tuple[Tensor, ...] | None:
    """Do as one of :data:`RECURRENT` does, and let `drop` drop values; return None for packed sequences."""
    if _is_packed(args):
        return None
    x, states, params, has_biases, layers, p, training, bidirectional, batch_first = args
    first = (states,) if isinstance(states, Tensor) else tuple(states)
    directions = 2 if bidirectional else 1
    count = len(params) // (layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            own = params[place * count : (place + 1) * count]
            state = tuple(each[place] for each in first)
            output, state = _passed(_CELLS[function], x, state, own, has_biases, backwards=direction == 1)
            outputs.append(output)
            last.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
        if training and p > 0 and layer < layers - 1:
            x = drop(x, p)
    ends = (torch.stack(each) for each in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, *ends


def _passed(
    cell: Cell, x: Tensor, state: State, params: Sequence[Tensor], has_biases: bool, *, backwards: bool
) -> tuple[Tensor, State]:
    """Pass over a sequence, ``(positions, batch, width)``; return all hidden states and the last state."""
    w_input, w_hidden, *rest = params
    b_input, b_hidden = rest[:2] if has_biases else (None, None)
    projection = rest[-1] if len(params) % 2 else None  # an LSTM's hidden state may be narrower than its cell's
    together = F.linear(x, w_input, b_input)  # those of all positions in one product
    if cell is _lstm and projection is None and together.is_cuda and kernels.why_not(together.device) is None:
        found = _by_kernels(together.flip(0) if backwards else together, state, w_hidden, b_hidden)
        if found is not None:
            return found[0].flip(0) if backwards else found[0], found[1]
    inputs, outputs = together.unbind(0), []
    for each in reversed(inputs) if backwards else inputs:
        hidden, *others = cell(each, F.linear(state[0], w_hidden, b_hidden), state)
        state = (hidden if projection is None else F.linear(hidden, projection), *others)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _by_kernels(inputs: Tensor, state: State, w: Tensor, b: Tensor | None) -> tuple[Tensor, State] | None:
    """Return all hidden states of an LSTM's layer and its last state, each position by one kernel."""
    from fedhist.clients.kernels.cell import lstm_layer  # noqa: PLC0415

    w, b = as_autocast_has_it(w, b)
    hidden, first = state
    found = lstm_layer(inputs, hidden, first, w, b)
    return None if found is None else (found[0], (found[0][-1], found[1]))


def _position(
    cell: Cell, x: Tensor, state: Any, w_input: Tensor, w_hidden: Tensor, b_input: Any = None, b_hidden: Any = None
) -> Any:
    """Do as a function of one position does, such as that of ``nn.LSTMCell``."""
    before = (state,) if isinstance(state, Tensor) else tuple(state)
    after = cell(F.linear(x, w_input, b_input), F.linear(before[0], w_hidden, b_hidden), before)
    return after if len(after) > 1 else after[0]


class WrittenOut(TorchFunctionMode):
    """Computes recurrent layers position by position, and everything else as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = written_out(func, args) if func in RECURRENT else None
        if func in _POSITIONS and not kwargs:
            result = _position(_POSITIONS[func], *args)
        return func(*args, **(kwargs or {})) if result is None else result

"""The clients' half of a method that keeps a vector on each client and sends vectors along, such as SCAFFOLD."""

from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhist.clients.objectives import Trained, outcome, uses_mail
from fedhist.errors import FedHistError, InvalidInput, positive, reason, require, whole
from fedhist.flower.mail import MAIL, RUN, read_mail, write_mail
from fedhist.flower.replies import ARRAYS
from fedhist.flower.wire import Trainable, Wire, decode, read_model
from fedhist.simulation.methods import as_method
from fedhist.store.arrays import read_arrays, write_arrays
from fedhist.strategies import Strategy
from fedhist.strategies.screening import Rejected

KEPT = "fedhist-kept"
"""The record in a client's context, or the file in its folder, with what it keeps: one array, named by the run."""


class ClientSide:
    """What a client does for a method beside its training: shift gradients, keep a vector, and send one along.

    Parameters
    ----------
    message, context
        What a ClientApp's function is given. The vector is kept in ``context.state``.
    strategy
        The method, as the server has it.
    trainable, arrays
        As in :class:`KAsync` (`arrays` is its `arrayrecord_key`), and the same as there.
    folder
        A folder of this client's own in which to keep the vector instead. Flower forgets a context when the node
        restarts, and when the server is run again from its checkpoint.
    """

    def __init__(
        self,
        message: Message,
        context: Context,
        strategy: str | Strategy,
        *,
        trainable: Trainable = None,
        arrays: str = ARRAYS,
        folder: str | Path | None = None,
    ) -> None:
        method = as_method(strategy)
        self._objective, self._state = method.objective, context.state
        self._file = None if folder is None else Path(folder) / f"{KEPT}.npz"
        require(uses_mail(self._objective), f"clients of {method.name} send nothing along, and need no ClientSide.")
        if MAIL not in message.content.array_records or RUN not in message.content.config_records:
            raise InvalidInput(f"the server has sent nothing along for {method.name}; it runs another method.")
        try:
            state = read_model(message.content, arrays)
            self._wire = Wire(state, trainable)
            self._received, _ = self._wire.split(state)
            self._mail = read_mail(message.content, self._wire.num_params, self._wire.dtype)
        except Rejected as error:
            raise InvalidInput(f"the message cannot be used: {error}.") from None
        self._run = f"run {message.content.config_records[RUN].get('id')!r}"
        kept = self._kept() if self._objective.uses_previous else None
        self._has_previous = float(kept is not None)
        self._previous = self._received if kept is None else kept
        shift = getattr(self._objective, "shift", None)
        flat = None if shift is None else shift(self._mail, self._previous, self._has_previous)
        self.shift: dict[str, Tensor] = {} if flat is None else self._wire.named(flat)
        """What is to be added to the gradient of each parameter, by its name in the state dict."""

    def add_to_gradients(self, model: nn.Module) -> None:
        """Add the shift to a model's gradients; call it between ``loss.backward()`` and ``optimizer.step()``."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name in self.shift:
                shift = self.shift[name].to(parameter)
                parameter.grad = shift.clone() if parameter.grad is None else parameter.grad.add_(shift)

    def finish(self, model: nn.Module, steps: int, lr: float) -> ArrayRecord:
        """Keep what the method wants to be kept of the finished training, and return what :func:`reply` sends along.

        `steps` is how many steps the optimizer has taken, `lr` its learning rate.
        """
        whole("steps", steps, 1)
        positive("lr", lr)
        trained = {name: values.detach().cpu().numpy() for name, values in model.state_dict().items()}
        try:
            local, _ = self._wire.split(trained, finite=False)
        except Rejected as error:
            raise InvalidInput(f"the trained model does not fit the one that was sent: {error}.") from None
        work = Trained(self._received, local, self._previous, self._has_previous, self._mail, steps, lr)
        kept, mail = outcome(self._objective, work)
        require(mail is not None, f"{type(self._objective).__name__}.trained() must return what is sent along.")
        if self._objective.uses_previous and bool(torch.isfinite(kept).all()):  # else the server rejects the upload
            self._keep(kept.detach().cpu().numpy())
        content = RecordDict()
        write_mail(content, mail, first=self._objective.uses_previous and not self._has_previous)  # type: ignore[arg-type]
        return content.array_records[MAIL]

    def _kept(self) -> Tensor | None:
        """Return what this client has kept for this run; None if there is nothing."""
        try:
            if self._file is None:
                stored = self._state.array_records.get(KEPT, ArrayRecord())
                vector = decode(stored[self._run]) if self._run in stored else None
            else:
                vector = read_arrays(self._file).get(self._run) if self._file.exists() else None
        except (OSError, ValueError, Rejected) as error:
            where = "the context" if self._file is None else self._file
            raise FedHistError(f"what was kept in {where} cannot be read: {reason(error)}.") from error
        fits = vector is not None and vector.shape == (self._wire.num_params,)
        return torch.from_numpy(vector.astype(self._wire.dtype)) if fits and vector is not None else None

    def _keep(self, vector: NDArray[np.floating]) -> None:
        """Keep a vector for this run, in place of those of other runs."""
        if self._file is None:
            self._state[KEPT] = ArrayRecord({self._run: Array(vector)})
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(self._file, **{self._run: vector})
        except OSError as error:
            raise FedHistError(f"{self._file} cannot be written: {reason(error)}.") from error

"""What a method's server and clients send along with models and uploads: one vector each way."""

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedhist.clients.objectives import CrossEntropy, Proximal, TaskLoss, uses_mail
from fedhist.errors import InvalidInput, require
from fedhist.flower.wire import decode
from fedhist.simulation.methods import Method
from fedhist.strategies import Strategy
from fedhist.strategies.screening import Rejected

MAIL, VECTOR, FIRST = "fedhist-mail", "vector", "first"
"""The record with what is sent along, its array, and one more that a client adds if it has kept nothing so far."""
RUN = "fedhist-run"
"""The record that says which run a server's mail belongs to: what clients keep for another one is of no use."""
PROXIMAL = "proximal-mu"
"""What Flower's own FedProx calls its option in the configuration that clients are sent."""


def write_mail(content: RecordDict, vector: Tensor, *, first: bool = False) -> None:
    """Put a vector beside a model, in the order of the model's trained entries."""
    arrays = {VECTOR: Array(vector.detach().cpu().numpy())}
    content[MAIL] = ArrayRecord(arrays | ({FIRST: Array(np.ones(1, np.uint8))} if first else {}))


def read_mail(content: RecordDict, size: int, dtype: str) -> Tensor:
    """Return the vector that lies beside a model; reject one that is missing, of another length, or not finite."""
    record = content.array_records.get(MAIL)
    if record is None or VECTOR not in record:
        raise Rejected(f"nothing is sent along: there is no array {VECTOR!r} in an array record {MAIL!r}")
    sent: NDArray[np.generic] = decode(record[VECTOR])
    if sent.shape != (size,) or sent.dtype.kind != "f":
        raise Rejected(f"what is sent along must be {size} floating-point numbers, got {sent.dtype} of {sent.shape}")
    with np.errstate(over="ignore"):  # infinity is rejected below
        vector = torch.from_numpy(sent.astype(dtype))
    if not bool(torch.isfinite(vector).all()):
        raise Rejected("what is sent along holds NaN or infinity")
    return vector


def sent_along(strategy: Strategy, size: int) -> Tensor:
    """Return what a strategy sends along with the model, or raise if there is nothing."""
    mail = getattr(strategy, "mail", None)
    if not isinstance(mail, Tensor) or mail.shape != (size,):
        name = type(strategy).__name__
        raise InvalidInput(f"{name} must have a buffer `mail` of shape ({size},), for its clients use it.")
    return mail


def check_clients_half(method: Method, num_clients: int | None, *, recorded: bool) -> None:
    """Raise if clients on a network could not do their part of a method, or if it would not be covered."""
    name, objective = method.name, method.objective
    needed = any(getattr(each, "needs_num_clients", False) for each in method.strategy.modules())
    fits = num_clients is not None or not needed
    require(fits, f"num_clients must be given for {name}, whose rule depends on it.")
    if uses_mail(objective):
        require(not method.strategy.bounds_uploads, f"Private does not protect what clients of {name} send along.")
        require(not recorded, f"record does not keep what clients of {name} send along.")
    known = isinstance(objective, (TaskLoss, CrossEntropy, Proximal)) or getattr(objective, "is_task_loss", False)
    kept = objective.uses_previous and not uses_mail(objective)
    what = "compare with a model they have kept" if kept else "minimise a loss of their own"
    require(
        known and not kept,
        f"clients of {name} {what}, which a ClientApp is not told to do; simulate it, "
        "or write such a ClientApp and give KAsync the server's strategy alone.",
    )


def config_of(method: Method) -> dict[str, float]:
    """Return what clients are told of a method in their configuration."""
    return {PROXIMAL: float(method.objective.mu)} if isinstance(method.objective, Proximal) else {}

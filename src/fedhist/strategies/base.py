"""What every aggregation rule has in common."""

import copy
import inspect
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fedhist.errors import brief, require, whole
from fedhist.options import RENAMED, arguments, unknown_option
from fedhist.store.table import html_table
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.lengths import in_range

Device = torch.device | str | None


def normalised(weights: Tensor) -> Tensor:
    """Scale weights to sum to one, in float64; weights that are all zero become equal."""
    weights = weights.double()
    total = weights.sum()
    return (weights / total).masked_fill(total == 0, 1 / weights.numel())


class Strategy(nn.Module):
    """How K uploads become one global update `u`; the server then steps `w ← w - η·u`.

    A subclass defines :meth:`weights` for a weighting rule, or :meth:`forward` for anything else. State that outlives
    a round belongs in buffers (``register_buffer`` in :meth:`setup`), so that ``state_dict()`` is a complete
    checkpoint. For a float64 model, float32 buffers are converted after :meth:`setup`.

    Uploads in float16 or bfloat16 reach :meth:`forward` in float32, and the update is float32 then.
    """

    branch_free: ClassVar[bool] = False
    """Whether this class never reads a tensor's values and keeps all its state in buffers, so that its rounds can be
    captured in a CUDA graph. Not inherited: every subclass declares it for itself."""
    averages_uploads: bool = True
    """Whether the update is a mean of the round's uploads, which a robust average can replace."""
    needs_num_clients: bool = False
    """Whether the rule depends on the number of clients N, which a deployment has to be told then."""
    num_clients: int = 0
    k: int = 0
    num_params: int = 0
    last_weights: Tensor | None = None
    """The weight with which each upload of the last round entered the update, for the history."""
    last_seen: Tensor | None = None
    """What may be kept of the last round's uploads, ``(K, P)``, where :attr:`bounds_uploads` holds."""
    mail: Tensor
    """What clients are sent along with the model, ``(P,)``, where their objective has ``uses_mail``; a buffer."""
    run_seed: int | None = None
    """The seed of the simulation; None in a deployment."""
    normalise: bool = True
    """Whether weights are scaled to sum to one; otherwise they are divided by K, and small ones shorten the step."""
    ina: bool = False
    """Whether updates are given the mean length of the uploads by :meth:`restore_length`."""
    lengths: Tensor
    """The sums over all rounds of the update's length before and after INA."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Name the new name of an option that has been renamed."""
        for old in options.keys() & RENAMED.keys() - inspect.signature(cls).parameters.keys():
            raise unknown_option(cls.__name__, old, inspect.signature(cls).parameters)
        return super().__new__(cls)

    def __repr__(self) -> str:
        texts = [
            repr(value) if isinstance(value, Strategy) else f"{name}={' '.join(brief(value).split())}"
            for name, value in arguments(self).items()
        ]
        return f"{type(self).__name__}({', '.join(texts)})"

    def _repr_html_(self) -> str:
        parts = [each for each in self.modules() if isinstance(each, Strategy)]
        rows = [
            [*([type(part).__name__] if len(parts) > 1 else []), name, brief(value)]
            for part in parts
            for name, value in arguments(part).items()
            if not isinstance(value, Strategy)
        ]
        header = ["part", "option", "value"][3 - len(rows[0]) :] if rows else []
        return html_table(header, rows, " in ".join(type(part).__name__ for part in reversed(parts)))

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Clear all state and allocate memory; a subclass that overrides this calls ``super().setup(...)`` first."""
        self.num_clients, self.k = whole("num_clients", num_clients, 1), whole("k", k, 1)
        self.num_params = whole("num_params", num_params, 1)
        require(k <= num_clients, f"k={k} uploads a round need at least as many clients, got {num_clients}.")
        self.last_weights = None
        if self.ina:
            self.register_buffer("lengths", torch.zeros(2, dtype=torch.float64, device=device))
        return self

    def widen(self) -> None:
        """Let float32 buffers hold what a float64 model needs; bfloat16 ones save memory on purpose."""
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float32:
                    setattr(module, name, buffer.double())

    def seeded(self, seed: int) -> Self:
        """Let all random numbers, also those of wrapped strategies, follow from the seed of a simulation."""
        for module in self.modules():
            if isinstance(module, Strategy):
                module.run_seed = seed
        return self

    def epsilon(self) -> float | None:
        """Return the privacy budget spent; None without a guarantee, also for a wrapper that reads uploads itself."""
        return None

    @property
    def bounds_uploads(self) -> bool:
        """Whether whatever is uploaded is bounded before anything is done with it, so that no length need be judged."""
        return False

    def capturable(self) -> bool:
        """Return whether this class itself declares :attr:`branch_free`."""
        return bool(vars(type(self)).get("branch_free", False))

    def __call__(self, arrivals: Arrivals) -> Tensor:
        """Check that the round fits what was set up, and return its global update."""
        name, (k, num_params) = type(self).__name__, arrivals.deltas.shape
        require(self.k > 0, f"{name} has not been set up; call setup(), and super().setup() in an own setup().")
        expected = f"{self.k} uploads of {self.num_params} parameters"
        fits = k <= self.k and num_params == self.num_params
        require(fits, f"{name} was set up for {expected}, got {k} of {num_params}.")
        # Sums need more digits than half precision has, and the model has them.
        deltas = arrivals.deltas.float() if torch.finfo(arrivals.deltas.dtype).bits < 32 else arrivals.deltas
        if arrivals.validate:  # not inside a captured graph
            known, highest = self.num_clients, int(arrivals.clients.max())
            require(highest < known, f"{name} was set up for {known} clients, got client {highest}.")
            deltas = in_range(deltas)  # those of a simulation are screened
            if deltas.dtype == torch.float64:
                self.widen()
        arrivals = replace(arrivals, deltas=deltas, validate=False)
        update: Tensor = super().__call__(arrivals)
        return update

    def trace(self) -> dict[str, Tensor]:
        """Return the vectors that the history keeps at each evaluation, always under the same names.

        Of a vector with an entry for each client, a sample is kept where there are many clients.
        """
        return {"lengths": self.lengths} if self.ina else {}

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return the weight of each upload, ``(K,)``, before normalisation."""
        raise NotImplementedError(f"{type(self).__name__} must define weights() or forward().")

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update `u`, ``(P,)`` (Eq. 4 without the server's learning rate)."""
        return self.combine(self.weights(arrivals), arrivals.deltas)

    def combine(self, weights: Tensor, deltas: Tensor) -> Tensor:
        """Scale `weights` as :attr:`normalise` says, keep them as :attr:`last_weights`, return `Σ p_i g_i` (Eq. 4)."""
        rule, got = f"{type(self).__name__}.weights()", getattr(weights, "shape", type(weights).__name__)
        fits = isinstance(weights, Tensor) and weights.shape == deltas.shape[:1]
        require(fits, f"{rule} must return a tensor of shape ({len(deltas)},), got {got}.")
        if self.normalise and not vars(type(self)).get("branch_free", False):  # otherwise values must not be read
            least = float(weights.detach().min())
            # Their sum may be anything, so that dividing by it may turn every sign or make weights huge.
            why = "a sum of weights cannot be divided by then: use clamp_min(0), or set normalise = False"
            require(not least < 0, f"{rule} returned a negative weight, {least:.3g}; {why}.")
        self.last_weights = normalised(weights) if self.normalise else weights.double() / len(deltas)
        return self.average(self.last_weights, deltas)

    def average(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return `Σ p_i g_i`. A :meth:`forward` that takes its mean with this method can be defended: see `robust`."""
        return weights.to(vectors.dtype) @ vectors

    def average_statistics(self, arrivals: Arrivals) -> Tensor:
        """Return the mean of the clients' running statistics by their examples, ``(S,)``, robust if the average is."""
        assert arrivals.statistics is not None
        return self.average(normalised(arrivals.num_examples), arrivals.statistics)

    @property
    def averages_plainly(self) -> bool:
        """Whether :meth:`average` is the weighted mean and has not been replaced by a robust one."""
        return getattr(self.average, "__func__", None) is Strategy.average

    def restore_length(self, update: Tensor, norms: Tensor) -> Tensor:
        """Give an update the mean length of the uploads (Eq. 15); a zero update stays zero."""
        if self.averages_plainly:
            length = norms.mean()
        else:  # a single long upload must not set the length either
            length = self.average(torch.full_like(norms, 1 / len(norms)), norms[:, None])[0]
        norm = update.norm()
        scale: Tensor = (length / norm).masked_fill(norm == 0, 0.0)
        self.lengths += torch.stack([norm, norm * scale])
        return update * scale


class Wrapper(Strategy):
    """A strategy around another one, which it copies: the caller may also use that one by itself."""

    title: ClassVar[str] = ""
    """Its name as part of a method's name, such as ``FedHist + median``; the class's name if it has none."""
    inner: Strategy

    def __init__(self, inner: Strategy) -> None:
        super().__init__()
        require(isinstance(inner, Strategy), f"inner must be a fedhist.Strategy, got {brief(inner)}.")
        self.inner = copy.deepcopy(inner)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Set up this strategy and the inner one."""
        super().setup(num_clients, k, num_params, device)
        self.inner.setup(num_clients, k, num_params, device)
        return self

    @property
    def mail(self) -> Tensor:  # type: ignore[override]
        """What the inner strategy sends along with the model."""
        return self.inner.mail

    @property
    def bounds_uploads(self) -> bool:
        """Whether the inner strategy bounds uploads."""
        return self.inner.bounds_uploads

    def average_statistics(self, arrivals: Arrivals) -> Tensor:
        """Return what the inner strategy makes of them."""
        return self.inner.average_statistics(arrivals)

    def capturable(self) -> bool:
        """Return whether this class and the inner strategy are both free of branches."""
        return super().capturable() and self.inner.capturable()

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the update of the inner strategy, and keep its weights."""
        update = self.inner(arrivals)
        self.last_weights, self.last_seen = self.inner.last_weights, self.inner.last_seen
        return update

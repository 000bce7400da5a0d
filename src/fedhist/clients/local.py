"""The work a client does between receiving a model and uploading its change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedhist.clients.schedules import Schedule, as_schedule
from fedhist.errors import InvalidInput, brief, choice, flag, number, positive, rate, require, unknown, whole
from fedhist.options import documented, option, parse_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PANEL = "Local work"
MOST_STEPS = 1_000_000
"""The most steps or epochs: a larger number is taken for a mistake, since the run would never end."""
LEAST_RATE = 1e-30
"""A schedule may go down to this: methods divide by the rate."""
LOOP = (
    "A function that trains in its own way, called as loop(module, batches, received=…, client=…): it changes the "
    "module, and the batches follow from the options here."
)
KNOWN = ("sgd", "adam", "adamw")
"""Optimizers that all trainers have; any other is PyTorch's own, by the name of its class."""
PRECISIONS = ("float32", "tf32", "bfloat16")


@documented
@dataclass(frozen=True)
class Local:
    """Local training on minibatches, for a number of steps or of epochs.

    The last batch of a pass over a client's data may be smaller. Optimizers are those of ``torch.optim``, and begin
    anew with every upload. `lr` may be a list with the rate of each client, and `schedule` a function from the round to
    a factor; `loop` is a function that trains in its own way.
    """

    lr: float | Sequence[float] = option(
        0.01, "The clients' learning rate.", PANEL, default_text="what suits the data set"
    )
    steps: int = option(1, "Minibatch steps per upload.", PANEL, name="local_steps")
    batch_size: int = option(32, "Examples per minibatch.", PANEL)
    epochs: int | None = option(None, "Passes over a client's data per upload, instead of steps.", PANEL)
    momentum: float = option(0.0, "Momentum of local SGD.", PANEL)
    weight_decay: float = option(0.0, "Weight decay of the optimizer.", PANEL)
    optimizer: str = option(
        "sgd",
        "sgd, adam, adamw or any class of torch.optim, with options as in adamw:betas=[0.9,0.95].",
        PANEL,
    )
    nesterov: bool = option(False, "Nesterov's momentum.", PANEL)
    clip_norm: float | None = option(None, "Largest norm of a minibatch's gradient; longer ones are scaled.", PANEL)
    schedule: str | Callable[[int], float] = option(
        "constant",
        "How the learning rate follows the round: constant, cosine or step, with options as in "
        "step:every=100,by=0.1 or cosine:warmup=20.",
        PANEL,
        name="lr_schedule",
    )
    precision: str = option(
        "float32",
        "What training computes in: float32, bfloat16, or tf32 on a GPU. Models, uploads and evaluations stay float32.",
        PANEL,
    )
    loop: Callable[..., Any] | None = field(default=None, metadata={"help": LOOP})

    def __post_init__(self) -> None:
        self._check_rates()
        whole("batch_size", self.batch_size, 1)
        for name in ("steps", "epochs"):
            if (value := getattr(self, name)) is not None or name == "steps":
                require(whole(name, value, 1) <= MOST_STEPS, f"{name} must be at most {MOST_STEPS:,}, got {value}.")
        if number("weight_decay", self.weight_decay, 0) > 0:
            rate("weight_decay", self.weight_decay)
        require(0 <= number("momentum", self.momentum) < 1, f"momentum must lie in [0, 1), got {self.momentum}.")
        if self.clip_norm is not None:
            positive("clip_norm", self.clip_norm)
        fits = not flag("nesterov", self.nesterov) or self.momentum > 0
        require(fits, "nesterov needs a momentum above 0.")
        require(isinstance(self.optimizer, str), f"optimizer must be a name, got {brief(self.optimizer)}.")
        name, options = self.parsed
        if name != "sgd":
            require(self.momentum == 0, f"momentum is an option of sgd, not of {name}.")
        if name not in KNOWN:
            self._check_own(name)
        else:
            known = {"sgd": (), "adam": ("betas", "eps"), "adamw": ("betas", "eps")}[name]
            for key in options:
                if key not in known:
                    raise unknown(f"option of {name}", key, known)
            _check_moments(name, options)
        choice("precision", self.precision, PRECISIONS)
        self.factors  # noqa: B018 (raises if the schedule is not one)
        require(self.loop is None or callable(self.loop), f"loop must be a function, got {brief(self.loop)}.")
        for each in fields(self) if self.loop is not None else ():
            own = each.name not in ("lr", "steps", "batch_size", "epochs", "loop")
            fits = not own or getattr(self, each.name) == each.default
            require(fits, f"a loop trains in its own way; leave {each.name} out.")

    def _check_rates(self) -> None:
        given: Any = self.lr
        if (isinstance(given, Sequence) and not isinstance(given, str)) or getattr(given, "ndim", 0) == 1:
            given = given.tolist() if hasattr(given, "tolist") else given
            object.__setattr__(self, "lr", tuple(rate("lr", each) for each in given))
            require(len(given) > 0, "lr must name a rate for each client.")
        elif type(given) not in (int, float):  # a number of NumPy's becomes one of Python's
            object.__setattr__(self, "lr", rate("lr", given))
        else:
            rate("lr", given)

    @staticmethod
    def _check_own(name: str) -> None:
        from torch import optim  # noqa: PLC0415 (heavy)

        known = {each.lower() for each, kind in vars(optim).items() if isinstance(kind, type)} - {"optimizer"}
        if name not in known:
            raise unknown("optimizer", name, known)
        fits = name not in ("lbfgs", "sparseadam")
        require(fits, f"optimizer={name!r} needs more than a gradient; write a loop of your own with it.")

    @cached_property
    def parsed(self) -> tuple[str, dict[str, Any]]:
        """The optimizer's name and its options."""
        name, _, text = self.optimizer.partition(":")
        return name.strip().lower(), parse_options("optimizer", self.optimizer, text)

    @cached_property
    def factors(self) -> Schedule:
        """The schedule as a function of the round and the number of rounds."""
        return as_schedule(self.schedule)

    def rate(self, client: int, version: int, rounds: int) -> float:
        """Return the learning rate of a client that was sent a version, in a run of so many rounds."""
        own = self.lr[client] if isinstance(self.lr, tuple) else self.lr
        return max(float(own) * self.factors(version, rounds), LEAST_RATE)  # type: ignore[arg-type]

    @property
    def one_rate(self) -> bool:
        """Whether all clients have the same learning rate in all rounds."""
        return not isinstance(self.lr, tuple) and self.schedule == "constant"

    def steps_for(self, num_examples: int) -> int:
        """Return how many minibatches a client with this many examples processes per upload."""
        return self.epochs * -(-num_examples // self.batch_size) if self.epochs else self.steps

    def examples(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many examples clients with so many process per upload, each as often as it is used."""
        per_pass = -(-sizes // self.batch_size)
        steps = self.epochs * per_pass if self.epochs else self.steps
        passes, rest = steps // per_pass, steps % per_pass
        processed: NDArray[np.int64] = passes * sizes + (rest * self.batch_size).clip(max=sizes)
        return processed

    def single(self, sizes: Sequence[int]) -> int | None:
        """Return the first of some clients, given by how many examples they hold, that has a minibatch of one."""
        for i, size in enumerate(sizes):
            per_pass = -(-size // self.batch_size)
            if self.batch_size == 1 or (size % self.batch_size == 1 and self.steps_for(size) >= per_pass):
                return i
        return None

    def batches(self, examples: NDArray[np.int64], rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """Shuffle a client's examples and cut them into minibatches, again and again as needed."""
        wanted = self.steps_for(len(examples))
        plan: list[NDArray[np.int64]] = []
        while len(plan) < wanted:
            shuffled = examples[rng.permutation(len(examples))]
            starts = range(0, len(examples), self.batch_size)[: wanted - len(plan)]
            plan += [shuffled[start : start + self.batch_size] for start in starts]
        return plan


LocalSGD = Local
"""Local SGD, by the name it had before there were other optimizers."""


def as_local(given: Local | Callable[..., Any] | None, lr: float | None) -> Local:
    """Return the local work that is meant: a function is a loop that passes over a client's data once."""
    if given is None:
        return Local() if lr is None else Local(lr=lr)
    if isinstance(given, Local):
        return given
    if not callable(given) or isinstance(given, type):
        raise InvalidInput(f"local must be a fedhist.Local or a function that trains a module, got {brief(given)}.")
    return Local(loop=given, epochs=1)


def _check_moments(name: str, options: dict[str, Any]) -> None:
    betas = options.get("betas", (0.9, 0.999))
    fits = isinstance(betas, (list, tuple)) and len(betas) == 2
    require(fits, f"betas of {name} must be two numbers, got {brief(betas)}.")
    for beta in betas:
        require(0 <= number("betas", beta) < 1, f"betas of {name} must lie in [0, 1), got {beta}.")
    positive("eps", options.get("eps", 1e-8))

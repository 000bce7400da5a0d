"""A learning problem: a model, its data, what is minimised and measured, and who holds which part of the data."""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedhist.data.columns import (
    Columns,
    applied,
    as_columns,
    as_tensor,
    length,
    mapped,
    rows,
    tensors_of,
)
from fedhist.data.examples import DRAWING, Items, TestSet, all_of, is_dataset
from fedhist.data.holdings import Clients, held_out, joined
from fedhist.data.layout import Layout
from fedhist.data.losses import LOSSES, Loss, as_loss, check_loss, name_of
from fedhist.data.metrics import Metric, as_metrics
from fedhist.data.models import model_for
from fedhist.data.overview import overview
from fedhist.data.probing import check_labels, try_model
from fedhist.errors import InvalidInput, rate, reason, require, unknown
from fedhist.store.arrays import checksum
from fedhist.store.history import LOSS
from fedhist.streams import Stream

USUAL = {"cross-entropy": ["accuracy"], "bce": ["accuracy"], "mse": ["rmse"], "huber": ["rmse"]}
"""The metrics of a task that names none, by its loss."""


class Task:
    """A model, training and test data, and the part of the training data that each client holds.

    Parameters
    ----------
    model
        An ``nn.Module`` that maps a batch of `x` to outputs, such as one logit per class. Runs start from the weights
        it carries. A function without arguments that builds such a module is called once per run instead, with torch's
        generator seeded from the run's seed. A name, such as "mlp" or "lenet", is that of a model of :func:`load_task`.
    x, y
        Training inputs and targets, one row for each example: tensors, NumPy arrays or pandas objects; `x` may also
        be a tuple or a dict of them, which the model takes as several arguments. Or `x` is a map-style ``Dataset``, or
        a list with one for each client, whose examples are pairs, or dicts in which `y` names the target.
    clients
        For each client, the indices of its examples: a list of lists or arrays, or one array ``(N, n)`` of
        integers where every client holds n. Not needed with a data set for each client.
    x_test, y_test
        Test data, in the same form. Both may be dicts of several named sets; the first of them is the main one, and
        metrics of the others are called ``"set/metric"``.
    name
        What reports call it.
    lr
        The clients' learning rate in runs without `local`.
    loss
        "cross-entropy" (of labels, or of sequences of them, where -100 does not count), "bce", "mse", "huber", or a
        function of outputs and targets that returns one value an example.
    metrics
        A name (accuracy, top-5, perplexity, mae, mse, rmse, f1, auc), a function of all outputs and targets or a
        torchmetrics object, a list of them, or a dict that gives them names. A function for which less is better has
        an attribute ``higher_is_better = False``.
    primary
        The metric by which runs are compared; the first by default, or "loss" where there is none.
    client_test
        For each client, the indices of its examples in the test data; or a share of each client's own examples, which
        are held out of its training. Metrics are then also kept client by client.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str,
        x: Any,
        y: Any = None,
        clients: Clients | None = None,
        x_test: Any = None,
        y_test: Any = None,
        name: str = "custom",
        lr: float | None = None,
        *,
        loss: str | Loss = "cross-entropy",
        metrics: Any = None,
        primary: str | None = None,
        client_test: float | Clients | None = None,
    ) -> None:
        self.about: dict[str, Any] = dict(getattr(clients, "about", {}))
        """How the data were divided, where that is known: runs that differ here are different experiments."""
        if isinstance(model, str):
            self.about["model"] = model
            model = model_for(model, x, y, loss)
        fits = isinstance(model, nn.Module) or callable(model)
        require(fits, f"model must be an nn.Module, a function that builds one or a name, got {type(model).__name__}.")
        self.name, self.model = name, model
        self.lr = None if lr is None else rate("lr", lr)
        probe = self.build(seed=0)
        self.layout = Layout(probe)
        self.x, self.y = self._training_data(x, y)
        self.is_mapped = any(isinstance(each, np.memmap) for each in _parts(x))
        """Whether inputs lie on disk, and are read as they are needed."""
        if clients is None and isinstance(self.x, Items) and len(self.x.datasets) > 1:
            clients = [np.arange(*ends) for ends in zip(self.x.starts, self.x.starts[1:], strict=False)]
        require(clients is not None, "clients must say which examples each client holds.")
        self.examples, self.offsets = joined(clients, self.num_examples)  # type: ignore[arg-type]
        self.num_clients = len(self.offsets) - 1
        """The number of clients N."""
        self.tests = self._test_data(x_test, y_test, target=y if isinstance(y, str) else None)
        """Test sets by name, the main one first."""
        self._copies: dict[tuple[Tensor, torch.device], Tensor] = {}
        self._relabelled: list[Self] = []

        self.loss, self.loss_name = as_loss(loss), name_of(loss)
        self.num_classes = 0
        """How many classes there are, where each example has a label; else 0."""
        outputs = self._probed(probe)
        usual = USUAL.get(self.loss_name, []) if isinstance(loss, str) else []
        self.metrics: list[Metric] = as_metrics(usual if metrics is None else metrics)
        known = [each.name for each in self.metrics]
        self.primary = primary or (known[0] if known else LOSS)
        if self.primary not in (*known, LOSS):
            raise unknown("primary metric", self.primary, [*known, LOSS])
        for each in self.metrics:
            self._try_metric(each, outputs)
        self.client_test = None if client_test is None else self._client_test(client_test)
        """Every client's own test examples, where they are told apart."""
        self.seed_matters = not isinstance(model, nn.Module) and self._differs_by_seed(probe)

    def _training_data(self, x: Any, y: Any) -> tuple[Columns | Items, Tensor | None]:
        datasets = [x] if is_dataset(x) else list(x) if _are_datasets(x) else None
        if datasets is None:
            return self._tensors("", x, y)
        fits = y is None or isinstance(y, str)
        require(fits, "y of a Dataset must be None, or the name of the target in its examples.")
        items = Items(datasets, y)
        require(len(items) > 0, "x holds no examples.")
        if (found := items.tensors()) is not None:
            return self._tensors("", *found)
        return items, items.labels()

    def _tensors(self, suffix: str, x: Any, y: Any) -> tuple[Columns, Tensor]:
        """Return inputs and targets as tensors; what came without a type of its own gets the model's."""
        require(y is not None, f"y{suffix} must hold a target for each row of x{suffix}.")
        require(not isinstance(y, (dict, tuple)), f"y{suffix} must be one tensor or array, got {type(y).__name__}.")
        columns, targets = as_columns(f"x{suffix}", x), as_tensor(f"y{suffix}", y)
        if not any(isinstance(each, Tensor) for each in _parts(x)):
            columns = mapped(columns, self._in_models_type)
        targets = self._in_models_type(targets)
        fits = length(columns) == len(targets) > 0
        rows = f"{length(columns)} rows of x{suffix}, got shape {tuple(targets.shape)}"
        require(fits, f"y{suffix} must hold one target for each of the {rows}.")
        whole = not targets.is_floating_point() and targets.dtype != torch.bool
        return columns, targets.long() if whole else targets

    def _in_models_type(self, values: Tensor) -> Tensor:
        return values.to(self.layout.dtype) if values.dtype == torch.float64 else values

    def _test_data(self, x: Any, y: Any, target: str | None) -> dict[str, TestSet]:
        require(x is not None, "x_test must hold examples to test on.")
        several = isinstance(y, Mapping) or (isinstance(x, Mapping) and all(map(is_dataset, x.values())))
        if not several:
            given = {"": (x, y)}
        else:
            fits = isinstance(x, Mapping) and (y is None or (isinstance(y, Mapping) and x.keys() == y.keys()))
            require(fits and len(x) > 0, "x_test and y_test must be dicts with the same names, one for each test set.")
            given = {str(name): (each, None if y is None else y[name]) for name, each in x.items()}
        tests = {}
        for name, (inputs, targets) in given.items():
            require("/" not in name and len(name) <= 100, f"a test set cannot be called {name!r}.")
            if is_dataset(inputs):
                own = targets if isinstance(targets, str) else target
                inputs, targets = all_of("x_test", inputs, own)  # noqa: PLW2901
            tests[name] = TestSet(*self._tensors("_test", inputs, targets))
        return tests

    @property
    def test(self) -> TestSet:
        """The main test set."""
        return next(iter(self.tests.values()))

    @property
    def x_test(self) -> Columns:
        """The inputs of the main test set."""
        return self.test.x

    @property
    def y_test(self) -> Tensor:
        """The targets of the main test set."""
        return self.test.y

    @property
    def num_examples(self) -> int:
        """The number of training examples, all clients' together."""
        return len(self.x) if isinstance(self.x, Items) else length(self.x)

    def _probed(self, probe: nn.Module) -> Tensor:
        """Try the model and the loss on two examples; find out what training changes besides parameters."""
        x, y = self.first(2)
        outputs, self.is_random, changed = try_model(probe.train(), x, "x")
        self.layout = Layout(probe, changed)
        if self.loss is LOSSES["cross-entropy"]:
            every = {"y": y if self.y is None else self.y}
            every |= {f"y_test{name and f'[{name!r}]'}": test.y for name, test in self.tests.items()}
            check_labels(type(probe).__name__, outputs, y, every)
            self.num_classes = int(outputs.shape[1]) if y.ndim == 1 else 0
        if self.loss is LOSSES["bce"]:
            for label, targets in (
                ("y", y if self.y is None else self.y),
                *((f"y_test{n}", t.y) for n, t in self.tests.items()),
            ):
                fits = bool(((targets >= 0) & (targets <= 1)).all())
                require(fits, f"{label} must lie between 0 and 1 for loss='bce'.")
        losses = check_loss(self.loss, self.loss_name, outputs, y)
        for test in self.tests.values():
            tried, _, _ = try_model(probe.eval(), rows(test.x, slice(2)), "x_test")
            check_loss(self.loss, self.loss_name, tried, test.y[:2])
        require(not bool(torch.isinf(losses).any()), f"loss {self.loss_name} is infinite on the first examples.")
        return outputs

    def _try_metric(self, metric: Metric, outputs: Tensor) -> None:
        """Raise unless a metric can be computed; one of all outputs may need more examples than two."""
        if metric.rows is None:
            return
        try:
            with torch.no_grad():
                metric.rows(outputs.detach(), self.first(2)[1])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InvalidInput(f"metric {metric.name} does not fit the outputs: {reason(error)}.") from error

    def first(self, count: int) -> tuple[Columns, Tensor]:
        """Return the first training examples."""
        if isinstance(self.x, Items):
            return self.x.fetch(range(min(count, len(self.x))), seed=0)
        assert self.y is not None
        return rows(self.x, slice(count)), self.y[:count]

    def _client_test(self, given: float | Clients) -> TestSet:
        """Return every client's own test examples; a share of its data is taken out of its training."""
        if isinstance(given, (int, float)):
            require(0 < given < 1, f"client_test must be a share between 0 and 1, got {given!r}.")
            require(
                not isinstance(self.x, Items), "client_test as a share needs examples in memory; give lists instead."
            )
            examples, self.examples, self.offsets, owner = held_out(
                [self.client(i) for i in range(self.num_clients)], float(given)
            )
            assert not isinstance(self.x, Items) and self.y is not None
            x, y = self.x, self.y
        else:
            examples, offsets = joined(given, len(self.test), "client_test")
            fits = len(offsets) - 1 == self.num_clients
            require(fits, f"client_test must have a list for each of the {self.num_clients} clients.")
            owner, x, y = np.repeat(np.arange(self.num_clients), np.diff(offsets)), self.test.x, self.test.y
        index = torch.from_numpy(examples)
        return TestSet(rows(x, index), y[index], torch.from_numpy(owner), self.num_clients)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many examples each client holds, ``(N,)``."""
        return np.diff(self.offsets)

    def client(self, i: int) -> NDArray[np.int64]:
        """Return the indices of one client's examples."""
        return self.examples[self.offsets[i] : self.offsets[i + 1]]

    def build(self, seed: int) -> nn.Module:
        """Return a fresh model with the weights that a run with this seed starts from."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        with DRAWING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(Stream(seed, "init").integer())
            try:
                module = self.model()
            except TypeError as error:
                name = getattr(self.model, "__name__", type(self.model).__name__)
                raise InvalidInput(
                    f"model={name} cannot be built without arguments ({reason(error)}); give a module, such as "
                    f"{name}(…), or a function without arguments that builds one."
                ) from error
        if not isinstance(module, nn.Module):
            raise InvalidInput(f"model() must return an nn.Module, got {type(module).__name__}.")
        return copy.deepcopy(module)  # the function may return the same module every time

    def _differs_by_seed(self, probe: nn.Module) -> bool:
        """Whether models of two seeds differ in more than their trainable parameters, such as in frozen layers."""
        other, x = self.build(seed=1), rows(self.test.x, slice(2))
        self.layout.load(other, self.layout.flatten(probe))
        with torch.no_grad():
            return not torch.equal(applied(probe.eval(), x), applied(other.eval(), x))

    @property
    def data(self) -> tuple[int, ...]:
        """The identity of data, loss and metrics: tasks of several seeds often differ only in the split."""
        x = (id(self.x),) if isinstance(self.x, Items) else tuple(map(id, tensors_of(self.x)))
        tests = [id(t) for test in self.tests.values() for t in (*tensors_of(test.x), test.y)]
        metrics = [each for metric in self.metrics for each in (hash(metric.name), id(metric.whole or metric.rows))]
        return *x, id(self.y), *tests, id(self.loss), *metrics

    @cached_property
    def checksum(self) -> str:
        """A checksum of targets, clients and a sample of the inputs, since hashing all of them takes a second."""
        x, y = self.first(10) if isinstance(self.x, Items) else (self.x, self.y)
        assert y is not None
        inputs = [*tensors_of(x), *(t for test in self.tests.values() for t in tensors_of(test.x))]
        samples = [t.reshape(-1)[:: max(1, t.numel() // 100_000)] for t in inputs]
        targets = [y, *(test.y for test in self.tests.values())]
        arrays = [t.cpu().contiguous().view(torch.uint8).numpy() for t in (*samples, *targets)]
        return checksum(*arrays, self.examples, self.offsets)

    def bytes_for(self, device: torch.device) -> int:
        """Return the memory that copying the data to a device will take."""
        if device.type == "cpu" or isinstance(self.x, Items):
            return 0
        new = [t for t in (*tensors_of(self.x), self.y) if t is not None and (t, device) not in self._copies]
        tests = [*self.tests.values(), *([] if self.client_test is None else [self.client_test])]
        return sum(tensor.nbytes for tensor in new) + sum(test.bytes_for(device) for test in tests)

    def on(self, device: torch.device) -> tuple[Columns, Tensor]:
        """Return the training data on a device, copied there once."""
        assert not isinstance(self.x, Items) and self.y is not None

        def copied(tensor: Tensor) -> Tensor:
            if (tensor, device) not in self._copies:
                self._copies[tensor, device] = tensor.to(device)
            return self._copies[tensor, device]

        return mapped(self.x, copied), copied(self.y)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copies": {}, "_relabelled": []}  # another machine has other devices

    def relabelled(self, y: Tensor) -> Self:
        """Return this task with other training labels; the inputs and their copies on devices are shared.

        The same labels give the same task, so that runs with it can train side by side.
        """
        for known in self._relabelled:
            if torch.equal(known.y, y):  # type: ignore[arg-type]
                return known
        task = copy.copy(self)
        task.__dict__.pop("checksum", None)
        task.y, task._copies = y, self._copies
        self._relabelled.append(task)
        return task

    def label_counts(self, clients: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return how many examples of each class the given clients hold, or all clients: ``(clients, classes)``."""
        require(self.has_labels, f"the examples of {self.name} have no labels that could be counted.")
        assert self.y is not None
        ids = np.arange(self.num_clients) if clients is None else np.asarray(clients)
        examples = self.examples if clients is None else np.concatenate([self.client(i) for i in ids.tolist()])
        owner = np.repeat(np.arange(len(ids)), self.sizes[ids])
        flat = owner * self.num_classes + self.y.cpu().numpy()[examples]
        return np.bincount(flat, minlength=len(ids) * self.num_classes).reshape(-1, self.num_classes)

    @cached_property
    def needs_two(self) -> bool:
        """Whether the model cannot train on a minibatch of one example, as with batch normalisation."""
        try:
            applied(self.build(seed=0).train(), self.first(1)[0])
        except ValueError:
            return True
        return False

    @property
    def has_labels(self) -> bool:
        """Whether the class of every training example is known."""
        return self.num_classes > 0 and self.y is not None

    def _repr_html_(self) -> str:
        return overview(self)

    def __repr__(self) -> str:
        classes = f"classes={self.num_classes}, " if self.num_classes else f"loss={self.loss_name!r}, "
        return (
            f"Task({self.name!r}, clients={self.num_clients}, examples={len(self.examples)}, {classes}"
            f"parameters={self.layout.size})"
        )


def _parts(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else list(x.values()) if isinstance(x, Mapping) else [x]


def _are_datasets(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) > 0 and all(map(is_dataset, given))

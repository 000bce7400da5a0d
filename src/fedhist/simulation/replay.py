"""The recorded uploads of a run, aggregated by another strategy: a what-if about aggregation, not a simulation."""

import csv
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedhist.clients.objectives import TaskLoss
from fedhist.clients.threaded import in_threads
from fedhist.errors import FedHistError, reason, require
from fedhist.simulation.methods import Method
from fedhist.simulation.server import Server
from fedhist.simulation.server_options import ServerOptions
from fedhist.simulation.sources.tape import RecordedUploads
from fedhist.store.files import whole_file
from fedhist.store.history import History
from fedhist.store.measure import counted
from fedhist.store.recording import Recording
from fedhist.strategies import FedAvg, Strategy
from fedhist.strategies.screening import norm_of

Floats = NDArray[np.float64]

WHAT_IT_IS = (
    "The uploads were computed from the models of the recorded run. So this shows how aggregation differs, not how "
    "well another method would have learned: for that, simulate it."
)


@dataclass(frozen=True, eq=False, repr=False)
class Replay:
    """What another strategy makes of recorded uploads, beside what the recorded one made of them."""

    method: str
    recorded: str
    """The method of the recorded run."""
    staleness: NDArray[np.int64]
    """``(rounds, K)``."""
    weights: Floats
    """``(rounds, K)``: the weight that each upload is given; NaN for a strategy that does not say."""
    recorded_weights: Floats
    cosine: Floats
    """``(rounds,)``: between the two updates of each round; NaN where one of them is zero."""
    norm: Floats
    """``(rounds,)``: the length of the update."""
    recorded_norm: Floats
    distance: Floats
    """``(rounds,)``: between the two models after each round."""
    travelled: float
    """How far the model ends from where it started."""
    recorded_travelled: float

    def __repr__(self) -> str:
        rounds, k = self.weights.shape
        known = self.cosine[np.isfinite(self.cosine)]
        alike = f", mean cosine of the updates {known.mean():.3f}" if len(known) else ""
        what = f"{self.method} on the uploads of {self.recorded}"
        return f"<Replay of {what}: {counted(rounds, 'round')} of K = {k}{alike}, models {self.distance[-1]:.3g} apart>"

    @property
    def weight_distance(self) -> Floats:
        """Total variation distance between the weights of each round, ``(rounds,)``: 0 is the same, 1 is disjoint."""
        return np.asarray(np.abs(self.weights - self.recorded_weights).sum(axis=1) / 2)

    @property
    def weight_correlation(self) -> float:
        """Pearson's correlation of the weights of all uploads; NaN where it is not defined."""
        pair = self.weights.ravel(), self.recorded_weights.ravel()
        if not all(np.isfinite(each).all() and np.ptp(each) > 1e-6 for each in pair):
            return math.nan
        return float(np.corrcoef(*pair)[0, 1])

    def by_staleness(self) -> list[dict[str, Any]]:
        """Return the mean weights of uploads by their staleness, in groups that double: 1, 2, 3-4, 5-8 and so on."""
        group = np.ceil(np.log2(self.staleness)).astype(np.int64)
        return [
            {
                "from": 2 ** (each - 1) + 1 if each else 1,
                "to": 2**each,
                "uploads": int((group == each).sum()),
                "weight": _known(self.weights[group == each].mean()),
                "recorded_weight": _known(self.recorded_weights[group == each].mean()),
            }
            for each in np.unique(group).tolist()
        ]

    def summary(self) -> dict[str, Any]:
        """Return the figures that describe the replay as a whole; None where there is none."""
        known = self.cosine[np.isfinite(self.cosine)]
        figures = {
            "weight_distance": self.weight_distance.mean(),
            "weight_correlation": self.weight_correlation,
            "cosine": known.mean() if len(known) else math.nan,
            "lowest_cosine": known.min(initial=math.inf),
            "norm": self.norm.mean(),
            "recorded_norm": self.recorded_norm.mean(),
            "final_distance": self.distance[-1],
            "travelled": self.travelled,
            "recorded_travelled": self.recorded_travelled,
        }
        rounds, k = self.weights.shape
        about = {"method": self.method, "recorded": self.recorded, "rounds": rounds, "k": k}
        return {**about, **{n: _known(v) for n, v in figures.items()}, "by_staleness": self.by_staleness()}

    def save(self, folder: str | Path) -> Path:
        """Write `replay.json` and `rounds.csv` into a folder."""
        folder = Path(folder)
        columns = {
            "cosine": self.cosine,
            "norm": self.norm,
            "recorded_norm": self.recorded_norm,
            "weight_distance": self.weight_distance,
            "model_distance": self.distance,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(folder / "replay.json") as part:
                part.write_text(json.dumps(self.summary(), indent=2, allow_nan=False) + "\n")
            with whole_file(folder / "rounds.csv") as part, part.open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["round", *columns])
                for round_, row in enumerate(zip(*columns.values(), strict=True), start=1):
                    table.writerow([round_, *("" if math.isnan(value) else f"{value:.9g}" for value in row)])
        except OSError as error:
            raise FedHistError(f"{folder} cannot be written: {reason(error)}.") from error
        return folder


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def replay(
    recording: Recording | str | Path,
    strategy: Strategy | str | Method,
    *,
    on_round: Callable[[], object] | None = None,
) -> Replay:
    """Let a strategy aggregate the uploads of a recorded run, round by round, without any training.

    Parameters
    ----------
    recording
        The folder of a run that was recorded (``record=``, ``fedhist run --record``).
    strategy
        A strategy, or a name such as "refl". The object is copied, not changed.
    on_round
        Called after every round.
    """
    tape = recording if isinstance(recording, Recording) else Recording(recording)
    about, history = tape.about, tape.history
    options = ServerOptions(strategy, k=about.k, server_lr=about.server_lr)
    name = options.method.name
    fits = isinstance(options.method.objective, TaskLoss)
    also = "; on the server it is FedAvg" if type(options.method.strategy) is FedAvg else ""
    require(fits, f"{name} differs in what clients train, which a replay does not do{also}.")
    empty = History.begun(name, about.seed, history.task, about.k)
    server = Server(options, tape.start.clone(), about.num_clients, about.rounds, empty, seed=about.seed)
    source, start = RecordedUploads(tape, server), tape.start.double()
    rows = np.full((4, about.rounds), np.nan)
    # The last bits of products may depend on the number of threads, and beside such trainers a server has one.
    alone = (history.trained_by or "").startswith(("native", "threaded"))
    with torch.no_grad(), in_threads(1) if alone else nullcontext():
        for row in rows.T:
            for _, arrivals in source.next():
                update, reference = server.close(arrivals).double(), tape.update(server.round + 1)
            norms = norm_of(update), norm_of(reference.double())
            if not math.isfinite(math.prod(norms)):
                raise FedHistError(f"{name} makes no finite update of the uploads recorded in round {server.round}.")
            cosine = float(update @ reference.double()) / math.prod(norms) if math.prod(norms) > 0 else math.nan
            row[:] = np.clip(cosine, -1, 1), *norms, norm_of(server.model.double() - source.recorded.double())
            if on_round:
                on_round()
    weights, recorded_weights = (each.weights.astype(np.float64) for each in (empty, history))
    travelled = (norm_of(model.double() - start) for model in (server.model, source.recorded))
    return Replay(name, about.method, history.staleness, weights, recorded_weights, *rows, *travelled)

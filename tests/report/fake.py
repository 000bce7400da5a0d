"""Runs that were never simulated: what is written looks like a run, and takes milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedhist as fh
from fedhist.options import options_of
from fedhist.store.history import DIVERGED, run_name, sample
from fedhist.store.tables import ARRIVALS, COSTS

CLASSES = 10


def fake_setting(seed: int, rounds: int, k: int, clients: int, **changed: Any) -> dict[str, Any]:
    """Return the setting of a run as :meth:`fedhist.Trial.described` has it; None is not kept, as in a simulation."""
    setting = {
        "dataset": "fake",
        "split": "dirichlet",
        "beta": 0.3,
        "clients": clients,
        **{name: each.default for name, each in options_of(fh.Trial).items()},
        "k": k,
        "rounds": rounds,
        "seed": seed,
        "eval_every": max(1, rounds // 20),
        "target": 0.4,
        "objective": "CrossEntropy()",
        "loss": "cross-entropy",
        "parameters": 1000,
        "bytes_per_upload": 4000,
        "bytes_per_download": 4000,
        "data": f"split {seed}",
    }
    return {name: value for name, value in (setting | changed).items() if value is not None}


def fake_history(
    method: str = "FedHist",
    seed: int = 0,
    *,
    rounds: int = 60,
    k: int = 5,
    clients: int = 40,
    lift: float = 0.0,
    pace: float = 1.0,
    **changed: Any,
) -> fh.History:
    """Return a history with everything that a simulation keeps; `lift` is added to its accuracies.

    A round takes a virtual time of `pace`, during which all clients, or as many as `concurrency`, work. What else is
    given is part of its setting.
    """
    rng = np.random.default_rng(seed)
    times = np.sort(rng.lognormal(size=clients))
    who = np.stack([rng.permutation(clients)[:k] for _ in range(rounds)])
    arrived = pace * (np.sort(rng.random((rounds, k)), axis=1) + np.arange(rounds)[:, None])
    staleness = np.minimum(
        1 + (rng.exponential(2.0, (rounds, k)) * times[who]).astype(int), np.arange(1, rounds + 1)[:, None]
    )
    weights = rng.random((rounds, k)).astype(np.float32) / staleness
    weights[rng.random((rounds, k)) < 0.02] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    evaluated = np.arange(max(1, rounds // 20), rounds + 1, max(1, rounds // 20))
    accuracy = np.clip(0.9 * (1 - np.exp(-3 * evaluated / rounds)) + lift + rng.normal(0, 0.02, len(evaluated)), 0, 1)
    evaluations = [
        fh.Evaluation(
            round=int(r),
            time=float(arrived[r - 1, -1]),
            accuracy=float(a),
            loss=1.0,
            per_class=np.clip(a + rng.normal(0, 0.1, CLASSES), 0, 1).tolist(),
            mean_staleness=3.0,
            max_staleness=9,
        )
        for r, a in zip(evaluated, accuracy, strict=True)
    ]
    history = fh.History(
        method=method,
        seed=seed,
        task="fake",
        clients=who,
        staleness=staleness,
        arrived=arrived,
        weights=weights,
        evaluations=evaluations,
        wall_seconds=1.0,
        setting=fake_setting(seed, rounds, k, clients, **changed),
        about_clients={
            "id": sample(clients),
            "labels": rng.multinomial(30, rng.dirichlet([0.3] * CLASSES, len(sample(clients)))).astype(np.int32),
            "time": times[sample(clients)],
        },
        closed=arrived[:, -1],
        work=arrived[:, -1] * changed.get("concurrency", clients),
        sent=changed.get("concurrency", clients) + k * np.arange(1.0, rounds + 1),
        received=k * np.arange(1.0, rounds + 1),
    )
    if method.startswith("FedHist"):
        drift = rng.normal(0.1, 0.3, clients)
        for r in evaluated:
            memory = {"utility": drift * r / rounds, "lengths": np.array([r * 0.1, r * 0.25])}
            history.trace(int(r), {name: values.astype(np.float32) for name, values in memory.items()})
    return history


def diverged(history: fh.History, round_: int) -> fh.History:
    """Return a run that ends with a round in which it diverged, as a simulation leaves it."""
    for name in (*ARRIVALS, *COSTS):
        setattr(history, name, getattr(history, name)[:round_])
    history.evaluations = [each for each in history.evaluations if each.round <= round_]
    kept = int((history.traces["round"] <= round_).sum()) if history.traces else 0
    history.traces = {name: rows[:kept] for name, rows in history.traces.items()} if kept else {}
    history.events.append({"time": 1.0, "round": round_, "event": DIVERGED, "reason": "the loss is nan"})
    return history


def fake_comparison(folder: Path, methods: dict[str, float], seeds: int, **changed: Any) -> Path:
    """Write what `fedhist compare` would, but for models and the picture; methods come with their lifts."""
    for method, lift in methods.items():
        for seed in range(seeds):
            fake_history(method, seed, lift=lift, **changed).save(folder / run_name(method, seed))
    return folder


def measured_in(history: fh.History, metrics: dict[str, bool], *, primary_scale: float = 1.0) -> fh.History:
    """Return a run of a task with other metrics than accuracy: the further accuracies were from 1, the larger they are.

    The second metric and those after it are multiples of the first.
    """
    history.metrics = metrics
    history.setting |= {"target": None, "loss": "mse"}
    history.setting = {name: value for name, value in history.setting.items() if value is not None}
    changed = []
    for each in history.evaluations:
        assert each.accuracy is not None
        first = primary_scale * (1.05 - each.accuracy)
        values: dict[str, float | None] = {name: (i + 1) * first for i, name in enumerate(metrics)}
        changed.append(replace(each, accuracy=values.pop("accuracy", None), per_class=[], metrics=values))
    history.evaluations = changed
    history.about_clients.pop("labels", None)
    return history


def with_clients(history: fh.History, evaluations: int = 3, untested: int = 2) -> fh.History:
    """Return a run with every client's own values of its primary metric: slower clients have larger ones."""
    rounds = np.linspace(0, history.rounds, evaluations + 1).round().astype(int)[1:]
    slow = np.argsort(np.argsort(history.about_clients["time"])) / len(history.about_clients["time"])
    for round_ in rounds.tolist():
        values = slow * history.rounds / round_
        values[:untested] = np.nan
        history.keep_clients(round_, {history.primary: values.tolist(), "loss": values.tolist()})
    return history

"""Runs that nobody has made: what is written looks like a run, and costs milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedhist as fh
from fedhist.command.settings import Settings
from fedhist.store.history import sample

CLASSES = 10


def fake_history(
    method: str = "FedHist", seed: int = 0, *, rounds: int = 60, k: int = 5, clients: int = 40, lift: float = 0.0
) -> fh.History:
    """Return a history with everything that a simulation records; `lift` is added to its accuracies."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.lognormal(size=clients))
    who = np.stack([rng.permutation(clients)[:k] for _ in range(rounds)])
    arrived = np.sort(rng.random((rounds, k)), axis=1) + np.arange(rounds)[:, None]
    staleness = np.minimum(
        1 + (rng.exponential(2.0, (rounds, k)) * times[who]).astype(int), np.arange(1, rounds + 1)[:, None]
    )
    weights = rng.random((rounds, k)).astype(np.float32) / staleness
    weights[rng.random((rounds, k)) < 0.02] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    evaluated = np.arange(max(1, rounds // 20), rounds + 1, max(1, rounds // 20))
    accuracy = np.clip(0.9 * (1 - np.exp(-3 * evaluated / rounds)) + lift + rng.normal(0, 0.02, len(evaluated)), 0, 1)
    history = fh.History(
        method=method,
        seed=seed,
        task="fake",
        clients=who,
        staleness=staleness,
        arrived=arrived,
        weights=weights,
        evaluations=[
            fh.Evaluation(
                int(r),
                float(arrived[r - 1, -1]),
                float(a),
                1.0,
                np.clip(a + rng.normal(0, 0.1, CLASSES), 0, 1).tolist(),
                3.0,
                9,
            )
            for r, a in zip(evaluated, accuracy, strict=True)
        ],
        wall_seconds=1.0,
        setting={"clients": clients, "k": k, "rounds": rounds, "parameters": 1000, "bytes_per_upload": 4000},
        about_clients={
            "id": sample(clients),
            "labels": rng.multinomial(30, rng.dirichlet([0.3] * CLASSES, len(sample(clients)))).astype(np.int32),
            "time": times[sample(clients)],
        },
    )
    if method.startswith("FedHist"):
        drift = rng.normal(0.1, 0.3, clients)
        for r in evaluated:
            told = {"utility": drift * r / rounds, "lengths": np.array([r * 0.1, r * 0.25])}
            history.trace(int(r), {name: values.astype(np.float32) for name, values in told.items()})
    return history


def fake_comparison(folder: Path, methods: dict[str, float], seeds: int, beta: float = 0.3, **sizes: int) -> Path:
    """Write what `fedhist compare` would, but for models and the picture; methods come with their lifts."""
    for method, lift in methods.items():
        for seed in range(seeds):
            name = "".join(c if c.isalnum() else "-" for c in method.lower())
            fake_history(method, seed, lift=lift, **sizes).save(folder / f"{name}-seed{seed}")
    Settings(strategy=tuple(methods), seeds=seeds, beta=beta, dataset="fake", target=0.4).write(folder / "config.toml")
    return folder

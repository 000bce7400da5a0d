"""Uploads for tests, from a K-async server that really steps."""

from collections.abc import Generator

import numpy as np

Arrived = tuple[np.ndarray, list[int], list[int], list[int], np.ndarray, np.ndarray]


def consistent_stream(rng: np.random.Generator, n: int, k: int, p: int, rounds: int, zeros: float = 0.0,
                      partial: float = 0.0) -> Generator[Arrived, np.ndarray, None]:  # fmt: skip
    """K-async rounds of a server that really steps: yields what arrived, is sent u, steps model -= u.

    Clients are all busy, some much faster than others; each pulls to a target of its own, with noise.
    `zeros` is the share of uploads of zero length, `partial` that of rounds with fewer than k uploads.
    """
    speed = np.exp(rng.uniform(-1.5, 1.5, size=n))
    examples = [int(x) for x in rng.integers(1, 51, size=n)]
    shared = rng.normal(size=p)
    target = [shared + rng.normal(size=p) for _ in range(n)]
    pull = 0.03
    models = [rng.normal(size=p)]  # models[v - 1] is version v
    version = [1] * n  # the version each client works on
    for r in range(1, rounds + 1):
        count = int(rng.integers(1, k + 1)) if rng.random() < partial else k
        clients = [int(x) for x in rng.choice(n, size=count, replace=False, p=speed / speed.sum())]
        deltas, staleness, received = [], [], []
        for client in clients:
            start = models[version[client] - 1]
            delta = pull * (start - target[client] + 0.5 * rng.normal(size=p))
            if rng.random() < zeros:
                delta = np.zeros(p)
            deltas.append(delta)
            received.append(start)
            staleness.append(r - version[client] + 1)
        model = models[-1]
        u = yield (np.array(deltas), staleness, clients, [examples[client] for client in clients],
                   model.copy(), np.array(received))  # fmt: skip
        models.append(model - u)
        for client in clients:
            version[client] = r + 1

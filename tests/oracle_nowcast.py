"""Slow and obvious float64 loops of Nowcast, written from docs/nowcast.md alone; nothing is shared with the package."""

import math
from typing import Any

import numpy as np

from tests.oracle_field import Cached, mean, norm, total


def dot(x: np.ndarray, y: np.ndarray) -> float:
    """Inner product."""
    return sum(float(a) * float(b) for a, b in zip(x, y, strict=True))


def ratio(x: float, y: float) -> float:
    """0 where the denominator is."""
    return 0.0 if y == 0.0 else x / y


class Nowcast(Cached):
    """Eqs. 1 to 8 of the page, in its letters."""

    delta, rho, calibrate, restore = 0.2, 0.95, True, True

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        super().__init__(num_clients, k, **options)
        self.smoothed: dict[str, float] = {}
        self.length = 0.0  # l of the rounds before

    def smooth(self, name: str, x: float) -> float:
        """<x> with this round in it."""
        self.smoothed[name] = self.rho * self.smoothed.get(name, 0.0) + (1.0 - self.rho) * x
        return self.smoothed[name]

    def rule(self) -> np.ndarray:
        z = self.calibrated() if self.calibrate else self.g
        a = self.now(z)
        u = self.restored(z, a) if self.restore else a
        self.exchange()
        return u

    def starting(self) -> bool:
        """The first N/K rounds."""
        return self.round <= self.num_clients / self.k

    def calibrated(self) -> list[np.ndarray]:
        """Eqs. 1 and 2."""
        center = self.mean_of_all()
        h = [self.last(client) for client in self.clients]
        above = self.smooth("above", sum(dot(self.g[i] - center, h[i] - center) for i in range(self.count)))
        below = self.smooth("below", sum(dot(h[i] - center, h[i] - center) for i in range(self.count)))
        beta = min(1.0, max(0.0, ratio(above, below)))
        return [self.g[i] + beta * (center - h[i]) for i in range(self.count)]

    def now(self, z: list[np.ndarray]) -> np.ndarray:
        """Eqs. 3 to 5."""
        if self.delta is None:
            self.trust = 1.0
            return mean(z)
        drift = [self.w - start for start in self.received]
        away = [drift[i] - mean(drift) for i in range(self.count)]
        if all(np.array_equal(x, drift[0]) for x in drift):  # they are their mean, whatever its rounding
            away = [np.zeros(len(self.w)) for _ in drift]
        above = self.smooth("change", sum(dot(z[i] - mean(z), away[i]) for i in range(self.count)))
        below = self.smooth("moved", sum(dot(x, x) for x in away))
        c = max(0.0, -ratio(above, below))
        bound = self.delta * self.length
        p = [1.0 if self.length == 0.0 else ratio(bound, bound + c * norm(x)) for x in drift]
        if self.starting():
            p = [min(p[i], 1 / math.sqrt(self.tau[i] + 1)) for i in range(self.count)]
        self.trust = sum(p) / self.count
        weighted = total([p[i] * z[i] for i in range(self.count)])
        self.length = self.smooth("length", ratio(norm(weighted), sum(p))) / self.smooth("one", 1.0)
        return weighted / self.count

    def restored(self, z: list[np.ndarray], a: np.ndarray) -> np.ndarray:
        """Eqs. 6 to 8."""
        k = self.count
        if k == 1:
            return a
        m = sum(dot(x, x) for x in z) / k
        q = ratio(k * dot(mean(z), mean(z)) - m, k - 1)
        shared = max(0.0, self.smooth("q", q))
        noise = max(0.0, self.smooth("m", m) - shared)
        s = ratio(shared, shared + noise / k)
        if norm(a) == 0.0 or self.starting():
            return a
        return a * (self.trust * sum(norm(x) for x in z) / k / norm(a)) ** s

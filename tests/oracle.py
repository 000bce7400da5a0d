"""Slow and obvious float64 aggregation rules, written from the method page and the paper alone.

Nothing here is shared with the package: the tests compare the package against these loops.
Symbols and step numbers are those of the method page, equation numbers those of the paper.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Result = tuple[np.ndarray, list[float] | None]
Average = Callable[[list[float], list[np.ndarray]], np.ndarray]


class Upload(NamedTuple):
    """One stored upload: its vector, the staleness it had on arrival, and who sent it."""

    vector: np.ndarray
    tau: int
    client: int


def norm(x: np.ndarray) -> float:
    """Euclidean length."""
    return math.sqrt(float(np.dot(x, x)))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Eq. 5; a zero vector is similar to nothing (0)."""
    if norm(x) == 0.0 or norm(y) == 0.0:
        return 0.0
    return float(np.dot(x, y)) / (norm(x) * norm(y))


def decay(staleness: int) -> float:
    """(e/2)^(-tau), the exponential staleness weight."""
    return (math.e / 2.0) ** (-staleness)


def normalise(weights: list[float]) -> list[float]:
    """Divide by the sum; uniform where the sum is 0."""
    total = sum(weights)
    if total == 0.0:
        return [1.0 / len(weights)] * len(weights)
    return [w / total for w in weights]


def combine(weights: list[float], vectors: list[np.ndarray]) -> np.ndarray:
    """Weighted sum of vectors."""
    out = np.zeros_like(vectors[0])
    for w, v in zip(weights, vectors, strict=True):
        out = out + w * v
    return out


def clipped(x: np.ndarray, limit: float) -> np.ndarray:
    """Shorten x to length `limit` where it is longer."""
    return x * (limit / norm(x)) if norm(x) > limit else x


def mean_length(average: Average, g: list[np.ndarray]) -> float:
    """The second factor of Eq. 15."""
    return float(average([1.0 / len(g)] * len(g), [np.array([norm(x)]) for x in g])[0])


class Method:
    """What every rule shares; a subclass names its options, with defaults, in its body."""

    average = staticmethod(combine)  # what makes the update of weighted uploads; a defence has another

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        self.num_clients, self.k, self.round = num_clients, k, 0
        for name, value in options.items():
            assert name in vars(type(self)), f"no option {name}"
            setattr(self, name, value)

    def step(self, deltas: np.ndarray, staleness: list[int], clients: list[int],
             num_examples: list[int]) -> Result:  # fmt: skip
        """Global update u and normalised weights for the K uploads of the next round."""
        assert len(deltas) == len(staleness) == len(clients) == len(num_examples) == self.k
        self.round += 1
        g = [np.array(row, dtype=np.float64) for row in deltas]
        return self.rule(g, staleness, clients, num_examples)

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        """Each method's own step."""
        raise NotImplementedError


class FedAvg(Method):
    """p_i ∝ n_i, or equal weights; with INA at the mean length of the uploads."""

    by_examples = True
    ina = False

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        p = normalise([float(n[i]) if self.by_examples else 1.0 for i in range(self.k)])
        mean = self.average(p, g)
        if self.ina and norm(mean) > 0.0:
            mean = mean / norm(mean) * mean_length(self.average, g)
        return mean, p


class DynSGD(Method):
    """p_i ∝ 1/tau_i, or the unnormalised (1/K) Σ g_i/tau_i, which has no normalised weights."""

    normalise = True

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        if not self.normalise:
            return self.average([1.0 / (self.k * tau[i]) for i in range(self.k)], g), None
        p = normalise([1.0 / tau[i] for i in range(self.k)])
        return self.average(p, g), p


class TWAFL(Method):
    """p_i ∝ n_i (e/2)^(-tau_i), or without n_i."""

    by_examples = True

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        p = normalise([(n[i] if self.by_examples else 1) * decay(tau[i]) for i in range(self.k)])
        return self.average(p, g), p


class REFL(Method):
    """Fresh uploads weigh 1, stale ones by age and by how far they are from the fresh mean."""

    beta = 0.35

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        fresh = [g[i] for i in range(self.k) if tau[i] == min(tau)]
        mean = combine([1.0 / len(fresh)] * len(fresh), fresh)
        stale = [i for i in range(self.k) if tau[i] > min(tau)]
        deviation = [0.0] * self.k  # Λ_i; a zero fresh mean measures nothing, so no boost then
        for i in stale:
            if norm(mean) > 0.0:
                deviation[i] = norm((g[i] - mean) / (len(fresh) + 1)) ** 2 / norm(mean) ** 2
        weights = [1.0] * self.k
        for i in stale:
            boost = 1.0 - math.exp(-deviation[i] / max(deviation)) if max(deviation) > 0.0 else 0.0
            weights[i] = (1.0 - self.beta) / tau[i] + self.beta * boost
        p = normalise(weights)
        return self.average(p, g), p


class WKAFL(Method):
    """Momentum, clip, staleness-weighted estimate, then only what agrees with the estimate."""

    momentum, clip = 0.1, 10.0  # a, B1 (times the median norm)
    stage_two, stage_two_clip = 3500, 5.0  # first round of the second stage, B2
    threshold, sharpness, slowdown = 0.3, 10.0, 0.01  # -, b, c

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        super().__init__(num_clients, k, **options)
        self.previous: np.ndarray | None = None  # u_prev, before the step scaling

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        if self.previous is not None:
            g = [x + self.momentum * self.previous for x in g]
        lower_median = sorted(norm(x) for x in g)[(self.k - 1) // 2]
        if lower_median > 0.0:  # half the uploads being zero says nothing about the others
            g = [clipped(x, self.clip * lower_median) for x in g]
        w = normalise([decay(t) for t in tau])
        estimate = combine(w, g)  # ĝ
        cos = [cosine(x, estimate) for x in g]
        kept = [i for i in range(self.k) if cos[i] > self.threshold]
        weights, update = w, estimate  # what is used if none is kept
        if kept:
            raw = [w[i] * math.exp(self.sharpness * cos[i]) if i in kept else 0.0 for i in range(self.k)]
            weights = normalise(raw)  # q_i, 0 where not kept
            if self.round >= self.stage_two:
                g = [clipped(x, self.stage_two_clip * norm(estimate)) for x in g]
            update = self.average(weights, g)
        self.previous = update
        return update / (1.0 + self.slowdown * min(tau)), weights


class FedHist(Method):
    """EGS, HAA and INA, in the order of the method page's "One round"."""

    h: int | None = None
    alpha, lam, gamma, sim_threshold = 0.1, 0.5, 0.1, 0.0
    egs = haa = ina = True
    ina_direction = "aggregate"  # or "sum"
    remember_amplified = True

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        super().__init__(num_clients, k, **options)
        assert self.ina_direction in ("aggregate", "sum")
        self.kept = max(1, round(num_clients / (2 * k))) if self.h is None else self.h
        self.G: list[np.ndarray] = []  # global updates, oldest first
        self.L: list[list[Upload]] = []  # one sublist per round, oldest first
        self.utility = [0.0] * num_clients  # Ū

    def rule(self, g: list[np.ndarray], tau: list[int], c: list[int], n: list[int]) -> Result:
        fused = [self.fuse(x) for x in g]
        p = self.weigh(tau, c)
        aggregate = self.average(p, fused)  # Eq. 4
        if self.ina and self.ina_direction == "sum":
            aggregate = self.average([1.0] * self.k, g)  # the direction Eq. 15 prints
        u = aggregate
        if self.ina and norm(aggregate) > 0.0:  # Step 3, Eq. 15; a zero aggregate stays zero
            u = aggregate / norm(aggregate) * mean_length(self.average, g)
        # Step 4, remember.
        self.G.append(u if self.remember_amplified else aggregate)
        self.L.append([Upload(g[i], tau[i], c[i]) for i in range(self.k)])
        self.G, self.L = self.G[-self.kept :], self.L[-self.kept :]
        if self.haa and len(self.L) == self.kept:
            self.evaluate()
        return u, p

    def fuse(self, x: np.ndarray) -> np.ndarray:
        """Step 1, EGS."""
        if not self.egs or not self.G:
            return x
        least = min(self.G, key=lambda update: cosine(x, update))  # Eq. 6; the oldest wins a tie
        return x + self.alpha * least  # Eq. 7

    def weigh(self, tau: list[int], c: list[int]) -> list[float]:
        """Step 2, HAA weights."""
        if not self.haa:
            return normalise([decay(t) for t in tau])
        p_hat = [decay(tau[i]) + self.lam * self.utility[c[i]] for i in range(self.k)]  # Eq. 8, no outer sum
        return normalise([max(value, 0.0) for value in p_hat])

    def evaluate(self) -> None:
        """Step 5, HAA utilities of the clients in the oldest sublist."""
        same_base = []  # S, Eq. 10
        for index, sublist in enumerate(self.L, start=1):
            same_base += [upload for upload in sublist if upload.tau == index]
        size = len(same_base)
        if size == 0:
            return
        predicted = combine([1.0 / size] * size, [upload.vector for upload in same_base])  # Eq. 11
        for his in self.L[0]:
            sim = cosine(his.vector, predicted)
            p_his = 1.0 - decay(his.tau) if sim >= self.sim_threshold else decay(his.tau)  # Eq. 13
            util = (sim - self.sim_threshold) * p_his * size  # Eq. 12
            old = self.utility[his.client]
            self.utility[his.client] = (1.0 - self.gamma) * old + self.gamma * util  # Eq. 14


def random_stream(rng: np.random.Generator, num_clients: int, k: int, num_params: int,
                  rounds: int) -> Iterator[tuple[np.ndarray, list[int], list[int], list[int]]]:  # fmt: skip
    """K-async rounds of (deltas, staleness, clients, num_examples); every client is always busy."""
    examples = [int(x) for x in rng.integers(1, 51, size=num_clients)]
    shared = rng.normal(size=num_params)
    # Own bias plus a multiple of either sign of a shared one: cosines between clients of both signs.
    bias = [rng.normal(size=num_params) + rng.normal(0.7, 1.0) * shared for _ in range(num_clients)]
    version = [1] * num_clients  # the version each client works on
    for r in range(1, rounds + 1):
        clients = [int(x) for x in rng.choice(num_clients, size=k, replace=False)]
        staleness = [r - version[client] + 1 for client in clients]
        deltas = np.array([bias[client] + rng.normal(size=num_params) for client in clients])
        for client in clients:
            version[client] = r + 1
        yield deltas, staleness, clients, [examples[client] for client in clients]

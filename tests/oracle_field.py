"""Slow and obvious float64 rules of the field's asynchronous methods, written from the papers' rules alone.

Nothing here is shared with the package: the tests compare the package against these loops.
An upload is g = received - local, staleness counts from 1, the papers' tau = staleness - 1, and the server
steps w <- w - u. The number of uploads of a round (K') may be less than k.
"""

import math
from typing import Any

import numpy as np

Vectors = list[np.ndarray]
Arrived = tuple[np.ndarray, list[int], list[int], list[int], np.ndarray, np.ndarray]


def norm(x: np.ndarray) -> float:
    """Euclidean length."""
    return math.sqrt(sum(float(value) * float(value) for value in x))


def mean(vectors: Vectors) -> np.ndarray:
    """Plain mean."""
    return total(vectors) / len(vectors)


def total(vectors: Vectors) -> np.ndarray:
    """Plain sum."""
    out = np.zeros(len(vectors[0]))
    for vector in vectors:
        out = out + vector
    return out


class Options:
    """A subclass names its options, with defaults, in its body."""

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            assert name in vars(type(self)), f"no option {name}"
            setattr(self, name, value)


class Method(Options):
    """What every rule shares: the round's number from 1, and what arrived in it, under short names."""

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_clients, self.k, self.round = num_clients, k, 0

    def step(self, deltas: np.ndarray, staleness: list[int], clients: list[int], num_examples: list[int],
             model: np.ndarray, received: np.ndarray) -> np.ndarray:  # fmt: skip
        """Global update u of the next round."""
        count = len(deltas)
        assert 1 <= count <= self.k
        assert count == len(staleness) == len(clients) == len(num_examples) == len(received)
        assert len(set(clients)) == count
        self.round += 1
        self.count = count  # K'
        self.g = [np.array(row, dtype=np.float64) for row in deltas]
        self.tau = [int(s) - 1 for s in staleness]  # from 0
        self.clients = [int(c) for c in clients]
        self.n = [float(x) for x in num_examples]
        self.w = np.array(model, dtype=np.float64)
        self.received = [np.array(row, dtype=np.float64) for row in received]
        return self.rule()

    def rule(self) -> np.ndarray:
        """Each method's own step."""
        raise NotImplementedError


# Rules without a memory, but for the optimizer's own.


class FedAsync(Method):
    """w <- mean of (1 - alpha_i) w + alpha_i w_i, alpha_i = alpha s(tau_i)."""

    alpha, s, a, b = 0.6, "polynomial", None, 4

    def weight(self, tau: int) -> float:
        """The papers' three s(tau)."""
        if self.s == "constant":
            return 1.0
        if self.s == "polynomial":
            a = 0.5 if self.a is None else self.a
            return (tau + 1.0) ** (-a)
        assert self.s == "hinge"
        a = 10.0 if self.a is None else self.a
        return 1.0 if tau <= self.b else 1.0 / (a * (tau - self.b) + 1.0)

    def rule(self) -> np.ndarray:
        mixed = []
        for i in range(self.count):
            local = self.received[i] - self.g[i]
            alpha = self.alpha * self.weight(self.tau[i])
            mixed.append((1.0 - alpha) * self.w + alpha * local)
        return self.w - mean(mixed)


class FedBuff(Method):
    """(1/K') sum g_i (1 + tau_i)^-a."""

    a = 0.5

    def rule(self) -> np.ndarray:
        return mean([self.g[i] * (1.0 + self.tau[i]) ** (-self.a) for i in range(self.count)])


class DelayAdaptive(Method):
    """(1/K') sum g_i, times tau_c/tau_i where tau_i > tau_c; tau_c = N/K unless given."""

    tau_c = None

    def rule(self) -> np.ndarray:
        limit = self.num_clients / self.k if self.tau_c is None else self.tau_c
        shortened = []
        for i in range(self.count):
            factor = limit / self.tau[i] if self.tau[i] > 0 and self.tau[i] > limit else 1.0
            shortened.append(factor * self.g[i])
        return mean(shortened)


class FADAS(Method):
    """AMSGrad on the plain mean, from zeros, without bias correction; the step is divided by a large tau_max."""

    eta, beta1, beta2, eps, tau_c = 1e-3, 0.9, 0.99, 1e-8, 1

    def rule(self) -> np.ndarray:
        delta = mean(self.g)
        if self.round == 1:
            self.m, self.v, self.largest = np.zeros(len(delta)), np.zeros(len(delta)), np.zeros(len(delta))
        eta = self.eta
        if self.tau_c is not None and max(self.tau) > self.tau_c:
            eta = self.eta / max(self.tau)
        u = np.zeros(len(delta))
        for x in range(len(delta)):
            self.m[x] = self.beta1 * self.m[x] + (1.0 - self.beta1) * delta[x]
            self.v[x] = self.beta2 * self.v[x] + (1.0 - self.beta2) * delta[x] ** 2
            self.largest[x] = max(self.largest[x], self.v[x])
            u[x] = eta * self.m[x] / (math.sqrt(self.largest[x]) + self.eps)
        return u


class Port(Method):
    """p_i ∝ n_i (alpha S/(S + tau_i) + beta (cos_i + 1)/2), cos_i between the server's way since and the client's."""

    alpha, beta, S = 3.0, 1.0, 10.0

    def cosine(self, i: int) -> float:
        """1 if the model did not move since the client got it, else 0 if the client did not move."""
        moved, went = self.w - self.received[i], -self.g[i]
        if norm(moved) == 0.0:
            return 1.0
        if norm(went) == 0.0:
            return 0.0
        return sum(float(x) * float(y) for x, y in zip(moved, went, strict=True)) / (norm(moved) * norm(went))

    def rule(self) -> np.ndarray:
        raw = []
        for i in range(self.count):
            fresh = self.alpha * self.S / (self.S + self.tau[i])
            raw.append(self.n[i] * (fresh + self.beta * (self.cosine(i) + 1.0) / 2.0))
        return total([raw[i] / sum(raw) * self.g[i] for i in range(self.count)])


class AsyncFedED(Method):
    """(1/K') sum lam/(gamma_i + eps) g_i, gamma_i = |w_t - w_s|/|g_i|."""

    lam, eps = 1.0, 1.0

    def rule(self) -> np.ndarray:
        scaled = []
        for i in range(self.count):
            if norm(self.g[i]) == 0.0:
                scaled.append(np.zeros(len(self.w)))
                continue
            gamma = norm(self.w - self.received[i]) / norm(self.g[i])
            scaled.append(self.lam / (gamma + self.eps) * self.g[i])
        return mean(scaled)


# Rules that remember updates or uploads of any client.


class MomentumApproximation(Method):
    """MA-Light: u_t = mu r_t + nu u_(t-1), so that the shares of the versions in u_t fit (1-b) b^(t-s) best."""

    beta = 0.9

    def rule(self) -> np.ndarray:
        t = self.round - 1  # versions from 0, as the rounds here
        if t == 0:
            self.u, self.shares = np.zeros(len(self.w)), []
        r = mean(self.g)
        fresh = [0.0] * (t + 1)  # share of version s in r_t
        for i in range(self.count):
            fresh[t - self.tau[i]] += 1.0 / self.count
        before = self.shares + [0.0] * (t + 1 - len(self.shares))  # share of version s in u_(t-1)
        target = [(1.0 - self.beta) * self.beta ** (t - s) for s in range(t + 1)]
        # Where the two columns are parallel this is the shortest (mu, nu); in round 1 that is nu = 0.
        columns = np.array([fresh, before]).T
        (mu, nu), _, _, singular = np.linalg.lstsq(columns, np.array(target), rcond=None)
        self.conditions = getattr(self, "conditions", [])
        self.conditions.append(float(singular[-1] / singular[0]) if len(singular) == 2 else 0.0)  # for the tests
        self.shares = [mu * fresh[s] + nu * before[s] for s in range(t + 1)]
        self.u = mu * r + nu * self.u
        return self.u


class FedFa(Method):
    """At each arrival a step by the mean of the last `window` uploads; the round's update is the sum of the steps.

    Of models: at each arrival the model becomes the mean of the last `window` local ones, once so many have come.
    """

    window, of = 10, "updates"

    def rule(self) -> np.ndarray:
        if self.round == 1:
            self.queue: Vectors = []
        w = self.w
        for i in range(self.count):
            self.queue.append(self.g[i] if self.of == "updates" else self.received[i] - self.g[i])
            if len(self.queue) > self.window:
                self.queue.pop(0)
            if self.of == "updates":
                w = w - mean(self.queue)
            elif len(self.queue) == self.window:
                w = mean(self.queue)
        return self.w - w


# Rules that remember the last upload, or the last model, of every client.


class Cached(Method):
    """h_j: last upload of each client, nothing (zero) before the first."""

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        super().__init__(num_clients, k, **options)
        self.h: dict[int, np.ndarray] = {}

    def last(self, client: int) -> np.ndarray:
        return self.h[client] if client in self.h else np.zeros(len(self.w))

    def exchange(self) -> None:
        for i in range(self.count):
            self.h[self.clients[i]] = self.g[i]

    def mean_of_all(self) -> np.ndarray:
        return mean([self.last(client) for client in range(self.num_clients)])


class CA2FL(Cached):
    """hbar + (1/K') sum (g_i - h_i), both from before this round's exchange."""

    def rule(self) -> np.ndarray:
        u = self.mean_of_all() + mean([self.g[i] - self.last(self.clients[i]) for i in range(self.count)])
        self.exchange()
        return u


class FedStale(Cached):
    """beta hbar + (1/K') sum (g_i - beta h_i), both from before this round's exchange."""

    beta = 0.5

    def rule(self) -> np.ndarray:
        news = [self.g[i] - self.beta * self.last(self.clients[i]) for i in range(self.count)]
        u = self.beta * self.mean_of_all() + mean(news)
        self.exchange()
        return u


class MIFA(Cached):
    """Exchange, then (1/N) sum h_j."""

    def rule(self) -> np.ndarray:
        self.exchange()
        return self.mean_of_all()


class ACED(Cached):
    """Exchange, then the mean of the h_j whose version s_j has r - s_j <= tau_algo (None: of all)."""

    tau_algo = 50

    def __init__(self, num_clients: int, k: int, **options: Any) -> None:
        super().__init__(num_clients, k, **options)
        self.version = dict.fromkeys(range(num_clients), 1)  # s_j

    def rule(self) -> np.ndarray:
        self.exchange()
        for i in range(self.count):
            self.version[self.clients[i]] = self.round - self.tau[i]
        active = []
        for client in range(self.num_clients):
            if self.tau_algo is None or self.round - self.version[client] <= self.tau_algo:
                active.append(self.last(client))
        return mean(active) if active else np.zeros(len(self.w))


class AREA(Method):
    """-(1/N) sum of y_new - y_old over the uploads; y_i is client i's last local model, w_0 before the first."""

    def rule(self) -> np.ndarray:
        if self.round == 1:
            self.y = dict.fromkeys(range(self.num_clients), self.w)
        u = np.zeros(len(self.w))
        for i in range(self.count):
            new = self.received[i] - self.g[i]
            u = u - (new - self.y[self.clients[i]]) / self.num_clients
            self.y[self.clients[i]] = new
        return u


# Server optimizers: what they make of a stream of another rule's updates.


class ServerMomentum(Options):
    """v <- beta v + u."""

    beta = 0.9
    v: np.ndarray | None = None

    def step_update(self, u: np.ndarray) -> np.ndarray:
        self.v = u if self.v is None else self.beta * self.v + u
        return self.v


class Adaptive(Options):
    """m <- beta1 m + (1 - beta1) u from 0, v from tau^2 by the subclass, eta m/(sqrt(v) + tau)."""

    m: np.ndarray | None = None

    def step_update(self, u: np.ndarray) -> np.ndarray:
        if self.m is None:
            self.m, self.v = np.zeros(len(u)), np.full(len(u), self.tau**2)
        out = np.zeros(len(u))
        for x in range(len(u)):
            self.m[x] = self.beta1 * self.m[x] + (1.0 - self.beta1) * u[x]
            self.v[x] = self.second(float(self.v[x]), float(u[x]) ** 2)
            out[x] = self.eta * self.m[x] / (math.sqrt(self.v[x]) + self.tau)
        return out

    def second(self, v: float, square: float) -> float:
        """The next v of one coordinate."""
        raise NotImplementedError


class FedAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) u^2."""

    eta, beta1, beta2, tau = 0.01, 0.9, 0.99, 1e-3

    def second(self, v: float, square: float) -> float:
        return self.beta2 * v + (1.0 - self.beta2) * square


class FedYogi(Adaptive):
    """v <- v - (1 - beta2) u^2 sign(v - u^2)."""

    eta, beta1, beta2, tau = 0.01, 0.9, 0.99, 1e-3
    nearest_tie = math.inf  # for the tests: the smallest |v - u^2| met, in units of v

    def second(self, v: float, square: float) -> float:
        self.nearest_tie = min(self.nearest_tie, abs(v - square) / v)
        if v > square:
            return v - (1.0 - self.beta2) * square
        if v < square:
            return v + (1.0 - self.beta2) * square
        return v


class FedAdagrad(Adaptive):
    """v <- v + u^2."""

    eta, beta1, tau = 0.01, 0.0, 1e-3

    def second(self, v: float, square: float) -> float:
        return v + square


class Wrapped:
    """A server optimizer around a rule."""

    def __init__(self, inner: Method, optimizer: ServerMomentum | Adaptive) -> None:
        self.inner, self.optimizer = inner, optimizer

    def step(self, *arrived: Any) -> np.ndarray:
        return self.optimizer.step_update(self.inner.step(*arrived))

"""FedHist (Jiang et al., "Knowledge Rumination for Client Utility Evaluation", ICME 2025).

The server keeps the last h global updates `G` and the last h rounds of uploads `L`, and uses them
three times:

EGS  (enhancement of gradient stability) fuses each upload with the least similar past global update     Eqs. 5-7
HAA  (history-aware aggregation) weighs clients by staleness and their uploads' utility in hindsight     Eqs. 8-14
INA  (intelligent norm amplification) gives the aggregate back the length that averaging took away       Eq. 15

``docs/decisions.md`` says how each open point of the paper was read.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedhist.errors import choice, flag, number, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, cosine, normalised
from fedhist.strategies.twafl import temporal_weight


def hindsight_utility(similarity: Tensor, staleness: Tensor, support: Tensor, threshold: float) -> Tensor:
    """Return `Util = (sim - sim_T)·p_his·|S|` (Eq. 12): a reward above the threshold, a penalty below.

    `p_his` (Eq. 13) makes rewards grow and penalties shrink with the staleness an upload had.
    """
    decay = temporal_weight(staleness)
    p_his = torch.where(similarity >= threshold, 1 - decay, decay)  # Eq. 13
    return (similarity - threshold) * p_his * support  # Eq. 12


def default_h(num_clients: int, k: int) -> int:
    """Return how many rounds are remembered by default: half of those between two uploads of a client."""
    return max(1, round(num_clients / (2 * k)))


class FedHist(Strategy):
    """History-aware K-async aggregation.

    Parameters
    ----------
    h
        Rounds remembered. None means `max(1, round(N/(2K)))`.
    alpha
        `α` in Eq. 7: share of the past global update that is fused into an upload.
    lam
        `λ` in Eq. 8: weight of a client's utility against its staleness.
    gamma
        `γ` in Eq. 14: how fast a client's average utility follows its latest one.
    sim_threshold
        `sim_T` in Eqs. 12 and 13.
    egs, haa, ina
        Switch the three parts off one by one, as in the paper's ablation.
    ina_direction
        "aggregate" amplifies `Σ p_i g̃_i`; "sum" is Eq. 15 to the letter, which drops `p_i` and EGS.
    remember_amplified
        Whether `G` keeps global updates after INA (True) or before it.
    memory_dtype
        Precision in which past uploads and global updates are kept: "bfloat16" halves the memory.
    sketch
        Keep so many random projections of each past upload instead of the upload itself. Utilities need
        only cosines, which such a sketch gives with an error of about `1/√sketch`.
    """

    branch_free: ClassVar[bool] = True

    G: Tensor
    """``(h, P)``: the last global updates; all rings are indexed by the round modulo h."""
    G_norms: Tensor
    L: Tensor
    """``(h, K, P)``: the uploads of the last rounds, as submitted."""
    L_norms: Tensor
    L_staleness: Tensor
    """0 marks an empty place, in a round that closed with fewer than K."""
    L_clients: Tensor
    fresh: Tensor
    """``(h + 1, P)``: for each of the last h versions, the sum of the uploads computed from it; the last row is waste."""
    support: Tensor
    """``(h + 1,)``: how many these are."""
    utility: Tensor
    """``(N,)``: `Ū` of each client."""
    round: Tensor
    signs: Tensor

    def __init__(
        self,
        h: int | None = None,
        alpha: float = 0.1,
        lam: float = 0.5,
        gamma: float = 0.1,
        sim_threshold: float = 0.0,
        egs: bool = True,
        haa: bool = True,
        ina: bool = True,
        *,
        ina_direction: Literal["aggregate", "sum"] = "aggregate",
        remember_amplified: bool = True,
        memory_dtype: Literal["float32", "bfloat16"] = "float32",
        sketch: int | None = None,
    ) -> None:
        super().__init__()
        self.h = None if h is None else whole("h", h, 1)
        self.alpha, self.lam = number("alpha", alpha, 0), number("lam", lam, 0)
        self.gamma, self.sim_threshold = number("gamma", gamma, 0, 1), number("sim_threshold", sim_threshold, -1, 1)
        self.egs, self.haa, self.ina = flag("egs", egs), flag("haa", haa), flag("ina", ina)
        self.ina_direction = choice("ina_direction", ina_direction, ("aggregate", "sum"))
        self.remember_amplified = flag("remember_amplified", remember_amplified)
        self.memory_dtype = choice("memory_dtype", memory_dtype, ("float32", "bfloat16"))
        self.sketch = None if sketch is None else whole("sketch", sketch, 1)

    def setup(self, num_clients: int, k: int, num_params: int, device: Device = None) -> Self:
        """Allocate `G`, `L`, the sums behind `g_pred`, and the clients' utilities.

        Round r, and the model version handed out at its start, belong to slot `(r - 1) mod h` of all rings. The
        counter is a tensor so that a captured round still turns them.
        """
        super().setup(num_clients, k, num_params, device)
        h = self.rounds_kept = self.h or default_h(num_clients, k)

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))

        kept = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.memory_dtype]
        buffer("round", (1,), torch.int64)
        if self.egs:
            buffer("G", (h, num_params), kept)
            buffer("G_norms", (h,))
        if self.haa:
            width = num_params if self.sketch is None else min(self.sketch, num_params)
            if self.sketch is not None:
                self.register_buffer("signs", random_signs(num_params).to(device), persistent=False)
            buffer("L", (h, k, width), kept)
            buffer("L_norms", (h, k))
            buffer("L_staleness", (h, k), torch.int64)
            buffer("L_clients", (h, k), torch.int64)
            buffer("fresh", (h + 1, width))
            buffer("support", (h + 1,), torch.float64)
            buffer("utility", (num_clients,), torch.float64)
        if self.ina:
            buffer("lengths", (2,), torch.float64)
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update of one round."""
        g, norms = arrivals.deltas, arrivals.deltas.norm(dim=1)
        p = self.last_weights = normalised(self.weights(arrivals))  # Eq. 8
        if self.ina and self.ina_direction == "sum":
            u = self.average(torch.ones_like(p), g)  # the direction of Eq. 15 to the letter
        else:
            u = self.average_fused(p, g, self.least_similar(g, norms)) if self.egs else self.average(p, g)  # Eqs. 4-7
        amplified = self.restore_length(u, norms) if self.ina else u  # Eq. 15
        self.remember(amplified if self.remember_amplified else u, norms, arrivals)
        self.judge()  # Eqs. 10-14
        self.round += 1
        return amplified

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `p̂_i = (e/2)^-τ_i + λ·Ū(c_i)`, at least 0 (Eq. 8, whose outer sum is a misprint)."""
        weights = temporal_weight(arrivals.staleness)
        if not self.haa:
            return weights
        # Two negative weights would normalise to positive ones that favour the worse client.
        return (weights + self.lam * self.utility[arrivals.clients]).clamp_min(0)

    def least_similar(self, g: Tensor, norms: Tensor) -> Tensor:
        """Return the slot `j*` of the past update least similar to each upload (Eqs. 5 and 6)."""
        dots = g @ self.G.T if self.G.dtype == g.dtype else torch.stack([g @ u.to(g.dtype) for u in self.G], dim=1)
        similarity = cosine(dots, norms[:, None], self.G_norms)  # Eq. 5
        slots = torch.arange(self.rounds_kept, device=g.device)
        # While G is empty all are infinite and a slot that is still zero is chosen: g̃ = g.
        similarity = similarity.masked_fill(slots >= self.round, torch.inf)
        # The oldest of equals wins, and what differs by rounding alone is equal.
        oldest_first = (self.round + slots) % self.rounds_kept
        return oldest_first[similarity[:, oldest_first].round(decimals=6).argmin(dim=1)]  # Eq. 6

    def average_fused(self, p: Tensor, g: Tensor, least: Tensor) -> Tensor:
        """Return `Σ p_i g̃_i` with `g̃_i = g_i + α·G_j*` (Eqs. 4 and 7)."""
        if not self.averages_plainly or self.G.dtype != g.dtype:
            return self.average(p, g + self.alpha * self.G[least].to(g.dtype))
        # The mean is linear, so the share of each past update is enough, and fused uploads are never formed.
        shares = p @ (least[:, None] == torch.arange(self.rounds_kept, device=g.device)).double()
        return self.average(p, g) + self.alpha * (shares.to(g.dtype) @ self.G)

    def remember(self, u: Tensor, norms: Tensor, arrivals: Arrivals) -> None:
        """Put the round's update into `G`, and its uploads into `L` and the sums of those with the same version."""
        now = self.round % self.rounds_kept
        if self.egs:
            self.G.index_copy_(0, now, u[None].to(self.G.dtype))
            self.G_norms.index_copy_(0, now, u.norm()[None])
        if not self.haa:
            return
        g = arrivals.deltas if self.sketch is None else sketched(arrivals.deltas, self.signs, self.fresh.shape[1])
        rings = (self.L, g), (self.L_norms, norms), (self.L_staleness, arrivals.staleness)
        for ring, values in (*rings, (self.L_clients, arrivals.clients)):
            ring[:, : len(g)].index_copy_(0, now, values.to(ring.dtype)[None])
            if len(g) < self.k:  # a round closed with fewer than K
                ring[:, len(g) :].index_fill_(0, now, 0)
        # An upload of staleness τ ≤ h was computed from the version of slot (round - τ + 1): when that version's
        # round is the oldest of L, Eq. 10 finds exactly those.
        version = (self.round - arrivals.staleness + 1) % self.rounds_kept
        slot = torch.where(arrivals.staleness <= self.rounds_kept, version, self.rounds_kept)
        for i in range(len(g)):  # one by one: on a GPU all at once would be added up in any order
            self.fresh.index_add_(0, slot[i : i + 1], g[i : i + 1])
        self.support.index_add_(0, slot, torch.ones_like(slot, dtype=torch.float64))

    def judge(self) -> None:
        """Judge the oldest uploads of `L` by all that were computed from the model of their round (Eqs. 10-14)."""
        if not self.haa:
            return
        oldest = (self.round + 1) % self.rounds_kept
        uploads, norms, tau, clients = (
            _slot(ring, oldest) for ring in (self.L, self.L_norms, self.L_staleness, self.L_clients)
        )
        total, support = _slot(self.fresh, oldest), _slot(self.support, oldest)  # |S|·g_pred and |S|: Eqs. 10, 11
        similarity = cosine(uploads.to(total.dtype) @ total, norms, total.norm()).clamp(-1, 1)  # a sketch's may be more
        utility = hindsight_utility(similarity, tau, support, self.sim_threshold)  # Eqs. 12, 13
        judged = (self.round + 1 >= self.rounds_kept) & (support > 0) & (tau > 0)
        step = self.gamma * (utility - self.utility[clients])  # Eq. 14
        self.utility.index_add_(0, clients, torch.where(judged, step, 0.0).to(self.utility.dtype))
        self.fresh.index_fill_(0, oldest, 0)  # the slot now belongs to the next version
        self.support.index_fill_(0, oldest, 0)

    def trace(self) -> dict[str, Tensor]:
        """Return the clients' utilities, and the sums over all rounds of the update's length before and after INA."""
        kept = {"utility": self.haa, "lengths": self.ina}
        return {name: getattr(self, name) for name, there in kept.items() if there}


def _slot(ring: Tensor, slot: Tensor) -> Tensor:
    """Return one slot of a ring: a view on the CPU, where reading the index costs no wait."""
    return ring[int(slot)] if ring.device.type == "cpu" else ring.index_select(0, slot)[0]


def random_signs(num_params: int) -> Tensor:
    """Return as many random signs, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (num_params,), dtype=torch.int8, generator=generator) * 2 - 1


def sketched(g: Tensor, signs: Tensor, width: int) -> Tensor:
    """Return random projections of vectors: coordinate j goes, with its sign, to bin j mod `width`.

    Dot products survive in the mean (Charikar, Chen and Farach-Colton, ICALP 2002).
    """
    whole_bins = g.shape[1] // width * width

    def bins(vector: Tensor) -> Tensor:
        vector = vector * signs
        total = vector[:whole_bins].view(-1, width).sum(dim=0)
        total[: len(vector) - whole_bins] += vector[whole_bins:]
        return total

    return torch.stack([bins(vector) for vector in g])

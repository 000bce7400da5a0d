"""FedHist (Jiang et al., "Knowledge Rumination for Client Utility Evaluation", ICME 2025).

The server keeps the last h global updates `G` and the uploads `L` of the last h rounds. A round has three parts:

EGS  (enhancement of gradient stability) fuses each upload with the least similar past global update       Eqs. 5-7
HAA  (history-aware aggregation) weights clients by staleness and by the past utility of their uploads      Eqs. 8-14
INA  (intelligent norm amplification) gives the aggregate the mean length of the uploads                   Eq. 15

Equations have the numbers of the labels in the paper's source, which skip 9. ``docs/decisions.md`` explains how each
ambiguity of the paper is resolved.
"""

from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor

from fedhist.errors import choice, flag, number, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Device, Strategy, normalised
from fedhist.strategies.lengths import cosine
from fedhist.strategies.rules.twafl import temporal_weight


def hindsight_utility(similarity: Tensor, staleness: Tensor, support: Tensor, threshold: float) -> Tensor:
    """Return `Util = (sim - sim_T)·p_his·|S|` (Eq. 12): a reward above the threshold, a penalty below it."""
    decay = temporal_weight(staleness)
    # Eq. 13: a stale upload is rewarded more and penalised less.
    p_his = torch.where(similarity >= threshold, 1 - decay, decay)
    return (similarity - threshold) * p_his * support  # Eq. 12


def default_h(num_clients: int, k: int) -> int:
    """Return the default memory h in rounds: half of the mean staleness `N/K`, but at least 1."""
    return max(1, round(num_clients / (2 * k)))


class FedHist(Strategy):
    """History-aware K-async aggregation.

    Parameters
    ----------
    h
        Rounds kept in memory. None means `max(1, round(N/(2K)))`.
    alpha
        `α` in Eq. 7: share of the past global update that is added to an upload.
    lam
        `λ` in Eq. 8: weight of a client's utility against its staleness.
    gamma
        `γ` in Eq. 14: weight of the latest utility in a client's moving average.
    sim_threshold
        `sim_T` in Eqs. 12 and 13.
    egs, haa, ina
        Switch the three parts off one by one, as in the paper's ablation.
    ina_direction
        "aggregate" amplifies `Σ p_i g̃_i`; "sum" is Eq. 15 as printed, which has neither `p_i` nor EGS.
    remember_amplified
        Whether `G` keeps global updates after INA (True) or before it.
    memory_dtype
        Precision in which past uploads and global updates are kept: "bfloat16" halves the memory.
    sketch
        Keep this many random projections of each past upload instead of the upload itself. Utilities need
        only cosines, which the sketch gives with an error of about `1/√sketch`.
    """

    branch_free = True
    G: Tensor
    """``(h, P)``: the last global updates. In all buffers of h slots, round r has slot `(r - 1) mod h`."""
    G_norms: Tensor
    L: Tensor
    """``(h, K, P)``: the uploads of the last rounds, as submitted."""
    L_norms: Tensor
    L_staleness: Tensor
    """``(h, K)``: 0 marks an empty place, in a round that closed with fewer than K uploads."""
    L_clients: Tensor
    fresh: Tensor
    """``(h + 1, P)``: the sum of the uploads computed from each of the last h versions, and from all older ones."""
    support: Tensor
    """``(h + 1,)``: the number of these uploads, `|S|`."""
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
        """Allocate `G`, `L`, the sums `|S|·g_pred`, and the clients' utilities."""
        super().setup(num_clients, k, num_params, device)
        h = self.rounds_kept = self.h or default_h(num_clients, k)
        zeros, kept = partial(torch.zeros, device=device), getattr(torch, self.memory_dtype)
        self.register_buffer("round", zeros(1, dtype=torch.int64))  # a tensor, so that a captured round advances it
        if self.egs:
            self.register_buffer("G", zeros(h, num_params, dtype=kept))
            self.register_buffer("G_norms", zeros(h))
        if self.haa:
            width = num_params if self.sketch is None else min(self.sketch, num_params)
            if self.sketch is not None:
                self.register_buffer("signs", random_signs(num_params).to(device), persistent=False)
            self.register_buffer("L", zeros(h, k, width, dtype=kept))
            self.register_buffer("L_norms", zeros(h, k))
            self.register_buffer("L_staleness", zeros(h, k, dtype=torch.int64))
            self.register_buffer("L_clients", zeros(h, k, dtype=torch.int64))
            self.register_buffer("fresh", zeros(h + 1, width))
            self.register_buffer("support", zeros(h + 1, dtype=torch.float64))
            self.register_buffer("utility", zeros(num_clients, dtype=torch.float64))
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update `u` of one round."""
        g, norms = arrivals.deltas, arrivals.deltas.norm(dim=1)
        p = self.last_weights = normalised(self.weights(arrivals))  # Eq. 8
        j = self.least_similar(g, norms) if self.egs else None  # Eqs. 5 and 6
        a = self.average_fused(p, g, j)  # Σ p_i·(g_i + α·G_j), Eqs. 4 and 7
        u = self.restore_length(a, norms) if self.ina else a  # Eq. 15
        self.remember(u if self.remember_amplified else a, norms, arrivals)
        self.judge()  # Eqs. 10-14
        return u

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `p̂_i = (e/2)^-τ_i + λ·Ū(c_i)`, at least 0 (Eq. 8, whose outer sum is a misprint)."""
        weights = temporal_weight(arrivals.staleness)
        if not self.haa:
            return weights
        # Without the clamp two negative weights would normalise to positive ones that favour the worse client.
        return (weights + self.lam * self.utility[arrivals.clients]).clamp_min(0)

    def least_similar(self, g: Tensor, norms: Tensor) -> Tensor:
        """Return the slot `j` of the past update least similar to each upload (Eqs. 5 and 6)."""
        dots = g @ self.G.T if self.G.dtype == g.dtype else torch.stack([g @ u.to(g.dtype) for u in self.G], dim=1)
        similarity = cosine(dots, norms[:, None], self.G_norms)  # Eq. 5
        slots = torch.arange(self.rounds_kept, device=g.device)
        # In the first round all are infinite, and the chosen slot of G is still zero: g̃ = g.
        similarity = similarity.masked_fill(slots >= self.round, torch.inf)
        # The oldest of equals is chosen; similarities that differ by rounding alone are equal.
        oldest_first = (self.round + slots) % self.rounds_kept
        return oldest_first[similarity[:, oldest_first].round(decimals=6).argmin(dim=1)]  # Eq. 6

    def average_fused(self, p: Tensor, g: Tensor, j: Tensor | None) -> Tensor:
        """Return `Σ p_i g̃_i` with `g̃_i = g_i + α·G_j` (Eqs. 4 and 7); without EGS `g̃_i = g_i`."""
        if self.ina and self.ina_direction == "sum":
            return self.average(torch.ones_like(p), g)  # the direction of Eq. 15 as printed
        if j is None:
            return self.average(p, g)
        if not self.averages_plainly or self.G.dtype != g.dtype:
            return self.average(p, g + self.alpha * self.G[j].to(g.dtype))
        # The mean is linear, so the total weight with which each G_j enters is enough, and no g̃_i is formed.
        shares = p @ (j[:, None] == torch.arange(self.rounds_kept, device=g.device)).double()
        return torch.addmv(self.average(p, g), self.G.T, shares.to(g.dtype), alpha=self.alpha)

    def remember(self, u: Tensor, norms: Tensor, arrivals: Arrivals) -> None:
        """Put the round's update into `G` and its uploads into `L`, and add these to the sums of their versions."""
        now = self.round % self.rounds_kept
        if self.egs:
            self.G.index_copy_(0, now, u[None].to(self.G.dtype))
            self.G_norms.index_copy_(0, now, u.norm()[None])
        self.round += 1
        if not self.haa:
            return
        g = arrivals.deltas if self.sketch is None else sketched(arrivals.deltas, self.signs, self.fresh.shape[1])
        rings = self.L, self.L_norms, self.L_staleness, self.L_clients
        for ring, values in zip(rings, (g, norms, arrivals.staleness, arrivals.clients), strict=True):
            ring[:, : len(g)].index_copy_(0, now, values.to(ring.dtype)[None])
        self.L_staleness[:, len(g) :].index_fill_(0, now, 0)
        # In round r an upload of staleness τ stems from version r - τ + 1; Eq. 10 selects all of the same version.
        version = (self.round - arrivals.staleness) % self.rounds_kept
        slot = torch.where(arrivals.staleness <= self.rounds_kept, version, self.rounds_kept)
        _add_rows(self.fresh, slot, g)
        self.support.index_add_(0, slot, torch.ones_like(slot, dtype=self.support.dtype))

    def judge(self) -> None:
        """Update the utilities of the clients in the oldest round of `L`, once `L` holds h rounds (Eqs. 10-14)."""
        if not self.haa:
            return
        oldest = self.round % self.rounds_kept
        g_his, norms, tau, clients = (
            _slot(ring, oldest) for ring in (self.L, self.L_norms, self.L_staleness, self.L_clients)
        )
        total, support = _slot(self.fresh, oldest), _slot(self.support, oldest)  # |S|·g_pred and |S|, Eqs. 10 and 11
        similarity = cosine(g_his.to(total.dtype) @ total, norms, total.norm()).clamp(-1, 1)  # a sketch may exceed 1
        util = hindsight_utility(similarity, tau, support, self.sim_threshold)  # Eqs. 12 and 13
        judged = (self.round >= self.rounds_kept) & (support > 0) & (tau > 0)
        step = self.gamma * (util - self.utility[clients])  # Eq. 14: Ū ← (1 - γ)·Ū + γ·Util
        self.utility.index_add_(0, clients, torch.where(judged, step, 0.0).to(self.utility.dtype))
        self.fresh.index_fill_(0, oldest, 0)  # the slot is the next version's
        self.support.index_fill_(0, oldest, 0)

    def touched(self, arrivals: Arrivals) -> dict[str, Tensor]:
        """Return the slots that a round has written: its own, those of its uploads' versions, and the one cleared."""
        now, oldest = (self.round - 1) % self.rounds_kept, self.round % self.rounds_kept
        version = (self.round - arrivals.staleness) % self.rounds_kept
        fresh = torch.cat([version, oldest, torch.full_like(oldest, self.rounds_kept)])
        slots = {"G": now} if self.egs else {}
        return slots | ({"L": now, "fresh": fresh} if self.haa else {})

    def trace(self) -> dict[str, Tensor]:
        """Return the clients' utilities, and the sums over all rounds of the update's length before and after INA."""
        return ({"utility": self.utility} if self.haa else {}) | super().trace()


def _slot(ring: Tensor, slot: Tensor) -> Tensor:
    """Return one slot of a ring buffer: on the CPU a view, on a GPU a copy, which does not wait for the index."""
    return ring[int(slot)] if ring.device.type == "cpu" else ring.index_select(0, slot)[0]


def _add_rows(sums: Tensor, slot: Tensor, rows: Tensor) -> None:
    """Add each row to the sum in its slot, always in the same order, which `index_add_` does not keep on a GPU."""
    if rows.device.type == "cpu":
        sums.index_add_(0, slot, rows)
    else:
        sums.addmm_((slot == torch.arange(len(sums), device=slot.device)[:, None]).to(rows.dtype), rows)


def random_signs(num_params: int) -> Tensor:
    """Return ``(num_params,)`` random signs, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (num_params,), dtype=torch.int8, generator=generator) * 2 - 1


def sketched(g: Tensor, signs: Tensor, width: int) -> Tensor:
    """Return the count sketch of each vector: coordinate i is added, with its sign, to bin i mod `width`.

    Dot products keep their expected value (Charikar, Chen and Farach-Colton, ICALP 2002).
    """
    whole_bins = g.shape[1] // width * width

    def bins(vector: Tensor) -> Tensor:
        vector = vector * signs
        total = vector[:whole_bins].view(-1, width).sum(dim=0)
        total[: len(vector) - whole_bins] += vector[whole_bins:]
        return total

    return torch.stack([bins(vector) for vector in g])

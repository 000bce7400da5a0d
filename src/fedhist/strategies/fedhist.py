"""FedHist (Jiang et al., "Knowledge Rumination for Client Utility Evaluation", ICME 2025).

The server keeps the last h global updates `G` and the last h rounds of uploads `L`, and uses them
three times:

EGS  each upload is fused with the least similar past global update             (Eqs. 5-7)
HAA  clients are weighed by staleness and by their uploads' utility in hindsight  (Eqs. 8-14)
INA  the aggregate gets back the length that averaging took away                  (Eq. 15)

``docs/decisions.md`` says how each open point of the paper was read.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedhist.arrivals import Arrivals
from fedhist.errors import choice, flag, number, whole
from fedhist.strategies.base import Strategy, cosine, normalised
from fedhist.strategies.twafl import temporal_weight


def hindsight_utility(similarity: Tensor, staleness: Tensor, support: Tensor, threshold: float) -> Tensor:
    """Return `Util = (sim - sim_T)·p_his·|S|` (Eq. 12): a reward above the threshold, a penalty below.

    `p_his` (Eq. 13) makes rewards grow and penalties shrink with the staleness an upload had.
    """
    decay = temporal_weight(staleness)
    p_his = torch.where(similarity >= threshold, 1 - decay, decay)  # Eq. 13
    return (similarity - threshold) * p_his * support  # Eq. 12


def amplified(aggregate: Tensor, length: Tensor) -> Tensor:
    """Return the aggregate's direction at the given length (Eq. 15); a zero aggregate stays zero."""
    norm = aggregate.norm()
    return aggregate * torch.where(norm > 0, length / torch.where(norm > 0, norm, 1.0), 0.0)


class FedHist(Strategy):
    """History-aware K-async aggregation.

    Parameters
    ----------
    history
        `h`: rounds remembered. None means `max(1, round(N/(2K)))`.
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
    weight_floor
        Smallest `p̂` before normalisation. 0 clamps negative ones away; None leaves them negative.
    ina_direction
        "aggregate" amplifies `Σ p_i g̃_i`; "sum" is Eq. 15 to the letter, which drops `p_i` and EGS.
    ina_norms
        Length INA restores: the mean norm of the "submitted" or of the "fused" uploads, or the
        "weighted" mean `Σ p_i ‖g_i‖`.
    remember_amplified
        Whether `G` keeps global updates after INA (True) or before it.
    remember_fused
        Whether `L` keeps uploads after EGS instead of as submitted.
    leave_one_out
        Judge a member of S by a prediction made without it.
    relative_support
        Use `|S|/K` instead of `|S|` in Eq. 12.
    """

    branch_free: ClassVar[bool] = True

    round: Tensor
    global_updates: Tensor
    global_norms: Tensor
    uploads: Tensor
    upload_norms: Tensor
    upload_staleness: Tensor
    upload_clients: Tensor
    fresh_sums: Tensor
    fresh_counts: Tensor
    utility: Tensor

    def __init__(
        self,
        history: int | None = None,
        alpha: float = 0.1,
        lam: float = 0.5,
        gamma: float = 0.1,
        sim_threshold: float = 0.0,
        egs: bool = True,
        haa: bool = True,
        ina: bool = True,
        *,
        weight_floor: float | None = 0.0,
        ina_direction: Literal["aggregate", "sum"] = "aggregate",
        ina_norms: Literal["submitted", "fused", "weighted"] = "submitted",
        remember_amplified: bool = True,
        remember_fused: bool = False,
        leave_one_out: bool = False,
        relative_support: bool = False,
    ) -> None:
        super().__init__()
        self.history = None if history is None else whole("history", history, 1)
        self.alpha, self.lam = number("alpha", alpha, 0), number("lam", lam, 0)
        self.gamma, self.sim_threshold = number("gamma", gamma, 0, 1), number("sim_threshold", sim_threshold, -1, 1)
        self.egs, self.haa, self.ina = flag("egs", egs), flag("haa", haa), flag("ina", ina)
        self.weight_floor = None if weight_floor is None else number("weight_floor", weight_floor, 0)
        self.ina_direction = choice("ina_direction", ina_direction, ("aggregate", "sum"))
        self.ina_norms = choice("ina_norms", ina_norms, ("submitted", "fused", "weighted"))
        self.remember_amplified = flag("remember_amplified", remember_amplified)
        self.remember_fused = flag("remember_fused", remember_fused)
        self.leave_one_out = flag("leave_one_out", leave_one_out)
        self.relative_support = flag("relative_support", relative_support)

    def setup(
        self,
        num_clients: int,
        k: int,
        num_params: int,
        device: torch.device | str | None = None,
    ) -> Self:
        """Allocate `G`, `L`, the running sums behind `g_pred`, and the clients' utilities.

        All are rings of h slots: round r, and the model version handed out at its start, belong to
        slot `(r - 1) mod h`. The counter is a tensor so that a captured round still turns the ring.
        """
        super().setup(num_clients, k, num_params, device)
        h = self.h = self.history or max(1, round(num_clients / (2 * k)))

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))

        buffer("round", (1,), torch.int64)
        if self.egs:
            buffer("global_updates", (h, num_params))
            buffer("global_norms", (h,))
        if self.haa:
            buffer("uploads", (h, k, num_params))
            buffer("upload_norms", (h, k))
            buffer("upload_staleness", (h, k), torch.int64)  # 0 marks an empty place
            buffer("upload_clients", (h, k), torch.int64)
            buffer("fresh_sums", (h, num_params))
            buffer("fresh_counts", (h,), torch.float64)
            buffer("utility", (num_clients,), torch.float64)
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update of one round."""
        g = arrivals.deltas
        norms = g.norm(dim=1)

        partner, partner_dots = self._least_similar(g, norms) if self.egs else (None, None)
        p = self.last_weights = normalised(self.weights(arrivals))
        aggregate = p.to(g.dtype) @ g
        if partner is not None:
            # Σ p_i (g_i + α G_j*(i)), Eqs. 4 and 7, without ever forming the fused uploads
            shares = p @ (partner[:, None] == torch.arange(self.h, device=g.device)).double()
            aggregate.add_(shares.to(g.dtype) @ self.global_updates, alpha=self.alpha)

        update = aggregate
        if self.ina:
            if self.ina_direction == "sum":
                aggregate = g.sum(dim=0)
            update = amplified(aggregate, self._length(norms, p, partner, partner_dots))

        self._remember(arrivals, norms, partner, partner_dots)
        if self.haa:
            self._evaluate()
        if self.egs:
            kept = update if self.remember_amplified else aggregate
            slot = self.round % self.h
            self.global_updates.index_copy_(0, slot, kept[None])
            self.global_norms.index_copy_(0, slot, kept.norm()[None])
        self.round += 1
        return update

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `p̂_i = (e/2)^-τ_i + λ·Ū(c_i)` (Eq. 8, whose outer sum is a misprint)."""
        weights = temporal_weight(arrivals.staleness)
        if not self.haa:
            return weights
        weights = weights + self.lam * self.utility[arrivals.clients]
        # Two negative weights would normalise to positive ones that favour the worse client.
        return weights if self.weight_floor is None else weights.clamp_min(self.weight_floor)

    def _least_similar(self, g: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each upload's collaborator (Eq. 6) and their dot products."""
        dots = g @ self.global_updates.T
        similarity = cosine(dots, norms[:, None], self.global_norms)  # Eq. 5
        slots = torch.arange(self.h, device=g.device)
        # While G is empty all are infinite and a slot that is still zero is chosen: g̃ = g.
        similarity = similarity.masked_fill(slots >= self.round, torch.inf)
        # The oldest of equals wins, and what differs by rounding alone is equal.
        oldest_first = (self.round + slots) % self.h
        partner = oldest_first[similarity[:, oldest_first].round(decimals=6).argmin(dim=1)]  # Eq. 6
        return partner, dots.gather(1, partner[:, None])[:, 0]

    def _fused_norms(self, norms: Tensor, partner: Tensor, dots: Tensor) -> Tensor:
        """Return `‖g_i + α G_j*(i)‖` from the Gram matrix."""
        other = self.global_norms[partner]
        return (norms**2 + 2 * self.alpha * dots + (self.alpha * other) ** 2).clamp_min(0).sqrt()

    def _length(self, norms: Tensor, p: Tensor, partner: Tensor | None, dots: Tensor | None) -> Tensor:
        """Return the length that INA restores, the second factor of Eq. 15."""
        if self.ina_norms == "weighted":
            return p.to(norms.dtype) @ norms
        if self.ina_norms == "fused" and partner is not None and dots is not None:
            norms = self._fused_norms(norms, partner, dots)
        return norms.mean()

    def _remember(self, arrivals: Arrivals, norms: Tensor, partner: Tensor | None, dots: Tensor | None) -> None:
        """Append the round to `L` and to the running sums behind `g_pred`."""
        if not self.haa:
            return
        g, tau, k = arrivals.deltas, arrivals.staleness, len(arrivals)
        if self.remember_fused and partner is not None and dots is not None:
            norms = self._fused_norms(norms, partner, dots)
            g = g + self.alpha * self.global_updates[partner]  # Eq. 7
        slot = self.round % self.h

        def store(ring: Tensor, values: Tensor) -> None:
            ring[:, :k].index_copy_(0, slot, values.to(ring.dtype)[None])
            if k < self.k:  # a round closed by a deadline
                ring[:, k:].index_fill_(0, slot, 0)

        store(self.uploads, g)
        store(self.upload_norms, norms)
        store(self.upload_staleness, tau)
        store(self.upload_clients, arrivals.clients)
        # An upload with staleness τ was computed from the version of slot (round - τ + 1). Those with
        # τ ≤ h are the ones Eq. 10 will find in L when that version becomes the oldest round.
        versions = (self.round - tau + 1) % self.h
        slots = torch.arange(self.h, device=g.device)
        member = (versions == slots[:, None]) & (tau <= self.h)  # (h, K)
        self.fresh_sums.addmm_(member.to(g.dtype), g)
        self.fresh_counts += member.sum(dim=1)

    def _evaluate(self) -> None:
        """Judge the oldest uploads by what arrived since from the model of their round (Eqs. 10-14)."""
        slot = (self.round + 1) % self.h
        uploads, norms = at(self.uploads, slot), at(self.upload_norms, slot)
        tau, clients = at(self.upload_staleness, slot), at(self.upload_clients, slot)
        fresh_sum, support = at(self.fresh_sums, slot), at(self.fresh_counts, slot)

        # g_pred = mean(S) (Eqs. 10, 11); the cosine does not mind that the sum is longer.
        dots, length = (uploads @ fresh_sum).double(), fresh_sum.norm().double()
        if self.leave_one_out:
            own = tau == 1  # of the oldest round, exactly these are members of S
            length = (length**2 - own * (2 * dots - norms.double() ** 2)).clamp_min(0).sqrt()
            dots = dots - own * norms.double() ** 2
            support = support - own.double()
        similarity = cosine(dots, norms, length)
        scale = support / len(tau) if self.relative_support else support
        utility = hindsight_utility(similarity, tau, scale, self.sim_threshold)
        judged = (self.round + 1 >= self.h) & (support > 0) & (tau > 0)
        step = self.gamma * (utility - self.utility[clients])  # Eq. 14
        self.utility.index_add_(0, clients, torch.where(judged, step, 0.0).to(self.utility.dtype))

        # The slot now belongs to the next version.
        self.fresh_sums.index_fill_(0, slot, 0)
        self.fresh_counts.index_fill_(0, slot, 0)


def at(ring: Tensor, slot: Tensor) -> Tensor:
    """Return one slot of a ring: a view on the CPU, where reading the index costs no wait."""
    return ring[int(slot)] if ring.device.type == "cpu" else ring.index_select(0, slot)[0]

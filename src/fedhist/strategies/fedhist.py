"""FedHist (Jiang et al., "Knowledge Rumination for Client Utility Evaluation", ICME 2025).

The server keeps the last h global updates `G` and the last h rounds of uploads `L`, and uses them
three times:

EGS  each upload is fused with the least similar past global update             (Eqs. 5-7)
HAA  clients are weighed by staleness and by their uploads' utility in hindsight  (Eqs. 8-14)
INA  the aggregate gets back the length that averaging took away                  (Eq. 15)

``docs/decisions.md`` says how each open point of the paper was read.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedhist import native
from fedhist.errors import choice, flag, number, whole
from fedhist.strategies.arrivals import Arrivals
from fedhist.strategies.base import Strategy, cosine, normalised
from fedhist.strategies.fused import passes as plain
from fedhist.strategies.fused.passes import Memory, Seen, at
from fedhist.strategies.twafl import temporal_weight


def hindsight_utility(similarity: Tensor, staleness: Tensor, support: Tensor, threshold: float) -> Tensor:
    """Return `Util = (sim - sim_T)·p_his·|S|` (Eq. 12): a reward above the threshold, a penalty below.

    `p_his` (Eq. 13) makes rewards grow and penalties shrink with the staleness an upload had.
    """
    decay = temporal_weight(staleness)
    p_his = torch.where(similarity >= threshold, 1 - decay, decay)  # Eq. 13
    return (similarity - threshold) * p_his * support  # Eq. 12


def default_history(num_clients: int, k: int) -> int:
    """Return how many rounds are remembered where nobody says: half of those between two uploads of a client."""
    return max(1, round(num_clients / (2 * k)))


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
    history_dtype
        Precision in which past uploads and global updates are kept: "bfloat16" halves the memory.
    sketch
        Keep so many random projections of each past upload instead of the upload itself. Utilities need
        only cosines, which such a sketch gives with an error of about `1/√sketch`.
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
    lengths: Tensor
    signs: Tensor

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
        history_dtype: Literal["float32", "bfloat16"] = "float32",
        sketch: int | None = None,
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
        self.history_dtype = choice("history_dtype", history_dtype, ("float32", "bfloat16"))
        self.sketch = None if sketch is None else whole("sketch", sketch, 1)

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
        h = self.h = self.history or default_history(num_clients, k)

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))

        kept = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.history_dtype]
        buffer("round", (1,), torch.int64)
        if self.egs:
            buffer("global_updates", (h, num_params), kept)
            buffer("global_norms", (h,))
        if self.haa:
            width = num_params if self.sketch is None else min(self.sketch, num_params)
            if self.sketch is not None:
                self.register_buffer("signs", random_signs(num_params).to(device), persistent=False)
            buffer("uploads", (h, k, width), kept)
            buffer("upload_norms", (h, k))
            buffer("upload_staleness", (h, k), torch.int64)  # 0 marks an empty place
            buffer("upload_clients", (h, k), torch.int64)
            buffer("fresh_sums", (h, width))
            buffer("fresh_counts", (h,), torch.float64)
            buffer("utility", (num_clients,), torch.float64)
        if self.ina:
            buffer("lengths", (2,), torch.float64)  # of all updates so far, before INA and after
        return self

    def forward(self, arrivals: Arrivals) -> Tensor:
        """Return the global update of one round."""
        g = arrivals.deltas
        now, oldest = self.round % self.h, (self.round + 1) % self.h
        p = self.last_weights = normalised(self.weights(arrivals))
        slots = self._joins(arrivals.staleness)
        to_the_letter = self.ina and self.ina_direction == "sum"

        past = self.global_updates if self.egs else None
        uploads, fresh = (self.uploads, self.fresh_sums) if self.haa else (None, None)
        passes = passes_for(g, past, uploads)
        # What is kept of the uploads is known beforehand, unless it is to be fused or sketched first.
        at_once = self.sketch is None and not self.remember_fused
        memory = Memory(past, uploads if at_once else None, fresh if at_once else None, now, oldest, self.h)
        seen: Seen = passes.sweep(g, torch.ones_like(p) if to_the_letter else p, slots, memory)
        norms, aggregate = seen.norms, seen.aggregate

        partner = self._least_similar(seen.dots, norms) if self.egs else None
        fused_norms = norms
        if partner is not None and (self.remember_fused or self.ina_norms == "fused"):
            fused_norms = self._fused_norms(norms, seen.dots, partner)
        if self.haa:
            if not at_once:
                rest = Memory(None, uploads, fresh, now, oldest, self.h)
                seen = passes.sweep(self._to_keep(g, partner), p, slots, rest)
            self._remember(arrivals, fused_norms if self.remember_fused else norms, slots, now)
            self._judge(oldest, seen.judged, seen.length)

        if not self.averages_plainly:
            summed = g if partner is None or to_the_letter else self._fused(g, partner)
            aggregate = self.average(torch.ones_like(p) if to_the_letter else p, summed)
            norm = aggregate.norm()
        elif partner is None or to_the_letter:
            norm = aggregate.norm()
        else:
            # Σ p_i (g_i + α G_j*(i)), Eqs. 4 and 7, without ever forming the fused uploads
            shares = p @ (partner[:, None] == torch.arange(self.h, device=g.device)).double()
            norm = passes.blend(aggregate, self.global_updates, self.alpha * shares)
        scale = torch.ones_like(norm)
        if self.ina:
            length = self._length(norms, fused_norms, p)
            scale = torch.where(norm > 0, length / torch.where(norm > 0, norm, 1.0), 0.0)  # Eq. 15
            self.lengths += torch.stack([norm, norm * scale])
        remembered = scale if self.remember_amplified else torch.ones_like(scale)
        passes.finish(aggregate, past, torch.stack([scale, remembered]), now)
        if self.egs:
            self.global_norms.index_copy_(0, now, (norm * remembered)[None].to(self.global_norms.dtype))
        self.round += 1
        return aggregate

    def trace(self) -> dict[str, Tensor]:
        """Return the clients' utilities, and the sums over all rounds of the update's length before INA and after."""
        kept = {"utility": self.haa, "lengths": self.ina}
        return {name: getattr(self, name) for name, there in kept.items() if there}

    def weights(self, arrivals: Arrivals) -> Tensor:
        """Return `p̂_i = (e/2)^-τ_i + λ·Ū(c_i)` (Eq. 8, whose outer sum is a misprint)."""
        weights = temporal_weight(arrivals.staleness)
        if not self.haa:
            return weights
        weights = weights + self.lam * self.utility[arrivals.clients]
        # Two negative weights would normalise to positive ones that favour the worse client.
        return weights if self.weight_floor is None else weights.clamp_min(self.weight_floor)

    def _joins(self, staleness: Tensor) -> Tensor:
        """Return the slot whose fresh sum each upload joins; h for none.

        An upload with staleness τ was computed from the version of slot (round - τ + 1). Those with τ ≤ h are
        the ones Eq. 10 will find in L when that version becomes the oldest round.
        """
        return torch.where(staleness <= self.h, (self.round - staleness + 1) % self.h, self.h)

    def _least_similar(self, dots: Tensor, norms: Tensor) -> Tensor:
        """Return the slot of each upload's collaborator (Eq. 6)."""
        similarity = cosine(dots, norms[:, None], self.global_norms)  # Eq. 5
        slots = torch.arange(self.h, device=dots.device)
        # While G is empty all are infinite and a slot that is still zero is chosen: g̃ = g.
        similarity = similarity.masked_fill(slots >= self.round, torch.inf)
        # The oldest of equals wins, and what differs by rounding alone is equal.
        oldest_first = (self.round + slots) % self.h
        return oldest_first[similarity[:, oldest_first].round(decimals=6).argmin(dim=1)]  # Eq. 6

    def _fused_norms(self, norms: Tensor, dots: Tensor, partner: Tensor) -> Tensor:
        """Return `‖g_i + α G_j*(i)‖` from the Gram matrix."""
        with_partner, other = dots.gather(1, partner[:, None])[:, 0], self.global_norms[partner]
        return (norms**2 + 2 * self.alpha * with_partner + (self.alpha * other) ** 2).clamp_min(0).sqrt()

    def _length(self, norms: Tensor, fused_norms: Tensor, p: Tensor) -> Tensor:
        """Return the length that INA restores, the second factor of Eq. 15."""
        if self.ina_norms == "weighted":
            return self.average(p, norms[:, None])[0]
        return self.mean_length(fused_norms if self.ina_norms == "fused" else norms)

    def _fused(self, g: Tensor, partner: Tensor) -> Tensor:
        """Return `g̃_i = g_i + α G_j*(i)` (Eq. 7)."""
        return g + self.alpha * self.global_updates[partner].to(g.dtype)

    def _to_keep(self, g: Tensor, partner: Tensor | None) -> Tensor:
        """Return what `L` keeps of the uploads if not the uploads themselves."""
        if self.remember_fused and partner is not None:
            g = self._fused(g, partner)
        return g if self.sketch is None else sketched(g, self.signs, self.fresh_sums.shape[1])

    def _remember(self, arrivals: Arrivals, norms: Tensor, slots: Tensor, now: Tensor) -> None:
        """Note who uploaded what the pass over the uploads has put into `L`."""
        rings = (self.upload_norms, norms), (self.upload_staleness, arrivals.staleness)
        for ring, values in (*rings, (self.upload_clients, arrivals.clients)):
            ring[:, : len(values)].index_copy_(0, now, values.to(ring.dtype)[None])
            if len(values) < self.k:  # a round closed by a deadline
                ring[:, len(values) :].index_fill_(0, now, 0)
        self.fresh_counts += (slots == torch.arange(self.h, device=slots.device)[:, None]).sum(dim=1)

    def _judge(self, oldest: Tensor, dots: Tensor, length: Tensor) -> None:
        """Judge the oldest uploads by what arrived since from the model of their round (Eqs. 10-14).

        `g_pred = mean(S)` (Eqs. 10, 11); the cosine does not mind that `dots` and `length` are of the sum.
        """
        rings = self.upload_norms, self.upload_staleness, self.upload_clients, self.fresh_counts
        norms, tau, clients, support = (at(ring, oldest) for ring in rings)
        dots, length = dots.double(), length.double()
        if self.leave_one_out:
            own = tau == 1  # of the oldest round, exactly these are members of S
            length = (length**2 - own * (2 * dots - norms.double() ** 2)).clamp_min(0).sqrt()
            dots = dots - own * norms.double() ** 2
            support = support - own.double()
        similarity = cosine(dots, norms, length).clamp(-1, 1)  # a sketch's may be beyond
        scale = support / len(tau) if self.relative_support else support
        utility = hindsight_utility(similarity, tau, scale, self.sim_threshold)
        judged = (self.round + 1 >= self.h) & (support > 0) & (tau > 0)
        step = self.gamma * (utility - self.utility[clients])  # Eq. 14
        self.utility.index_add_(0, clients, torch.where(judged, step, 0.0).to(self.utility.dtype))
        self.fresh_counts.index_fill_(0, oldest, 0)  # the slot now belongs to the next version


def passes_for(g: Tensor, *memory: Tensor | None) -> ModuleType:
    """Return the module whose passes are the fastest that work for these uploads and this memory."""
    kept = [tensor for tensor in memory if tensor is not None]
    known = g.dtype == torch.float32 and all(tensor.dtype in (torch.float32, torch.bfloat16) for tensor in kept)
    return _fused(g.device.type) if known and g.device.type in ("cpu", "cuda") else plain


@lru_cache
def _fused(kind: str) -> ModuleType:
    """Return the passes for a kind of device, if they can be built here."""
    name = {"cpu": "fused.native", "cuda": "fused.kernels"}[kind]
    try:
        passes = import_module(f"fedhist.strategies.{name}")
        one = torch.ones(2, device=kind)
        passes.finish(one, None, one, torch.zeros(1, dtype=torch.int64, device=kind))
    except native.Unavailable:
        return plain
    except Exception as error:  # compilers fail in many ways, and there is another path
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"FedHist's server step is slow here, since its kernels do not work: {reason}", stacklevel=6)
        return plain
    return passes


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

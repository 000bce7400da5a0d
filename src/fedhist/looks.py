"""How things look in figures: a colour, dashes and a marker for each method, the same in every figure.

It needs no drawing library, so that whatever draws can use it.
"""

import zlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Shade(NamedTuple):
    """A colour on white paper, and the same hue on a dark page."""

    day: str
    night: str


class Look(NamedTuple):
    """How a method is drawn; no two of the first 32 share both dashes and marker, so that print needs no colour."""

    colour: str
    night: str
    """The colour on a dark page."""
    dashes: str
    """By matplotlib's names: "-", "--", "-." or ":"."""
    marker: str
    """By matplotlib's names."""


DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "D", "^", "P", "X", "v", "*")
PALETTE = (
    Shade("#0072B2", "#6FBEFC"), Shade("#D55E00", "#FCBFA1"), Shade("#009E73", "#6FE9BA"), Shade("#B5489A", "#FB9DDF"),
    Shade("#289AA4", "#35EBFA"), Shade("#02189A", "#4C79E4"), Shade("#7A11A7", "#C27CEB"), Shade("#3B5A56", "#84A5A0"),
    Shade("#AD9100", "#FCD834"), Shade("#01420B", "#579158"), Shade("#923BE1", "#CCA8FE"), Shade("#61A30A", "#A9EC70"),
    Shade("#68050D", "#CE514C"), Shade("#643E64", "#B388B2"), Shade("#936C03", "#EBB22A"), Shade("#6C4400", "#CC881D"),
    Shade("#CB264F", "#FA9DA6"), Shade("#523DC3", "#9998F8"), Shade("#5C0652", "#BA52A9"), Shade("#472B3D", "#957589"),
    Shade("#0C6B10", "#58BD56"), Shade("#606E80", "#A8B8CC"), Shade("#433404", "#9E7C03"), Shade("#4B0481", "#9665D6"),
    Shade("#043C52", "#418BAD"), Shade("#8F4D15", "#F98925"), Shade("#2999E6", "#B9DEFE"), Shade("#5E7639", "#A6C181"),
    Shade("#0F508D", "#3A9DFE"), Shade("#A47FB4", "#EDC6FF"), Shade("#9D1A54", "#F56F9D"), Shade("#FC5787", "#FFD4DC"),
)  # fmt: skip
"""Colours that are far apart, and those with the same dashes also for readers who do not see red or green."""
METHODS = (
    "FedHist", "FedAvg", "FedBuff", "CA2FL", "REFL", "FedAsync", "FedStale", "MIFA", "Nowcast", "FedProx", "MOON",
    "DynSGD", "SCAFFOLD", "TWAFL", "WKAFL", "Port", "AsyncFedED", "FADAS", "FedFa", "DelayAdaptive", "ACED", "AREA",
    "MA-Light", "FedAdam", "FedBuff + momentum",
)  # fmt: skip
"""Those with a look of their own, in the order of the palette; the rest of it is for methods that are not known."""
PLACES: Mapping[str, int] = MappingProxyType({name: place for place, name in enumerate(METHODS)})
STALENESS = (Shade("#00796B", "#80CBC4"), Shade("#A06000", "#FFD180"), Shade("#B04020", "#FFAB91"))
"""Fresh, in between and stale: strong colours for a white page, pale ones for a dark one."""


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return how methods that are shown together are drawn.

    Methods of the package always look the same. Any other takes the place in the rest of the palette that its name
    gives, or, if another method shown has it, the next that is free; so it looks the same wherever it meets the same
    others, and nearly always elsewhere.
    """
    names = list(dict.fromkeys(names))
    taken = {name: PLACES[name] for name in names if name in PLACES}
    for name in sorted(name for name in names if name not in PLACES):
        taken[name] = _free(name, frozenset(taken.values()))
    return {name: _look(taken[name]) for name in names}


def _free(name: str, taken: frozenset[int]) -> int:
    """Return the first place for a name that nobody has: of the rest, then of methods not shown, then beyond."""
    rest = len(PALETTE) - len(METHODS)
    start = zlib.crc32(name.encode("utf-8", "backslashreplace"))
    order = [len(METHODS) + (start + step) % rest for step in range(rest)]
    order += [(start + step) % len(METHODS) for step in range(len(METHODS))]
    order += range(len(PALETTE), len(PALETTE) + len(taken) + 1)
    return next(place for place in order if place not in taken)


def _look(place: int) -> Look:
    """Return the look at a place; beyond the palette colours come again with other dashes."""
    again, at = divmod(place, len(PALETTE))
    marker = MARKERS[(at // len(DASHES) + again) % len(MARKERS)]
    return Look(*PALETTE[at], DASHES[(at + again) % len(DASHES)], marker)

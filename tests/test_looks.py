from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from fedhist.looks import DASHES, METHODS, PALETTE, looks
from fedhist.paper.league import ENTRANTS
from fedhist.simulation import methods

Floats = NDArray[np.float64]
# Linear sRGB to the cone responses of OKLab, and these to its axes (Ottosson, 2020).
CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
AXES = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
# What remains of linear sRGB without green or red cones (Machado et al., 2009).
WITHOUT_GREEN = [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
WITHOUT_RED = [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]


def linear(colour: str) -> Floats:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def distance(one: str, other: str, seen: list[list[float]] | None = None) -> float:
    """Return how far apart two colours are; 0.02 is just noticeable side by side."""
    lab = []
    for colour in (one, other):
        light = linear(colour) if seen is None else (np.array(seen) @ linear(colour)).clip(0, 1)
        lab.append(np.array(AXES) @ np.cbrt(np.array(CONES) @ light))
    return float(np.linalg.norm(lab[0] - lab[1]))


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("night", [False, True])
def test_colours_are_told_apart_and_stand_out(night: bool) -> None:
    colours = [shade.night if night else shade.day for shade in PALETTE]
    for one, other in itertools.combinations(colours, 2):
        assert distance(one, other) > 0.07, (one, other)
    paper = luminance("#1d2026" if night else "#ffffff")
    for colour in colours:
        low, high = sorted((luminance(colour), paper))
        assert (high + 0.05) / (low + 0.05) >= 3, colour  # WCAG 2.1, 1.4.11


@pytest.mark.parametrize("night", [False, True])
@pytest.mark.parametrize("seen", [WITHOUT_GREEN, WITHOUT_RED])
def test_those_with_the_same_dashes_are_told_apart_without_red_and_green(night: bool, seen: list[list[float]]) -> None:
    for same in range(len(DASHES)):
        colours = [shade.night if night else shade.day for shade in PALETTE[same :: len(DASHES)]]
        for one, other in itertools.combinations(colours, 2):
            assert distance(one, other, seen) > 0.06, (one, other)


def test_every_method_of_the_package_has_a_look_of_its_own() -> None:
    assert {entry.label for entry in methods.METHODS.values()} <= {*METHODS}
    found = looks(METHODS)
    assert len({look.colour for look in found.values()}) == len(METHODS)
    assert len({(look.dashes, look.marker) for look in found.values()}) == len(METHODS), "also without colours"
    assert len({look.colour for look in looks(ENTRANTS).values()}) == len(ENTRANTS)


def test_a_method_looks_the_same_whoever_is_beside_it() -> None:
    alone = looks(["FedHist"])["FedHist"]
    assert alone.colour == "#0072B2" and looks(["Mine", "WKAFL", "FedHist"])["FedHist"] == alone
    mine = looks(["Mine"])["Mine"]
    assert looks(["FedAvg", "Mine"])["Mine"] == looks([*METHODS, "Mine"])["Mine"] == mine


def test_methods_that_are_not_known_collide_with_nobody() -> None:
    names = [*METHODS[:9], *(f"Mine {i}" for i in range(20))]
    found = looks(names)
    assert list(found) == names and len({look.colour for look in found.values()}) == len(names)
    assert looks(reversed(names)) == found, "in whatever order they come"
    many = looks(f"Mine {i}" for i in range(100))
    assert len({(look.colour, look.dashes) for look in many.values()}) == 100


def test_names_may_be_no_text() -> None:
    assert looks(["\udcff"])["\udcff"].colour.startswith("#")


def test_looks_need_no_drawing_library() -> None:
    hide = "import sys\nfor name in ('matplotlib', 'plotly', 'torch', 'numpy'): sys.modules[name] = None\n"
    script = f"{hide}import fedhist.looks as l\nprint(l.looks(['FedHist']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "#0072B2" in done.stdout

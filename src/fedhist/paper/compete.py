"""The league from beginning to end: tune and test what is missing, then write and print tables and a picture."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedhist.errors import choice, require, unknown, whole
from fedhist.paper.cells import Cell
from fedhist.paper.league import (
    BASELINE,
    ENTRANTS,
    FIRST_SEED,
    SETTINGS,
    SHIPPED,
    SIDE_BY_SIDE,
    TUNING_SEED,
    Choice,
    Entrant,
    Setting,
    chosen,
    tested_cells,
    tuning_cells,
)
from fedhist.paper.runner import methods_in
from fedhist.paper.session import Session, share_of
from fedhist.paper.standings import TABLES, Played, draw, everywhere
from fedhist.paper.tables import Results
from fedhist.simulation.methods import as_method, spelled_out

PICTURE = "standings"
Key = tuple[Setting, str]
"""A setting, and the name of a method that takes part in it."""


def compete(
    *,
    scale: str = "full",
    strategies: Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    seeds: int = 5,
    first_seed: int = FIRST_SEED,
    out: str | Path = "league",
    device: str = "auto",
    data_dir: str | Path | None = None,
    part: str = "1/1",
    redraw: bool = False,
    packed: bool = False,
    quiet: bool = False,
    entrants: Mapping[str, Entrant] = ENTRANTS,
    shipped: Path = SHIPPED,
) -> None:
    """Run what is missing of the league, then write and print its tables and draw its picture.

    The parameters are the options of ``fedhist league``. With `strategies` only those are run, and shown among all
    others whose runs are there: in the folder `out`, or in `shipped`, those that come with the package.
    """
    known = SETTINGS[choice("scale", scale, tuple(SETTINGS))]
    for name in settings or []:
        if name not in known:
            raise unknown("setting", name, known)
    whole("seeds", seeds, 1)
    fits = whole("first_seed", first_seed, 0) > TUNING_SEED
    require(fits, f"first_seed must be above {TUNING_SEED}, with which rates are chosen, got {first_seed}.")
    named, share = _named(strategies or [], entrants), share_of(part)
    specs = {entrant.spec for entrant in named.values()}
    there = {name: each for name, each in _there_before(out, entrants).items() if name not in specs}
    everybody = {**entrants, **there, **named}

    session = Session(
        out, device=device, data_dir=data_dir, redraw=redraw, beside=shipped, side_by_side=SIDE_BY_SIDE, quiet=quiet
    )
    shown = [known[name] for name in settings] if settings else _played_before(known, session, entrants)
    keys = [(setting, name) for setting in shown for name, each in everybody.items() if each.fits(setting)]
    own = [key for key in keys if (key[1] in named if named else key[1] not in there)][share]
    trials = {key: tuning_cells(_pair(key, everybody)) for key in keys}
    tried = _finished("to choose rates", trials, own, session)
    choices = {key: found for key in keys if (found := chosen(tried, _pair(key, everybody))) is not None}
    tests = {key: tested_cells(_pair(key, everybody), found, seeds, first_seed) for key, found in choices.items()}
    runs = _finished("on the test set", tests, [key for key in own if key in tests], session)
    _show(session, [_played(setting, everybody, choices, tests, runs) for setting in shown])
    session.end(packed, shortened)


def _named(strategies: Iterable[str], entrants: Mapping[str, Entrant]) -> dict[str, Entrant]:
    """Return the methods that are asked for by their names in tables: those of the league, or others."""
    named: dict[str, Entrant] = {}
    by_name = {name.lower(): entrant.spec for name, entrant in entrants.items()}
    for given in map(str.strip, strategies):
        spec = by_name.get(given.lower()) or " + ".join(spelled_out(given))
        listed = {name: entrant for name, entrant in entrants.items() if entrant.spec.lower() == spec.lower()}
        if not listed:
            name = as_method(spec).name
            # A class of the user's may be called like a method of the league, or like another one of theirs.
            listed = {spec if name in entrants or name in named else name: Entrant(spec)}
        named |= listed
    return named


def _there_before(out: str | Path, entrants: Mapping[str, Entrant]) -> dict[str, Entrant]:
    """Return other methods that have runs in a folder, by their text: a class that a file names is not imported."""
    ratios = {setting.ratio for scale in SETTINGS.values() for setting in scale.values()}
    known = {entrant.spec_at(ratio) for entrant in entrants.values() for ratio in ratios}
    return {spec: Entrant(spec, listed=False) for spec in methods_in(Path(out)) if spec not in known}


def _played_before(settings: Mapping[str, Setting], session: Session, entrants: Mapping[str, Entrant]) -> list[Setting]:
    """Return the settings in which the baseline has been tuned; all where there is none, as before a first run."""
    there = [
        setting
        for setting in settings.values()
        if (cells := tuning_cells((setting, entrants[BASELINE]))) and len(session.found(cells)) == len(cells)
    ]
    left = [name for name, setting in settings.items() if setting not in there] if there else []
    if left:
        print(f"Left out: {', '.join(left)}, for which there are no runs yet; name it with --setting to run it.")
    return there or list(settings.values())


def _pair(key: Key, entrants: Mapping[str, Entrant]) -> tuple[Setting, Entrant]:
    return key[0], entrants[key[1]]


def _finished(what: str, cells: Mapping[Key, Sequence[Cell]], own: Iterable[Key], session: Session) -> Results:
    """Run what is missing of some methods; return all results there are."""
    everything, mine = ([cell for key in keys for cell in cells[key]] for keys in (cells, own))
    return session.finished(everything, mine, what)


def _played(
    setting: Setting,
    entrants: Mapping[str, Entrant],
    choices: Mapping[Key, Choice],
    tests: Mapping[Key, Sequence[Cell]],
    runs: Results,
) -> Played:
    """Return what there is of a setting; a method whose seeds are not complete is left out."""
    done = [name for (s, name), cells in tests.items() if s == setting and all(cell in runs for cell in cells)]
    return Played(
        setting,
        {name: entrants[name] for name in done},
        {name: choices[setting, name] for name in done},
        {name: {cell.seed: runs[cell] for cell in tests[setting, name]} for name in done},
    )


def _show(session: Session, season: Sequence[Played]) -> None:
    played = [each for each in season if each.scores]
    # Where nobody but a newcomer has been, nobody can be compared with it.
    played = [each for each in played if BASELINE in each.scores] or played
    if not played:
        print("No method has all its runs yet.")
        return
    for name, table in TABLES.items():
        if text := table(played):
            session.show(name, text)
    if everywhere(played):
        session.draw(PICTURE, partial(draw, played))


def shortened(line: str) -> str:
    """Return a packed run with what tables need and how it was made, in few bytes."""
    stored: dict[str, Any] = json.loads(line)
    cell = Cell(**stored["cell"])
    kept: dict[str, Any] = {"cell": cell.given, "accuracy": [round(value, 4) for value in stored["accuracy"]]}
    if "time" in stored and not cell.validation:
        kept["time"] = [round(value, 1) for value in stored["time"]]
    if cell.rare:
        kept |= {name: [round(value, 4) for value in stored[name]] for name in ("per_class", "per_tier")}
    same = ("parameters", "code", "diverged", "fedhist", "torch", "device", "date")
    return json.dumps(kept | {name: stored[name] for name in same if name in stored}, separators=(",", ":"))

"""The league: who is tuned how, what is chosen, what is concluded, and a small one from beginning to end."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedhist.paper import compete as whole, league, runner, standings
from fedhist.paper.cells import LAST
from fedhist.paper.compete import compete, shortened
from fedhist.paper.league import ENTRANTS, SETTINGS, Choice, Entrant, Setting
from fedhist.paper.standings import Played
from fedhist.simulation.methods import as_method
from tests.command.calls import fails, succeeds

TINY = Setting("rare class, 10", "digits", 6, k=2, rare=True, rates=(0.05, 0.15))
STEPS = replace(TINY, title="5 steps", local_steps=5, rare=False, paced=True, rates=(0.15,))
EVERY_PAIR = [
    (setting, entrant)
    for settings in SETTINGS.values()
    for setting in settings.values()
    for entrant in ENTRANTS.values()
    if entrant.fits(setting)
]

pytestmark = pytest.mark.xdist_group("league")  # one process makes what these tests look at


@pytest.fixture(scope="module", autouse=True)
def _smaller() -> Iterator[None]:
    """Let the smoke scale be smaller here."""
    with mock.patch.dict(SETTINGS, smoke={"rare-10": TINY, "five-0.3-10": STEPS}):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a league of two methods in two settings."""
    folder = tmp_path_factory.mktemp("league")
    named = ("--strategy", "fedavg", "--strategy", "fedhist")
    printed = succeeds("league", "--scale", "smoke", "--seeds", "2", *named, "--out", folder, cwd=folder).err
    assert "Runs to choose rates: 0 of 21 are there already." in printed  # FedAvg also synchronously
    assert "Runs on the test set: 0 of 10 are there already." in printed
    return folder


def table_of(folder: Path, name: str) -> dict[str, list[str]]:
    """Return the rows of a table that was written, by their first column."""
    rows = [line.strip("| ").split(" | ") for line in (folder / f"{name}.md").read_text().splitlines() if "|" in line]
    return {row[0].strip("*"): row[1:] for row in rows}


def test_there_are_twelve_settings_and_all_methods_meet_in_them() -> None:
    full = SETTINGS["full"]
    assert len(full) == 12 and len({setting.title for setting in full.values()}) == 12
    everywhere = [entrant for entrant in ENTRANTS.values() if all(map(entrant.fits, full.values()))]
    assert len(everywhere) == 23
    for name in ("SCAFFOLD", "FedProx"):
        assert not any(ENTRANTS[name].fits(s) for s in full.values() if s.local_steps == 1)
    for name in ("FedAsync, K = 1", "FedAvg, synchronous"):
        assert [s.local_steps for s in full.values() if ENTRANTS[name].fits(s)] == [1, 5]


@pytest.mark.parametrize("name", ENTRANTS)
def test_every_method_exists(name: str) -> None:
    assert as_method(ENTRANTS[name].spec_at(10)).name


def test_every_method_has_the_same_trials() -> None:
    for setting in SETTINGS["full"].values():
        grids = {
            tuple((cell.lr, cell.server_lr, cell.k * cell.rounds) for cell in league.tuning_cells((setting, entrant)))
            for entrant in ENTRANTS.values()
            if entrant.fits(setting)
        }
        assert len(grids) == 1 and len(grids.pop()) == 9


def test_tuning_sees_neither_the_test_set_nor_the_tested_seeds() -> None:
    choice = Choice(0.01, 1.0, {}, alike=True)
    for pair in EVERY_PAIR:
        tuning, tested = league.tuning_cells(pair), league.tested_cells(pair, choice, 5)
        assert all(cell.validation for cell in tuning) and not any(cell.validation for cell in tested)
        assert {cell.seed for cell in tuning} == {0} and {cell.seed for cell in tested} == {*range(100, 105)}
        assert 2 * tuning[0].rounds == tested[0].rounds == pair[0].rounds * pair[0].k // tested[0].k
        assert {cell.clients for cell in (*tuning, *tested)} == {pair[0].clients}
        evaluations = runner._evaluations(tuning[0].rounds, tuning[0].eval_every)
        assert LAST < len(evaluations) <= league.EVALUATIONS


def test_a_table_can_be_tested_with_other_seeds() -> None:
    pair = SETTINGS["full"]["rare-10"], ENTRANTS["FedHist"]
    choice = league.Choice(0.1, 1.0, {}, alike=True)
    assert [cell.seed for cell in league.tested_cells(pair, choice, 3, 200)] == [200, 201, 202]
    assert [cell.seed for cell in league.tested_cells(pair, choice, 2)] == [100, 101]


def test_keys_tell_all_runs_apart() -> None:
    choice = Choice(0.01, 1.0, {}, alike=True)
    cells = [c for pair in EVERY_PAIR for c in (*league.tuning_cells(pair), *league.tested_cells(pair, choice, 5))]
    assert len({cell.key for cell in cells}) == len({*cells}) == len(cells)


def test_other_paces_have_as_many_updates() -> None:
    setting = SETTINGS["full"]["one-0.3-10"]
    alone = league.cell_of((setting, ENTRANTS["FedAsync, K = 1"]), 0.1, 1.0, 100)
    assert (alone.k, alone.rounds, alone.clients, alone.concurrency) == (1, 15_000, 100, None)
    synchronous = league.cell_of((setting, ENTRANTS["FedAvg, synchronous"]), 0.1, 1.0, 100)
    assert (synchronous.k, synchronous.rounds, synchronous.concurrency) == (10, 1500, 10)


def result(percent: float, **more: Any) -> dict[str, Any]:
    same = {"round": [1], "time": [1.0], "parameters": 10, "diverged": False}
    return {"accuracy": [percent / 100], **same, **more}


def test_the_best_pair_is_chosen_once_all_were_tried() -> None:
    pair = TINY, ENTRANTS["FedAvg"]
    accuracies = {(0.05, 0.1): 20.0, (0.05, 1.0): 31.0, (0.05, 10.0): 10.0, (0.15, 0.1): 30.0, (0.15, 1.0): 10.0}
    cells = league.tuning_cells(pair)
    tried = {cell: result(accuracies.get((cell.lr, cell.server_lr), 10.0)) for cell in cells}
    choice = league.chosen(tried, pair)
    assert choice is not None and (choice.lr, choice.server_lr) == (0.05, 1.0)
    assert {cell.server_lr for cell in league.tested_cells(pair, choice, 3)} == {1.0}
    assert league.chosen({cell: tried[cell] for cell in cells[1:]}, pair) is None
    at_chance = {cell: result(10.0, diverged=True) for cell in cells} | {cells[4]: result(9.8)}
    better = league.chosen(at_chance, pair)  # than one that diverged, which counts as guessing
    assert better is not None and (better.lr, better.server_lr) == (cells[4].lr, cells[4].server_lr)
    equal = league.chosen({cell: result(10.0) for cell in cells}, pair)
    assert equal is not None and (equal.lr, equal.server_lr) == (0.05, 0.1)


@pytest.mark.parametrize(
    ("alike", "best", "others", "arrows"),
    [
        (False, (0.1, 10.0), {}, ("↑", "↑")),
        (False, (0.01, 1.0), {}, ("↓", "")),
        (False, (0.03, 1.0), {}, ("", "")),
        (False, (0.1, 1.0), {(0.03, 1.0): 49.9}, ("", "")),  # it is as good inside
        (True, (0.01, 10.0), {}, ("", "")),  # a shorter and a longer step were tried with other rates
        (True, (0.1, 1.0), {}, ("", "")),
        (True, (0.1, 1.0), {(0.03, 10.0): 49.9}, ("↑", "")),  # a longer step is as good
        (True, (0.1, 10.0), {}, ("↑", "↑")),
        (True, (0.03, 10.0), {(0.1, 10.0): 49.9}, ("", "↑")),  # the client's rate has no effect, so it is the server's
    ],
)
def test_rates_at_the_end_of_a_range_are_marked_where_that_matters(
    alike: bool, best: tuple[float, float], others: Mapping[tuple[float, float], float], arrows: tuple[str, str]
) -> None:
    grid = [(lr, server) for lr in league.IMAGE_RATES for server in league.SERVER_RATES]
    tried = {pair: 50.0 if pair == best else others.get(pair, 30.0) for pair in grid}
    assert Choice(*best, tried, alike).ends() == arrows


def played(setting: Setting = TINY, **percents: tuple[float, ...]) -> Played:
    choices = {name: Choice(0.1, 1.0, {(0.1, 1.0): 1.0}, alike=True) for name in percents}
    entrants = {name: Entrant(name.lower()) for name in percents}
    runs = {
        name: {100 + i: result(value, per_class=[value / 200] * 10) for i, value in enumerate(values)}
        for name, values in percents.items()
    }
    return Played(setting, entrants, choices, runs)


def test_level_with_the_best() -> None:
    """Differences of 1, 2, 3 have t = 2√3, p = 0.0742; of 9, 10, 11 p = 0.0033, and twice that after Holm."""
    one = played(FedHist=(50, 50, 50), FedAvg=(49, 48, 47), REFL=(41, 40, 39))
    assert standings.best_of(one.scores) == "FedHist"
    assert standings.level(one.scores) == {"FedHist", "FedAvg"}
    assert standings.level(played(FedHist=(50,), FedAvg=(49,)).scores) == {"FedHist"}


def test_distances_and_ranks() -> None:
    season = [played(FedHist=(50, 52), FedAvg=(48, 48), REFL=(40, 41)), played(FedHist=(30, 30), FedAvg=(31, 33))]
    assert standings.behind(season, "FedAvg") == [pytest.approx({100: 2, 101: 4}), pytest.approx({100: 0, 101: 0})]
    mean, half = standings.mean_behind(standings.behind(season, "FedAvg"))
    assert (mean, half) == pytest.approx((1.5, 12.7062 * 0.5), rel=1e-4)  # 1 and 2; t with one degree of freedom
    assert standings.mean_ranks(season) == {"FedHist": 1.5, "FedAvg": 1.5}  # REFL was not in all
    assert standings.in_order(season) == ["FedHist", "FedAvg", "REFL"]
    long = [season[0]] * 9 + [replace(season[0], runs={"FedAvg": season[0].runs["FedAvg"]})]
    assert standings.everywhere(long) == ["FedAvg"] and "FedHist" in standings.nearly_everywhere(long)
    assert "FedHist" not in standings.nearly_everywhere(long[1:])
    # Demšar (2006), Table 5: q = 2.728 for five methods.
    assert standings.critical_difference(5, 30) == pytest.approx(2.728 * (5 * 6 / 180) ** 0.5, rel=1e-3)


def test_tables_by_hand() -> None:
    season = [played(FedHist=(50, 52, 51), FedAvg=(48, 50, 49), REFL=(40, 44, 39))]
    assert "| FedAvg | 49.0 |" in standings.accuracy(season).splitlines()
    assert "| FedHist | **51.0** |" in standings.accuracy(season).splitlines()
    assert "| REFL | 41.0 ± 2.6 | 20.5 ± 1.3 | -4.0 ± 2.5 |" in standings.rare(season).splitlines()
    summary = standings.summary(season).splitlines()
    assert summary[2].startswith("| **FedHist** | 0.0 ± 0.0 | 0.0 | 1.0 | 1 of 1 |")
    assert summary[3] == "| FedAvg | 2.0 ± 0.0 | 2.0 | 2.0 | 0 of 1 | 0 of 3 | 0 bytes | 80 bytes |"
    assert "| FedAvg | 0.1 × 1 |" in standings.rates(season).splitlines()


def test_time_to_a_target() -> None:
    run = {"time": [10.0, 20.0, 30.0], "accuracy": [0.2, 0.4, 0.3]}
    assert standings.time_to(run, 0.3) == pytest.approx(15.0)
    assert standings.time_to(run, 0.1) == 10.0
    assert standings.time_to(run, 0.5) == standings.time_to({"time": [], "accuracy": [0.9]}, 0.5) == float("inf")
    season = [played(FedAvg=(50, 50), FedHist=(60, 44), REFL=(20, 30))]
    assert season[0].target == pytest.approx(0.45)
    table = standings.times(season).splitlines()
    assert {"| FedAvg | 1.0 |", "| FedHist | 1.0 (1 never) |", "| REFL | never |"} <= {*table}


def test_everything_is_written(folder: Path) -> None:
    for name in standings.TABLES:
        assert {"FedAvg", "FedHist"} <= table_of(folder, name).keys(), name
    assert "FedAvg, synchronous" in table_of(folder, "pace")
    assert "FedAvg, synchronous" not in table_of(folder, "accuracy")
    assert (folder / f"{whole.PICTURE}.png").read_bytes()[:4] == b"\x89PNG"
    for file in folder.glob("*.json"):
        stored = json.loads(file.read_text())
        if "diverged" not in stored:
            assert len(stored["time"]) == len(stored["accuracy"]) and stored["time"] == sorted(stored["time"])


def test_a_method_of_ones_own_gets_its_row_among_finished_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed"
    shutil.copytree(folder, packed)
    succeeds("league", "--scale", "smoke", "--seeds", "2", "--out", packed, "--redraw", "--pack", cwd=tmp_path)
    assert not list(packed.glob("*.json"))
    for name in standings.TABLES:
        assert (packed / f"{name}.md").read_text() == (folder / f"{name}.md").read_text(), name

    monkeypatch.setattr(whole.compete, "__kwdefaults__", {**compete.__kwdefaults__, "shipped": packed / runner.ARCHIVE})
    own = ("league", "--scale", "smoke", "--seeds", "2", "--strategy", "fedavg:by_examples=false", "--out", "mine")
    printed = succeeds(*own, "--setting", "rare-10", cwd=tmp_path).err
    assert "Runs to choose rates: 0 of 6 are there already." in printed
    mine = tmp_path / "mine"
    assert {json.loads(f.read_text())["cell"]["method"] for f in mine.glob("*.json")} == {"fedavg:by_examples=false"}
    assert len(list(mine.glob("*.json"))) == 6 + 2
    rows = table_of(mine, "accuracy")
    assert rows.keys() > {"FedAvg", "FedHist", "FedAvg(by_examples=False)"}
    assert rows["FedAvg"][0].strip("*") == table_of(folder, "accuracy")["FedAvg"][0].strip("*")
    again = succeeds(*own, "--setting", "rare-10", cwd=tmp_path).err
    assert "Runs to choose rates: 6 of 6 are there already." in again
    assert "Runs on the test set: 2 of 2 are there already." in again
    succeeds("league", "--scale", "smoke", "--seeds", "2", "--redraw", "--out", "mine", cwd=tmp_path)
    assert "fedavg:by_examples=false" in table_of(mine, "accuracy")  # its row stays when others are looked at


def test_runs_of_other_code_are_not_taken_for_those_of_a_changed_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "stale_rules.py").write_text(
        "import fedhist as fh\n\n\nclass Rule(fh.Strategy):\n"
        "    def weights(self, arrivals):\n        return 1 / arrivals.staleness**2\n"
    )
    own = ("league", "--scale", "smoke", "--seeds", "1", "--strategy", "stale_rules:Rule", "--setting", "rare-10")
    succeeds(*own, cwd=tmp_path)
    monkeypatch.delitem(sys.modules, "stale_rules")
    again = succeeds(*own, "--pack", cwd=tmp_path).err
    assert "Runs to choose rates: 6 of 6 are there already." in again
    changed = sys.modules["stale_rules"].Rule
    monkeypatch.setattr(changed, "weights", lambda self, arrivals: 1 / arrivals.staleness**3)
    sentence = "the code of stale_rules:Rule has changed since 6 of its runs in league were made; take another folder"
    assert sentence in fails(*own, cwd=tmp_path)


def test_names_in_tables_are_not_given_twice() -> None:
    assert [*whole._named(["FedHist ", "fedavg"], ENTRANTS)] == ["FedHist", "FedAvg", "FedAvg, synchronous"]
    assert whole._named(["aced"], ENTRANTS) == {"ACED": ENTRANTS["ACED"]}  # with the league's options
    assert [*whole._named(["fedavg:ina=false"], ENTRANTS)] == ["fedavg:ina=false"]
    assert [*whole._named(["fedhist:ina=false"], ENTRANTS)] == ["FedHist(ina=False)"]


def test_packing_shortens_once(folder: Path) -> None:
    line = next(folder.glob("*.json")).read_text()
    short = shortened(line)
    assert shortened(short) == short and len(short) < 0.6 * len(line)
    (key, ours), (same, theirs) = runner._checked(line), runner._checked(short)
    assert key == same and ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-4)


def test_parts_share_the_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method is tuned and tested in one part, which need not wait for another."""
    taken: list[set[tuple[str, bool]]] = []

    def noted(self: object, cells: list[Any], own: list[Any], what: str = "") -> dict[Any, Any]:
        taken.append({(cell.method, cell.rare) for cell in own})
        return {}

    monkeypatch.setattr(whole.Session, "finished", noted)
    two = {name: ENTRANTS[name] for name in ("FedAvg", "FedHist")}
    for part in ("1/2", "2/2"):
        compete(scale="smoke", out=tmp_path, part=part, entrants=two, settings=["rare-10"])
    assert taken == [{("fedavg", True)}, set(), {("fedhist", True)}, set()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seeds", "0"], "seeds must be at least 1, got 0."),
        (["--first-seed", "0"], "first_seed must be above 0, with which rates are chosen, got 0."),
        (["--setting", "rare-11"], "unknown setting 'rare-11': did you mean 'rare-10'?"),
        (["--scale", "huge"], "scale must be 'full' or 'smoke', got 'huge'."),
        (["--part", "3/2"], "part must look like 2/8, the second of eight shares, got '3/2'."),
        (["--strategy", "fedhits"], "unknown strategy 'fedhits': did you mean 'fedhist'?"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    assert fails("league", *arguments, cwd=tmp_path).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "simulate_many", interrupted)
    with pytest.raises(SystemExit, match="130"):
        compete(scale="smoke", strategies=["fedhist"], settings=["rare-10"], out=tmp_path)


def test_pages_show_the_shipped_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python docs/site/league.py`` makes them so."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "site"))
    import league as pages  # type: ignore[import-not-found]  # noqa: PLC0415

    shown = {name for page in pages.PAGES for _, name, _ in pages.MARKED.findall(page.read_text(encoding="utf-8"))}
    assert shown == {*standings.TABLES, "picture", "short"}
    if not league.SHIPPED.exists():
        pytest.skip("no runs come with this version")
    compete(out=tmp_path, redraw=True)
    for page in pages.PAGES:
        assert pages.filled(page, tmp_path) == page.read_text(encoding="utf-8"), page
    assert pages.SHOWN.stat().st_size > 10_000

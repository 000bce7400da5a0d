"""``fedhist world``: its table, its picture, its list, and what ends in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedhist.command.settings import all_options
from fedhist.command.world import OTHERS
from fedhist.report import world_figure
from fedhist.simulation.trial import Trial
from fedhist.world.availability import AVAILABILITIES
from fedhist.world.closing import CLOSINGS
from fedhist.world.coupling import COUPLINGS
from fedhist.world.speeds import SOURCES, SPEEDS
from tests.command.calls import Result, fails, succeeds

QUICK = ["--clients", "20", "--rounds", "40"]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the picture, which takes longer than all else."""
    monkeypatch.setattr(world_figure, "draw", lambda world, path: path)


def columns(result: Result) -> list[str]:
    """Return the names in the table's header."""
    header = next(line for line in result.out.splitlines() if "rounds close by" in line)
    return [name.strip() for name in header.strip("┃").split("┃")][1:]


def row(result: Result, name: str) -> list[str]:
    line = next(line for line in result.out.splitlines() if line.startswith(f"│ {name} "))
    return [value.strip() for value in line.strip("│").split("│")][1:]


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    result = succeeds("world", "--clients", "20", cwd=tmp_path)
    assert columns(result) == ["K = 1", "K = 2", "K = 10"]
    assert "digits, 20 clients, speeds LogNormal(sigma=0.5, jitter=1.0)" in result.out
    assert row(result, "mean staleness") == ["19.9", "10.0", "2.0"], "about N/K"
    assert result.out.splitlines()[-1] == "The picture is in world.png."
    assert (tmp_path / "world.png").stat().st_size > 50_000
    assert not (tmp_path / "runs").exists(), "nothing is run"


def test_ways_to_close_rounds_side_by_side(tmp_path: Path) -> None:
    ways = ["--k", "5", "--closing", "synchronous:k=5,over_select=2", "--closing", "deadline:seconds=1"]
    result = succeeds("world", *QUICK, *ways, "--concurrency", "15", "--out", "deep/a.svg", cwd=tmp_path)
    assert columns(result) == ["K = 5", "synchronous, 5 of 10", "deadline 1"]
    assert row(result, "rounds") == ["40", "40", "40"] and row(result, "work wasted")[0] == "0 %"
    assert int(row(result, "work wasted")[1].removesuffix(" %")) > 30
    assert (tmp_path / "deep" / "a.svg").read_text().startswith("<?xml")


@pytest.mark.usefixtures("undrawn")
def test_until_is_a_time_for_all(tmp_path: Path) -> None:
    constant = ["--speeds", "constant:time=2", "--k", "20", "--closing", "synchronous:k=3", "--until", "9"]
    result = succeeds("world", "--clients", "20", *constant, cwd=tmp_path)
    assert row(result, "rounds") == ["4", "4"] and row(result, "last close") == ["8.00", "8.00"]


@pytest.mark.usefixtures("undrawn")
def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('clients = 20\nk = 4\nrounds = 30\nlr = 0.2\nstrategy = ["fedavg", "fedhist"]\n')
    assert columns(succeeds("world", "--config", "a.toml", cwd=tmp_path)) == ["K = 4"]
    assert columns(succeeds("world", "--config", "a.toml", "--closing", "arrival", cwd=tmp_path)) == ["arrival"]
    assert columns(succeeds("world", "--config", "a.toml", "--k", "2", cwd=tmp_path)) == ["K = 2"]
    arms = '[[arm]]\nstrategy = "fedavg"\nclosing = "synchronous:k=4"\nname = "waits"\n[[arm]]\nstrategy = "fedhist"\n'
    (tmp_path / "b.toml").write_text(f"clients = 20\nrounds = 30\n{arms}")
    result = succeeds("world", "--config", "b.toml", cwd=tmp_path)
    assert columns(result) == ["waits", "FedHist"] and row(result, "mean staleness")[0] == "1.0"


@pytest.mark.usefixtures("undrawn")
def test_recorded_arrivals(tmp_path: Path) -> None:
    work = "".join(f"phone-{i % 9},{i // 9},{i // 9 + 0.5 + i % 9 / 20}\n" for i in range(36))
    (tmp_path / "log.csv").write_text("client,start,end\n" + work)
    result = succeeds("world", "--clients", "9", "--schedule", "log.csv", cwd=tmp_path)
    assert columns(result) == ["K = 1", "K = 4"] and row(result, "rounds") == ["36", "9"]
    assert "recorded arrivals" in result.out and "work wasted" not in result.out


@pytest.mark.usefixtures("undrawn")
def test_a_world_that_ends(tmp_path: Path) -> None:
    result = succeeds("world", "--clients", "20", "--k", "5", "--availability", "always:leave=3", cwd=tmp_path)
    assert re.search(r"^K = 5: after round \d+, at time .* no client is at work or comes back", result.out, flags=re.M)


@pytest.mark.usefixtures("undrawn")
def test_a_notice_is_printed_once(tmp_path: Path) -> None:
    result = succeeds("world", "--clients", "300", "--beta", "0.05", "--rounds", "3", cwd=tmp_path)
    assert result.err.startswith("Note: Dirichlet(beta=0.05)") and result.err.count("\n") == 1


def test_the_list_names_everything(tmp_path: Path) -> None:
    listed = succeeds("world", "--list", cwd=tmp_path).out
    names = {line.split(" ")[0] for line in listed.splitlines()}
    assert {*SPEEDS, *AVAILABILITIES, *COUPLINGS, *CLOSINGS} <= names
    assert SOURCES.keys() <= {*SPEEDS, *AVAILABILITIES}
    assert all(source in " ".join(listed.split()) for source in SOURCES.values())
    assert "over_select=1.0" in listed and "latency=0.0" in listed
    assert not (tmp_path / "world.png").exists()


def test_the_flags_are_those_that_matter(tmp_path: Path) -> None:
    text = succeeds("world", "--help", cwd=tmp_path).out
    known = all_options()
    for name, each in known.items():
        if each.panel in ("World", "Data") or name in OTHERS:
            assert f"--{name.replace('_', '-')} " in text, name
    assert not {"--lr ", "--attack ", "--clip ", "--trainer "} & {*re.findall(r"--[\w-]+ ", text)}
    assert "N/100, N/10 and N/2" in " ".join(text.replace("│", " ").split())
    assert set(OTHERS) <= known.keys()
    assert "fedhist world --list" in (Trial.__doc__ or "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--k", "30"], "k=30 is more than the 20 clients there are."),
        (["--k", "0"], "k must be at least 1, got 0."),
        (["--closing", "sync"], "unknown closing 'sync': did you mean 'synchronous'?"),
        (["--closing", "deadline:seconds=0"], "seconds must be positive, got 0."),
        (["--closing", "synchronous:k=5", "--concurrency", "5"], "concurrency is what Synchronous"),
        (["--k", "5", "--concurrency", "3"], "concurrency must lie between k=5 and the number of clients 20, got 3."),
        (["--speeds", "lognorm"], "unknown speeds 'lognorm': did you mean 'lognormal'?"),
        (["--coupling", "labels:labels=[70]"], "labels names 70; labels run from 0 to 9."),
        (["--availability", "day-night:on=30"], "on=30 must not exceed period=24.0."),
        (["--out", "world.txt"], "out=world.txt must end in .png, .svg or .pdf."),
        (["--until", "1e-9"], "until=1e-09 is over before the first round closes."),
        (["--config", "none.toml"], "config=none.toml cannot be read: No such file or directory."),
        (["--schedule", "none.csv"], "schedule=none.csv cannot be read: No such file or directory."),
        (["--dataset", "digit"], "unknown dataset 'digit': did you mean 'digits'?"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert fails("world", "--clients", "20", *arguments, cwd=tmp_path).startswith(sentence)
    assert not list(tmp_path.iterdir())

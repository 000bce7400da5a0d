"""Every command on every kind of run: {run, compare, kill and resume, report, replay} × all scenarios."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from tests.command.calls import contents, fails, fedhist, in_process, succeeds

ROUNDS = 12
COMMON = ["--dataset", "digits", "--clients", "12", "--k", "3", "--rounds", str(ROUNDS), "--eval-every", "4"]
COMMON += ["--device", "cpu", "--quiet", "--checkpoint-every", "0"]


@dataclass(frozen=True)
class Scenario:
    """What is run: two methods, and options for both."""

    methods: tuple[str, str] = ("fedhist", "fedavg")
    options: list[str] = field(default_factory=list)
    seeds: int = 2
    alone: list[str] = field(default_factory=list)
    """More options for a single run."""
    replayed: str = "fedhist"
    """The server's part of the first method, as a name."""
    needs: str | None = None

    @property
    def run(self) -> list[str]:
        """The arguments for one run."""
        return ["run", "--strategy", self.methods[0], *COMMON, *self.options, *self.alone]

    @property
    def compare(self) -> list[str]:
        """The arguments for a comparison of both methods."""
        methods = [argument for name in self.methods for argument in ("--strategy", name)]
        return ["compare", *methods, "--seeds", str(self.seeds), *COMMON, *self.options]


SCENARIOS = {
    "plain": Scenario(),
    "private": Scenario(options=["--clip", "0.1", "--noise-multiplier", "0.5"], needs="dp_accounting"),
    "defended": Scenario(options=["--defence", "median"], replayed="fedhist + median"),
    "faulty": Scenario(options=["--faults", "nan=0.1,huge=0.1,dropped=0.1"]),
    "attacked": Scenario(options=["--attack", "sign-flip:share=0.25"]),
    "diverging": Scenario(options=["--lr", "2", "--local-steps", "2"], seeds=4, alone=["--lr", "12"]),
    "recorded": Scenario(options=["--record"]),
    "moon": Scenario(("moon:mu=0.1", "fedprox"), ["--local-steps", "2"], replayed="fedavg"),
}
LABELS = {"moon:mu=0.1": "MOON(mu=0.1)", "fedprox": "FedProx", "fedhist": "FedHist", "fedavg": "FedAvg"}
RECORDING = {"uploads.npy", "updates.npy", "examples.npy", "checksums.npy", "recording.npz"}


def needed(*modules: str | None) -> None:
    for name in modules:
        if name is not None and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(params=SCENARIOS)
def name(request: pytest.FixtureRequest) -> str:
    needed(SCENARIOS[request.param].needs)
    return str(request.param)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of comparisons that are finished, which the other commands take."""
    folder, found = tmp_path_factory.mktemp("finished"), {}
    for name, scenario in SCENARIOS.items():
        if scenario.needs is None or importlib.util.find_spec(scenario.needs) is not None:
            succeeds(*scenario.compare, "--out", name, cwd=folder)
            found[name] = folder / name
    return found


def check(name: str, history: fh.History) -> None:
    """Check that a run was one of its scenario."""
    events = [event["event"] for event in history.events]
    assert history.diverged == ("diverged" in events)
    if name != "diverging":
        assert history.round == [4, 8, 12] and not history.diverged
    assert all(0 <= accuracy <= 1 for accuracy in history.accuracy)
    assert (history.clients >= 0).all() and np.isfinite(history.weights).all()
    assert ("attack" in events) == (name == "attacked")
    assert ("rejected" in events and "dropped" in events) == (name == "faulty") or name == "diverging"
    assert all(epsilon is not None for epsilon in history.epsilon) == (name == "private") or not history.evaluations
    assert ("median" in history.method) == (name == "defended") and ("Private" in history.method) == (name == "private")


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_run(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    result = fedhist(*scenario.run, "--out", "a", cwd=tmp_path)
    assert "Traceback" not in result.err
    history = fh.History.load(tmp_path / "a")
    check(name, history)
    assert history.diverged == (name == "diverging")
    assert {"config.toml", "history.jsonl", "summary.json", "arrivals.npz"} <= files(tmp_path / "a")
    assert not (tmp_path / "a" / "checkpoint").exists()
    assert ("model.safetensors" in files(tmp_path / "a")) == (not history.diverged)
    assert (files(tmp_path / "a") >= RECORDING) == (name == "recorded")
    if history.diverged:
        assert result.code == 2 and "lr=12" in result.err and "The results up to then are in a." in result.err
    else:
        assert result.code == 0 and LABELS[scenario.methods[0]] in result.out and "Results are in a." in result.out
    succeeds("resume", "a", cwd=tmp_path)
    assert fails(*scenario.run, "--out", "a", cwd=tmp_path) == "out=a exists already; choose another folder."


def test_compare(name: str, finished: dict[str, Path]) -> None:
    scenario, folder = SCENARIOS[name], finished[name]
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    assert len(runs) == 2 * scenario.seeds and {"config.toml", "curves.png"} <= files(folder)
    histories = [fh.History.load(run) for run in runs]
    for history, run in zip(histories, runs, strict=True):
        check(name, history)
        assert ("model.safetensors" in files(run)) == (not history.diverged)
        assert (files(run) >= RECORDING) == (name == "recorded")
    diverged = sum(history.diverged for history in histories)
    assert (0 < diverged < len(runs)) if name == "diverging" else diverged == 0
    for seed in range(scenario.seeds):
        pair = [history for history in histories if history.seed == seed and not history.diverged]
        if len(pair) == 2 and name not in ("faulty", "diverging"):
            assert np.array_equal(pair[0].clients, pair[1].clients), "both methods meet the same clients"
            assert pair[0].loss != pair[1].loss


def test_killed_and_resumed(name: str, finished: dict[str, Path], tmp_path: Path) -> None:
    arguments, log = [*SCENARIOS[name].compare, "--out", tmp_path / "a"], tmp_path / "log"
    assert in_process(*arguments, log=log, checkpoints=5) is None, log.read_text()
    assert (tmp_path / "a" / "checkpoint").is_dir() and "unfinished" in fails(*arguments, cwd=tmp_path)
    assert in_process("resume", tmp_path / "a", log=log, checkpoints=2) is None, log.read_text()
    result = succeeds("resume", "a", cwd=tmp_path)
    assert "all results in a." in result.out
    assert contents(tmp_path / "a") == contents(finished[name])
    assert "Traceback" not in log.read_text()


def test_report(name: str, finished: dict[str, Path], tmp_path: Path) -> None:
    needed("plotly", "jinja2")
    result = succeeds("report", finished[name], "-o", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    for method in SCENARIOS[name].methods:
        assert LABELS[method] in page
    histories = [fh.History.load(path) for path in finished[name].iterdir() if path.is_dir()]
    live = sum(not history.diverged for history in histories)
    assert result.out.startswith(f"{live} run")
    assert result.err.count(" diverged in round ") == len(histories) - live


def test_replay(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    recorded = fedhist(*scenario.run, "--record", "--out", "a", cwd=tmp_path)
    assert (recorded.code == 2) == (name == "diverging")
    if recorded.code:
        sentence = fails("replay", "a", "--strategy", "fedavg", cwd=tmp_path)
        assert sentence == "the run recorded in a diverged, so there is nothing to compare with."
        return
    result = succeeds("replay", "a", "--strategy", scenario.replayed, "--strategy", "dynsgd", cwd=tmp_path)
    assert LABELS[scenario.methods[0]] in result.out and "DynSGD" in result.out
    same, other = (
        json.loads(next((tmp_path / "a").glob(f"replay-{method}*/replay.json")).read_text())
        for method in (LABELS[scenario.replayed.split()[0]], "DynSGD")
    )
    assert other["final_distance"] > 0
    assert same["final_distance"] == 0 and same["cosine"] == pytest.approx(1) and same["weight_distance"] == 0


def test_every_run_diverges(tmp_path: Path) -> None:
    """The command fails, what there was is kept, and a report says why it cannot be made."""
    for rate, kept in {"8": True, "1e30": False}.items():
        arguments = ["compare", *COMMON, "--eval-every", "1", "--local-steps", "3", "--lr", rate, "--out", f"lr{rate}"]
        sentence = fails(*arguments, cwd=tmp_path)
        assert f"learning rate lr={float(rate):g}" in sentence and (tmp_path / f"lr{rate}").exists() == kept
    assert not (tmp_path / "lr8" / "checkpoint").exists() and "curves.png" in files(tmp_path / "lr8")
    assert "is finished" in succeeds("resume", "lr8", cwd=tmp_path).out
    needed("plotly", "jinja2")
    assert fails("report", "lr8", cwd=tmp_path).startswith("no run can be reported: ")

"""One odd run among others is left out with its reason, or drawn as far as it goes; the others are reported anyway."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedhist.report.gather import gather
from fedhist.report.page import write_report
from fedhist.store.arrays import read_arrays, write_arrays
from tests.report.fake import fake_comparison, fake_history

pytest.importorskip("plotly", reason="Plotly is not installed")

Change = Callable[[Path], object]


def summary(**changes: Any) -> Change:
    def change(run: Path) -> None:
        known = json.loads((run / "summary.json").read_text())
        known["setting"] |= changes.pop("setting", {})
        (run / "summary.json").write_text(json.dumps(known | changes))

    return change


def evaluation(**changes: Any) -> Change:
    def change(run: Path) -> None:
        *lines, last = (run / "history.jsonl").read_text().splitlines()
        (run / "history.jsonl").write_text("\n".join([*lines, json.dumps(json.loads(last) | changes)]))

    return change


def table(name: str, **changes: Callable[[np.ndarray], np.ndarray] | None) -> Change:
    def change(run: Path) -> None:
        arrays = read_arrays(run / f"{name}.npz")
        new = {key: arrays[key] if make is None else make(arrays[key]) for key, make in changes.items()}
        gone = [key for key, make in changes.items() if make is None]
        write_arrays(run / f"{name}.npz", **{k: v for k, v in (arrays | new).items() if k not in gone})

    return change


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return change


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


LEFT_OUT: dict[str, tuple[Change, str]] = {
    "ids beyond all clients": (
        table("clients", id=lambda a: a + 10**15),
        "'id' in the table of clients must be from 0",
    ),
    "ids twice": (table("clients", id=lambda a: a * 0), "the table of clients has one twice"),
    "no ids": (table("clients", id=None), "there is no id in the table of clients"),
    "ids in rows": (table("clients", id=lambda a: a[:, None]), "'id' in the table of clients must have 1 dimensions"),
    "labels in a row": (table("clients", labels=lambda a: a[:, 0]), "must have 2 dimensions"),
    "no labels at all": (table("clients", labels=lambda a: a[:, :0]), "'labels' in the table of clients is empty"),
    "labels are halves": (table("clients", labels=lambda a: a / 2), "must be int64, not float64"),
    "times in a table": (table("clients", time=lambda a: a[:, None]), "must have 1 dimensions"),
    "times are NaN": (table("clients", time=lambda a: a * np.nan), "'time' in the table of clients must be from 0"),
    "fewer times": (table("clients", time=lambda a: a[1:]), "must have rows for each id"),
    "no rounds": (table("traces", round=None), "there is no round in the traces"),
    "one round for all": (table("traces", round=lambda a: a.sum()), "must have 1 dimensions, got shape ()"),
    "rounds backwards": (table("traces", round=lambda a: a[::-1]), "the traces are not of rounds from 1 to 60"),
    "rounds to come": (table("traces", round=lambda a: a + 1000), "the traces are not of rounds from 1 to 60"),
    "utilities of others": (table("traces", utility=lambda a: a[:, 1:]), "must have 40 columns"),
    "utilities in a row": (table("traces", utility=lambda a: a[:, 0]), "must have 2 dimensions"),
    "one length": (table("traces", lengths=lambda a: a[:, :1]), "must have 2 columns"),
    "a client number that no table has room for": (
        table("arrivals", clients=lambda a: a.astype(np.int64) + 2**40),
        "'clients' in the arrivals must be from -1",
    ),
    "time without end": (table("arrivals", arrived=lambda a: a * 1e307), "'arrived' in the arrivals must be from"),
    "accuracy beyond numbers": (evaluation(accuracy=1e308), "after round 60 holds absurd numbers"),
    "accuracy by class beyond numbers": (evaluation(per_class=[1e300] * 10), "after round 60 holds absurd numbers"),
    "other classes": (evaluation(per_class=[0.5] * 7), "has accuracies of 7 classes, and"),
    "clients in words": (summary(setting={"clients": "many"}), "clients must be a number from 0 to 2"),
    "bytes in words": (summary(setting={"bytes_per_upload": "many"}), "bytes_per_upload must be a number"),
    "a setting without end": (summary(setting={"lr": 10**400}), "setting.lr"),
    "a setting of settings": (summary(setting={"lr": {"a": 1}}), "setting.lr"),
    "a name without end": (summary(method="x" * 10**5), "'method': string should have at most"),
    "a summary without end": (replaced("summary.json", zero), "it is not a plain file"),
    "traces without end": (replaced("traces.npz", zero), "it is not a plain file"),
    "a pipe": (replaced("history.jsonl", os.mkfifo), "it is not a plain file"),
    "events that lead nowhere": (replaced("events.jsonl", nowhere), "No such file"),
    "clients that lead nowhere": (replaced("clients.npz", nowhere), "No such file"),
    "a terabyte of arrivals": (
        lambda run: os.truncate(run / "arrivals.npz", 1 << 40),
        "it is larger than 4,294,967,296",
    ),
    "a terabyte of text": (
        lambda run: os.truncate(run / "summary.json", 1 << 40),
        "it is larger than 67,108,864 bytes",
    ),
    "a terabyte of lines": (lambda run: os.truncate(run / "history.jsonl", 1 << 40), "it is larger than 1,073,741,824"),
}
DRAWN: dict[str, Change] = {
    "no traces beside one that has them": replaced("traces.npz", lambda _: None),
    "no clients": replaced("clients.npz", lambda _: None),
    "a task among the settings": summary(setting={"task": None}),
    "braces in a setting's name": summary(setting={"{x}": "{y}"}),
    "a large target": summary(setting={"target": 1e308}),
    "accuracies of nothing": evaluation(per_class=[None] * 10),
    "huge weights": table("arrivals", weights=lambda a: np.full_like(a, 3e38)),
    "huge times": table("arrivals", arrived=lambda a: a + 1e299),
    "huge utilities": table("traces", utility=lambda a: np.full_like(a, -3e38)),
    "config.toml without end": replaced("config.toml", zero),
    "config.toml is a pipe": replaced("config.toml", os.mkfifo),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = fake_comparison(tmp_path / "a", {"FedHist": 0.0, "FedAvg": -0.1}, seeds=2)
    fake_history("FedHist", 2).save(folder / "odd")
    return folder


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_that_makes_no_sense_is_left_out(runs: Path, name: str) -> None:
    change, sentence = LEFT_OUT[name]
    change(runs / "odd")
    found = gather([runs])
    assert len(found.runs) == 4 and [path.name for path, _ in found.left_out] == ["odd"]
    assert sentence in found.left_out[0][1] and "\n" not in found.left_out[0][1]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_odd_run_is_drawn(runs: Path, name: str) -> None:
    DRAWN[name](runs / "odd")
    made = write_report([runs], runs / "page.html")
    assert (made.runs, made.left_out) == (5, [])


def test_a_deployment_whose_clients_are_not_on_record(runs: Path) -> None:
    """A server keeps utilities for the clients there is room for, and no table of clients."""
    DRAWN["no clients"](runs / "odd")
    table("traces", utility=lambda a: np.repeat(a, 30, axis=1)[:, :1000])(runs / "odd")
    assert write_report([runs], runs / "page.html").runs == 5


def test_a_folder_whose_name_is_no_text(runs: Path) -> None:
    (runs / "odd").rename(runs / os.fsdecode(b"odd\xff"))
    assert write_report([runs], runs / "page.html").runs == 5

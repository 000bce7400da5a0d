"""What the commands read: reports of many runs, checkpoints of many kinds, and recordings, forged by those who can."""

from __future__ import annotations

import contextlib
import json
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import fedhist as fh
from fedhist.report.live.terminal import Terminal
from fedhist.report.page import Report, write_report
from fedhist.report.replays import differences, weights_by_staleness
from tests.command.calls import fedhist
from tests.fuzz.readers import Files, Reader, contents, recording_files, task

LOCAL = {"k": 3, "rounds": 6, "eval_every": 2}


def report_files(tmp: Path) -> Files:
    """Return runs of every kind: compared, arms, recorded, with faults, attacked, private and diverged."""
    for history in fh.compare(["fedhist", "fedavg", "refl"], task(8), seeds=2, **LOCAL):
        history.save(tmp / "runs" / history.name)
    waits = fh.Arm("fedavg", concurrency=3, lr=0.1, rounds=4, name="waits")
    for history in fh.compare([waits, fh.Arm("fedavg", name="does not")], task(8), seeds=2, **LOCAL):
        history.save(tmp / "runs" / "arms" / history.name)
    fh.simulate("fedhist", task(), k=2, rounds=4, record=tmp / "runs" / "recorded")
    kinds: dict[str, dict[str, Any]] = {
        "faults": {"faults": fh.Faults(nan=0.2, dropped=0.2), "concurrency": 5},
        "attack": {"attack": fh.SignFlip(0.3)},
        "private": {"strategy": fh.Private(fh.FedHist(), clip=1.0, noise_multiplier=1.0)},
    }
    for name, options in kinds.items():
        fh.simulate(options.pop("strategy", "fedhist"), task(8), **LOCAL, **options).save(tmp / "runs" / name)
    with contextlib.suppress(fh.FedHistError):
        fh.simulate("fedavg", task(8), **LOCAL, server_lr=1e38, record=tmp / "runs" / "diverged")
    return contents(tmp / "runs")


def read_report(folder: Path) -> Report:
    try:
        return write_report([folder], folder.parent / "report.html")
    except fh.FedHistError as error:  # there are good runs beside the bad one
        raise AssertionError(error) from error


def use_report(made: Report, _: Path) -> None:
    assert made.runs >= 8
    for _, reason in made.left_out:
        assert 10 < len(reason) < 1000 and "\n" not in reason, reason


@cache
def trials(kind: str) -> list[fh.Trial]:
    options: dict[str, Any] = {**LOCAL}
    if kind == "faults":
        options |= {"faults": fh.Faults(nan=0.2, dropped=0.2), "concurrency": 5}
    if kind == "private":
        private = fh.Private(fh.FedHist(ina=True), clip=1.0, noise_multiplier=1.0)
        return [fh.Trial(private, task(8), **options, attack=fh.SignFlip(0.3))]
    return [fh.Trial(name, task(8), **options) for name in ("fedhist", "wkafl", "moon")]


def simulated(kind: str, folder: Path, **options: Any) -> list[fh.History]:
    trainer = kind if kind == "batched" else "auto"
    return fh.simulate_many(trials(kind), trainer=trainer, checkpoint=folder, checkpoint_every=0, **options)


def checkpoint_files(kind: str, tmp: Path) -> Files:
    def stop(round_: int, _: object) -> None:
        if round_ == 5:
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        simulated(kind, tmp / "saved", on_round=stop)
    return contents(tmp / "saved")


def use_histories(resumed: list[fh.History], folder: Path) -> None:
    """What was resumed can be written and read."""
    for history in resumed:
        assert fh.History.load(history.save(folder / "again")).evaluations == history.evaluations


def unfinished_files(tmp: Path) -> Files:
    def stop(_: Terminal, round_: int, __: object) -> None:
        if round_ == 4:
            raise KeyboardInterrupt

    with mock.patch.object(Terminal, "__call__", stop):
        result = fedhist(
            *(
                "run",
                "--clients",
                "8",
                "--k",
                "3",
                "--rounds",
                "6",
                "--eval-every",
                "2",
                "--faults",
                "nan=0.2",
                "--record",
            ),
            *("--checkpoint-every", "0", "--device", "cpu", "--quiet", "--out", tmp / "run"),
            cwd=tmp,
        )
    assert result.code == 130, result
    return contents(tmp / "run")


def read_command(*arguments: str, folder: Path) -> Path:
    result = fedhist(arguments[0], folder, *arguments[1:], "--quiet", cwd=folder.parent)
    if result.code == 2:
        raise fh.FedHistError(result.err.strip().splitlines()[-1].removeprefix("Error: "))
    assert result.code == 0, result
    return folder


def use_finished(folder: Path, _: Path) -> None:
    if (folder / "summary.json").exists():
        assert json.loads((folder / "summary.json").read_text())["rounds"] == fh.History.load(folder).rounds


def use_recording(recording: fh.Recording, folder: Path) -> None:
    replays = [fh.replay(recording, name) for name in ("fedavg", "fedhist")]
    differences(replays)
    weights_by_staleness(replays)
    replays[0].save(folder / "replay")


COMMANDS = {
    "report": Reader(report_files, read_report, use_report, forged=True, share=0.02),
    "resume": Reader(
        unfinished_files, lambda f: read_command("resume", folder=f), use_finished, forged=True, share=0.02
    ),
    "replay": Reader(recording_files, fh.Recording, use_recording, forged=True, share=0.3),
    **{
        f"checkpoint, {kind}": Reader(
            partial(checkpoint_files, kind), partial(simulated, kind), use_histories, forged=True, share=0.02
        )
        for kind in ("methods", "batched", "faults", "private")
    },
}

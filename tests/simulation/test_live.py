"""Arrivals that may be sent back: the same as a schedule while none is, and K good ones a round when some are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.simulation.engine import BegunAgain
from fedhist.world.clock import LiveClock, make_schedule
from tests.simulation.test_checkpoint import LOCAL, Stopped, assert_same, stop_after

FAULTS = {
    "nan": "it holds NaN or infinity",
    "infinite": "it holds NaN or infinity",
    "wrong_length": "it has 74 values instead of 75",
    "wrong_dtype": "its values are int64, not float32",
    "huge": r"its length \S+ is absurd where \S+ is usual",
    "replayed": r"it names version \d+, but the client was last sent version \d+",
    "future": r"it names version \d+ in round \d+, when that is not there yet",
    "unknown_client": r"it names client \d+, and there are 8",
}
ALL_OF_THEM = fh.Faults(**dict.fromkeys(FAULTS, 0.05), dropped=0.05)


def run(method: str, task: fh.Task, **more: Any) -> fh.History:
    return fh.simulate(method, task, **{"k": 3, "rounds": 25, "eval_every": 5, "local": LOCAL} | more)


@pytest.mark.parametrize("trainer", ["auto", "reference"])
@pytest.mark.parametrize("concurrency", [None, 5])
@pytest.mark.parametrize("method", ["fedhist", "moon"])
def test_without_faults_it_is_the_slow_twin(
    make_task: Callable[..., fh.Task], trainer: str, concurrency: int | None, method: str
) -> None:
    task = make_task()
    scheduled, live = (
        run(method, task, trainer=trainer, concurrency=concurrency, faults=faults) for faults in (None, fh.Faults())
    )
    assert_same(live, scheduled)


@pytest.mark.parametrize("attack", ["sign-flip:share=0.3", "scaled-noise:share=0.3", "little-is-enough:share=0.3"])
def test_attackers_attack_the_same(make_task: Callable[..., fh.Task], attack: str) -> None:
    task = make_task()
    scheduled, live = (run("fedhist", task, attack=attack, faults=faults) for faults in (None, fh.Faults()))
    assert_same(live, scheduled)


def test_an_attacker_who_overdoes_it_is_sent_back(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    with pytest.warns(BegunAgain, match="uploaded a huge update"):
        history = run("fedavg", task, attack=fh.SignFlip(share=0.25, scale=1e9))
    attackers = set(history.events[0]["clients"])
    assert {event["client"] for event in history.events[1:]} == attackers
    assert not np.isin(history.clients, list(attackers)).any()


@pytest.mark.parametrize("concurrency", [None, 9])
@pytest.mark.parametrize("devices", [fh.LogNormal(), fh.Constant(), fh.Exponential()])
def test_the_clock_gives_the_schedule(devices: Any, concurrency: int | None) -> None:
    schedule = make_schedule(20, 4, 50, devices, 3, concurrency)
    clock = LiveClock(20, 4, devices, 3, concurrency)
    for row in range(50):
        arrived = [clock.pop() for _ in range(4)]
        assert [start.client for start in arrived] == schedule.clients[row].tolist()
        assert [start.version for start in arrived] == schedule.versions[row].tolist()
        assert [start.time for start in arrived] == schedule.arrived[row].tolist()
        clock.close(arrived, row + 1)


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_rejected_with_its_reason(make_task: Callable[..., fh.Task], kind: str) -> None:
    history = run("fedhist", make_task(), faults=fh.Faults(**{kind: 0.2}))
    assert len(history.events) > 5
    for event in history.events:
        assert event["event"] == "rejected"
        assert event["client"] in range(8)
        assert re.fullmatch(FAULTS[kind], event["reason"])


def test_rounds_hold_k_good_uploads_and_memory_none_of_the_others(make_task: Callable[..., fh.Task]) -> None:
    seen: list[fh.Arrivals] = []

    class Watching(fh.FedHist):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            seen.append(arrivals)
            return super().forward(arrivals)

    history = fh.simulate(Watching(), make_task(), k=3, rounds=40, local=LOCAL, faults=ALL_OF_THEM)
    assert len(seen) == 40
    usual = torch.stack([arrivals.deltas.norm(dim=1) for arrivals in seen])
    assert torch.isfinite(usual).all()
    assert usual.max() < 100 * usual.median()
    assert all(len(set(row)) == 3 for row in history.clients.tolist())
    assert (history.staleness >= 1).all()
    assert (np.diff(history.arrived.ravel()) >= 0).all()
    assert len({event["event"] for event in history.events}) == 2  # rejected and lost


def test_the_same_seed_breaks_the_same_uploads(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    first, again = (run("fedhist", task, faults=ALL_OF_THEM) for _ in range(2))
    other = run("fedhist", task, faults=fh.Faults(**dict.fromkeys(FAULTS, 0.05), dropped=0.05, seed=1))
    assert_same(first, again)
    assert first.events != other.events


@pytest.mark.parametrize("lr", [0.001, 0.01, 0.1])
def test_huge_uploads_are_sent_back_however_short_the_others_are(make_task: Callable[..., fh.Task], lr: float) -> None:
    faults = fh.Faults(huge=0.1)
    history = run("fedavg", make_task(), rounds=60, faults=faults, local=fh.LocalSGD(lr=lr))
    assert history.model is not None
    assert all(tensor.abs().max() < 10 for tensor in history.model.values())
    assert len(history.events) > 10
    assert {event["event"] for event in history.events} == {"rejected"}


def test_clipped(make_task: Callable[..., fh.Task]) -> None:
    history = run("fedhist", make_task(), faults=fh.Faults(huge=0.2, nan=0.1), bad_updates="clip")
    kinds = Counter(event["event"] for event in history.events)
    assert kinds["clipped"] > 5
    assert kinds["rejected"] > 2
    assert history.model is not None
    assert all(tensor.abs().max() < 100 for tensor in history.model.values())


def test_stopped(make_task: Callable[..., fh.Task]) -> None:
    with pytest.raises(fh.BadUpload, match=r"FedAvg, seed 0: client \d's upload in round \d+ is bad: it holds NaN or"):
        run("fedavg", make_task(), faults=fh.Faults(nan=0.1), bad_updates="stop")


@pytest.mark.parametrize("method", ["fedhist", "moon"])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_resumed_to_the_bit(
    make_task: Callable[..., fh.Task], tmp_path: Path, method: str, concurrency: int | None
) -> None:
    task, given = make_task(), {"faults": ALL_OF_THEM, "concurrency": concurrency}
    whole = run(method, task, **given)
    for round_ in (0, 7, 15):
        with pytest.raises(Stopped):
            run(method, task, **given, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(round_))
    assert_same(run(method, task, **given, checkpoint=tmp_path), whole)


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_a_client_with_broken_data_is_left_out(make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str) -> None:
    """Nobody asked for faults: one client's data are broken, and only one seed meets it."""
    task = make_task()
    task.x[task.client(5)[0]] = torch.nan
    local = fh.LocalSGD(lr=0.1, batch_size=200)
    given: dict[str, Any] = {"k": 3, "rounds": 20, "eval_every": 5, "local": local}
    trials = [fh.Trial("fedhist", task, **given), fh.Trial("fedavg", make_task(), **given)]
    with pytest.warns(BegunAgain, match=r"FedHist, seed 0: client 5 uploaded NaN or infinity in round \d+; the run"):
        broken, fine = fh.simulate_many(trials, trainer=trainer)
    assert {(event["event"], event["client"]) for event in broken.events} == {("rejected", 5)}
    assert not (broken.clients == 5).any()
    assert fine.events == []
    assert_same(fine, fh.simulate("fedavg", make_task(), **given, trainer=trainer))
    calls: list[int] = []

    def stop_sometimes(round_: int, _: Sequence[fh.History]) -> None:
        calls.append(round_)
        if len(calls) in (4, 12, 24, 30):
            raise Stopped

    for _ in range(6):
        try:
            with pytest.warns(BegunAgain):
                resumed = fh.simulate_many(
                    trials, trainer=trainer, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_sometimes
                )
        except (Stopped, pytest.fail.Exception):
            continue
    assert len(calls) > 30
    for a, b in zip(resumed, (broken, fine), strict=True):
        assert_same(a, b)


def test_an_upload_that_is_only_huge(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(model=nn.Linear(5, 3))
    task.x[task.client(6)] *= 1e6
    with pytest.warns(BegunAgain, match="client 6 uploaded a huge update in round"):
        history = run("fedavg", task, rounds=10)
    assert {(event["event"], event["client"]) for event in history.events} == {("rejected", 6)}


def test_a_run_that_cannot_go_on_loses_nobody_else(make_task: Callable[..., fh.Task]) -> None:
    """It is begun again alone, and ends alone."""
    task = make_task()
    task.x[task.client(5)[0]] = torch.nan
    given: dict[str, Any] = {"k": 8, "rounds": 6, "eval_every": 3, "local": fh.LocalSGD(lr=0.1, batch_size=200)}
    trials = [fh.Trial("fedhist", task, **given), fh.Trial("fedavg", make_task(), **given)]
    with pytest.warns(BegunAgain, match="client 5"):
        stuck, fine = fh.simulate_many(trials)
    assert stuck.events[-1]["event"] == "diverged"
    assert stuck.evaluations[-1].loss is not None  # the model is still the first one
    assert fine.events == []
    assert fine.round == [3, 6]


def test_colluders_who_overdo_it_are_sent_back(make_task: Callable[..., fh.Task]) -> None:
    seen: list[float] = []

    class Watching(fh.FedAvg):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            seen.append(float(arrivals.deltas.norm(dim=1).max()))
            return super().forward(arrivals)

    attack = fh.LittleIsEnough(share=0.25, z=1e9)
    history = fh.simulate(Watching(), make_task(), k=3, rounds=20, local=LOCAL, attack=attack, faults=fh.Faults())
    assert max(seen) < 100
    assert {event["client"] for event in history.events[1:]} == set(history.events[0]["clients"])


def test_recorded_runs_that_begin_again_are_resumed(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task, recordings = make_task(), []
    task.x[task.client(5)[0]] = torch.nan
    given: dict[str, Any] = {"k": 3, "rounds": 20, "eval_every": 5, "local": fh.LocalSGD(lr=0.1, batch_size=200)}
    for name, stops in (("whole", []), ("stopped", [12, 16])):
        more = {**given, "record": tmp_path / name, "resume": tmp_path / f"{name}-state", "checkpoint_every": 0}
        for round_ in stops:
            with pytest.warns(BegunAgain), pytest.raises(Stopped):
                fh.simulate("fedhist", task, **more, on_round=stop_after(round_))
        with pytest.warns(BegunAgain):
            fh.simulate("fedhist", task, **more)
        recordings.append((tmp_path / name / "uploads.npy").read_bytes())
    assert recordings[0] == recordings[1]


def test_bad_options(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    with pytest.raises(fh.InvalidInput, match="add up to 1.2, which is more than 1"):
        fh.Faults(nan=0.6, huge=0.6)
    with pytest.raises(fh.InvalidInput, match=r"nan must lie in \[0, 1\], got -0.1"):
        fh.Faults(nan=-0.1)
    with pytest.raises(fh.InvalidInput, match="bad_updates must be 'reject', 'clip' or 'stop', got 'ignore'"):
        run("fedavg", task, bad_updates="ignore")
    with pytest.raises(fh.InvalidInput, match="max_norm_ratio must be positive"):
        run("fedavg", task, max_norm_ratio=0)
    with pytest.raises(fh.InvalidInput, match="faults must be a fedhist.Faults, got dict"):
        run("fedavg", task, faults={"nan": 0.1})
    with pytest.raises(fh.InvalidInput, match="a recorded schedule fixes"):
        run("fedavg", task, faults=fh.Faults(), schedule=run("fedavg", task))

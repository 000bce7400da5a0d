"""Arrivals that may be rejected: those of the schedule while none is, and K accepted ones a round when some are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhist as fh
from fedhist.simulation import wave
from fedhist.simulation.server import Server
from fedhist.simulation.versions import Models
from tests.simulation.test_checkpoint import LOCAL, Stopped, assert_same, stop_after

FAULTS = {
    "nan": "it holds NaN or infinity",
    "infinite": "it holds NaN or infinity",
    "wrong_length": "it has 74 values instead of 75",
    "wrong_dtype": "its values are int64, not float32",
    "huge": r"its length \S+ is absurd where \S+ is usual \(max_norm_ratio=30(, now 10)?\)",
    "replayed": r"it names version \d+, but the client was last sent version \d+",
    "future": r"it names version \d+, which does not exist yet in round \d+",
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


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_an_attacker_who_overdoes_it_is_rejected(make_task: Callable[..., fh.Task], trainer: str) -> None:
    history = run("fedavg", make_task(), attack=fh.SignFlip(share=0.25, scale=1e9), trainer=trainer)
    attackers = set(history.events[0]["clients"])
    assert {event["client"] for event in history.events[1:]} == attackers
    assert not np.isin(history.clients, list(attackers)).any()


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
    assert len({event["event"] for event in history.events}) == 2  # rejected and dropped


def test_the_same_seed_breaks_the_same_uploads(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    first, again = (run("fedhist", task, faults=ALL_OF_THEM) for _ in range(2))
    other = run("fedhist", task, faults=fh.Faults(**dict.fromkeys(FAULTS, 0.05), dropped=0.05, seed=1))
    assert_same(first, again)
    assert first.events != other.events


@pytest.mark.parametrize("lr", [0.001, 0.01, 0.1])
def test_huge_uploads_are_rejected_however_short_the_others_are(make_task: Callable[..., fh.Task], lr: float) -> None:
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


@pytest.mark.parametrize("trainer", ["native", "batched"])
def test_accepted(make_task: Callable[..., fh.Task], trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that explodes fails by itself: none of its uploads is rejected, and it does not leave its batch."""
    monkeypatch.setattr(wave, "Rewind", None)
    far = fh.Trial("fedavg", make_task(), k=4, rounds=30, eval_every=10, local=fh.Local(1e4), bad_updates="accept")
    near = replace(far, local=fh.Local(0.01))
    histories = fh.simulate_many([far, near], trainer=trainer, device="cpu")
    assert [history.diverged for history in histories] == [True, False]
    assert [[event["event"] for event in history.events] for history in histories] == [["diverged"], []]


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


def with_broken_client(task: fh.Task, client: int = 5) -> fh.Task:
    """Spoil one client's data: whatever it uploads is NaN."""
    task.x[task.client(client)[0]] = torch.nan
    return task


BROKEN: dict[str, Any] = {"k": 3, "rounds": 20, "eval_every": 5, "local": fh.LocalSGD(lr=0.1, batch_size=200)}


@pytest.mark.parametrize("client", [5, 0])
@pytest.mark.parametrize("method", ["fedhist", "moon"])
@pytest.mark.parametrize("trainer", ["auto", "reference", "batched"])
def test_from_the_first_bad_upload_on_it_is_as_if_taken_one_by_one(
    make_task: Callable[..., fh.Task], trainer: str, method: str, client: int
) -> None:
    """Nobody asked for faults, so rounds are scheduled until one client's broken data show."""
    task = with_broken_client(make_task(), client)
    scheduled, one_by_one = (
        fh.simulate(method, task, **BROKEN, trainer=trainer, faults=faults) for faults in (None, fh.Faults())
    )
    assert {(event["event"], event["client"]) for event in scheduled.events} == {("rejected", client)}
    assert not (scheduled.clients == client).any()
    if trainer != "batched":
        assert_same(scheduled, one_by_one)
        return
    # Clients in batches of another size train the same but for rounding.
    assert scheduled.events == one_by_one.events
    assert np.array_equal(scheduled.clients, one_by_one.clients)
    assert scheduled.loss == pytest.approx(one_by_one.loss, rel=1e-4)


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_rounds_before_a_bad_upload_are_kept_and_resumed(
    make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str
) -> None:
    """Beside runs that meet none, stopped in every part of it, with the same result to the bit."""
    task = with_broken_client(make_task())
    methods = [("fedhist", task, 0), ("fedavg", make_task(), 0), ("refl", task, 3)]
    trials = [fh.Trial(name, own, seed=seed, **BROKEN) for name, own, seed in methods]
    whole = fh.simulate_many(trials, trainer=trainer)
    assert [bool(history.events) for history in whole] == [True, False, True]
    assert whole[0].events[0]["round"] > 1
    assert_same(whole[1], fh.simulate_many(trials[1:2], trainer=trainer)[0])
    calls: list[int] = []

    def stop_sometimes(round_: int, _: Sequence[fh.History]) -> None:
        calls.append(round_)
        if len(calls) % 7 == 0:
            raise Stopped

    resumed, stops = None, 0
    while resumed is None:
        try:
            resumed = fh.simulate_many(
                trials, trainer=trainer, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_sometimes
            )
        except Stopped:
            stops += 1
    assert stops > 2
    for a, b in zip(resumed, whole, strict=True):
        assert_same(a, b)


def test_a_batch_does_not_train_again_what_came_long_before(
    make_task: Callable[..., fh.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are kept while a batch is under way, so that a bad upload costs the rounds since the last of them."""
    task = with_broken_client(make_task(), 7)
    taken: list[int] = []
    close = Server.close

    def counting(server: Server, arrivals: fh.Arrivals) -> Tensor:
        taken.append(server.round)
        return close(server, arrivals)

    monkeypatch.setattr(Server, "close", counting)
    options = {**BROKEN, "rounds": 60, "k": 1, "eval_every": 2, "trainer": "batched"}
    history = fh.simulate("fedavg", task, **options, checkpoint_every=0)
    met = history.events[0]["round"]
    assert met > 5
    assert len(taken) <= 60 + 2 + 2, "one evaluation's rounds are taken twice, and no more"


def test_an_upload_that_is_only_huge(make_task: Callable[..., fh.Task]) -> None:
    task = make_task(model=nn.Linear(5, 3))
    task.x[task.client(6)] *= 1e6
    history = run("fedavg", task, rounds=10)
    assert {(event["event"], event["client"]) for event in history.events} == {("rejected", 6)}


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_a_run_that_cannot_end_leaves_the_others_alone(make_task: Callable[..., fh.Task], trainer: str) -> None:
    """With K = N and one broken client no round can ever close."""
    task = with_broken_client(make_task())
    given = {**BROKEN, "k": 8, "rounds": 6, "eval_every": 3}
    trials = [fh.Trial("fedhist", task, **given), fh.Trial("fedavg", make_task(), **given)]
    stuck, fine = fh.simulate_many(trials, trainer=trainer)
    assert stuck.diverged and stuck.rounds == 0 and stuck.evaluations == []
    assert stuck.events[-1]["reason"].startswith(
        "100 uploads in a row were rejected in round 1, the last because it holds NaN"
    )
    assert fine.events == []
    assert fine.round == [3, 6]


def test_a_recorded_schedule_has_nobody_to_take_the_place_of_a_bad_upload(make_task: Callable[..., fh.Task]) -> None:
    schedule = fh.simulate("fedavg", make_task(), **BROKEN)
    for trainer in ("auto", "batched"):
        with pytest.raises(
            fh.DivergedError, match=r"in round \d+ an upload is bad \(it holds NaN or infinity\), and a rec"
        ):
            fh.simulate("fedavg", with_broken_client(make_task()), **BROKEN, schedule=schedule, trainer=trainer)


@pytest.mark.parametrize("fault", ["nan", "dropped"])
def test_faults_that_leave_nothing_are_named(make_task: Callable[..., fh.Task], fault: str) -> None:
    with pytest.raises(fh.DivergedError, match="the faults that were asked for leave nothing to aggregate"):
        run("fedavg", make_task(), faults=f"{fault}=1")


def test_colluders_who_overdo_it_are_rejected(make_task: Callable[..., fh.Task]) -> None:
    seen: list[float] = []

    class Watching(fh.FedAvg):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            seen.append(float(arrivals.deltas.norm(dim=1).max()))
            return super().forward(arrivals)

    attack = fh.LittleIsEnough(share=0.25, z=1e9)
    history = fh.simulate(Watching(), make_task(), k=3, rounds=20, local=LOCAL, attack=attack, faults=fh.Faults())
    assert max(seen) < 100
    assert {event["client"] for event in history.events[1:]} == set(history.events[0]["clients"])


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_recorded_runs_that_meet_a_bad_upload_are_resumed(
    make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str
) -> None:
    task, recordings = with_broken_client(make_task()), []
    for name, stops in (("whole", []), ("stopped", [3, 12, 16])):
        more = {**BROKEN, "record": tmp_path / name, "checkpoint": tmp_path / f"{name}-state", "checkpoint_every": 0}
        for round_ in stops:
            with pytest.raises(Stopped):
                fh.simulate("fedhist", task, **more, trainer=trainer, on_round=stop_after(round_))
        fh.simulate("fedhist", task, **more, trainer=trainer)
        recordings.append((tmp_path / name / "uploads.npy").read_bytes())
        assert fh.replay(tmp_path / name, "fedhist").distance.max() == 0
    assert recordings[0] == recordings[1]


def test_bad_options(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    with pytest.raises(fh.InvalidInput, match="add up to 1.2, which is more than 1"):
        fh.Faults(nan=0.6, huge=0.6)
    with pytest.raises(fh.InvalidInput, match=r"nan must lie in \[0, 1\], got -0.1"):
        fh.Faults(nan=-0.1)
    with pytest.raises(fh.InvalidInput, match="bad_updates must be 'reject', 'clip', 'stop' or 'accept', got 'ignore'"):
        run("fedavg", task, bad_updates="ignore")
    with pytest.raises(fh.InvalidInput, match="max_norm_ratio must be at least 1"):
        run("fedavg", task, max_norm_ratio=0)
    with pytest.raises(fh.InvalidInput, match="faults has no option 'lost' any more; it is called 'dropped'"):
        run("fedavg", task, faults="lost=0.1")
    with pytest.raises(fh.InvalidInput, match="faults must be a fedhist.Faults, got dict"):
        run("fedavg", task, faults={"nan": 0.1})
    with pytest.raises(fh.InvalidInput, match="a recorded schedule fixes"):
        run("fedavg", task, faults=fh.Faults(), schedule=run("fedavg", task))


def test_a_model_that_starts_near_zero_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 3
    model = torch.nn.Linear(5, 3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1e-6, generator=generator)
    task = fh.Task(model, x, y, [range(i, 60, 6) for i in range(6)], x, y)
    for policy in ("reject", "clip"):
        history = fh.simulate("fedavg", task, k=3, rounds=10, bad_updates=policy, local=fh.LocalSGD(lr=0.5))
        assert history.events == [] and history.loss[-1] < 1.09


def test_a_recorded_schedule_can_be_clipped(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()
    earlier = run("fedavg", task)
    history = run("fedavg", task, schedule=earlier, bad_updates="clip", attack=fh.SignFlip(0.3, scale=1e5))
    assert {event["event"] for event in history.events} == {"attack", "clipped"}
    assert np.array_equal(history.clients, earlier.clients) and history.rounds == earlier.rounds


def test_an_upload_that_is_dropped_is_not_looked_at(make_task: Callable[..., fh.Task]) -> None:
    """Its statistics are NaN, as the uploads are that arrive."""
    task = with_broken_client(
        make_task(model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    )
    history = fh.simulate("fedavg", task, **BROKEN, faults=fh.Faults(dropped=0.5))
    events = Counter(event["event"] for event in history.events if event["client"] == 5)
    assert events["dropped"] > 3 and events["rejected"] > 3


def test_models_that_are_put_back_begin_where_new_ones_do() -> None:
    """In memory of their own, since the last bit of a product may depend on where a vector begins."""
    models = Models()
    models.restore(torch.arange(3), torch.ones(3, 75), torch.ones(75), range(3))
    assert all(model.data_ptr() % 64 == torch.ones(75).data_ptr() % 64 for model in models.values())

"""Rejections that are known beforehand: the same rounds as from a clock that hears of each as it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedhist as fh
from fedhist.simulation.plan import plan
from fedhist.simulation.sources.line import Line
from fedhist.strategies.screening import Rejected, Screen, Upload
from fedhist.world.faults import arrived
from fedhist.world.foreseen import Foreseen
from fedhist.world.schedule import Start
from tests.simulation.sources.test_queue import BROKEN, FAULTS, with_broken_client
from tests.simulation.test_checkpoint import LOCAL, Stopped, assert_same, stop_after

FORESEEN = fh.Faults(**{kind: 0.05 for kind in FAULTS if kind != "huge"}, dropped=0.1)
OPTIONS: dict[str, Any] = {"k": 3, "rounds": 30, "eval_every": 5, "local": LOCAL, "faults": FORESEEN}
WORLDS: dict[str, dict[str, Any]] = {
    "the first K": {},
    "some at work": {"concurrency": 5},
    "one upload": {"k": 1},
    "synchronous": {"closing": "synchronous:k=3,over_select=1.5"},
    "deadlines": {"closing": "deadline:seconds=0.5", "k": None},
    "day and night": {"availability": "day-night"},
    "late, giving up and gone": {"availability": "day-night:gives_up=0.2,join=2,leave=400"},
    "a network": {"network": "up=1e4,down=1e5"},
    "attackers": {"attack": "sign-flip:share=0.3"},
    "colluding attackers": {"attack": "little-is-enough:share=0.3"},
}


class AlwaysDropped(fh.Faults):
    """Loses whatever certain clients send."""

    def __init__(self, clients: Sequence[int]) -> None:
        super().__init__()
        object.__setattr__(self, "clients", tuple(clients))

    def kind(self, seed: int, client: int, start: int) -> str | None:
        return "dropped" if client in self.clients else None


def assert_same_but_for_rounding(a: fh.History, b: fh.History) -> None:
    assert a.events == b.events
    for name in ("clients", "staleness", "arrived", "closed", "work", "sent", "received"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.loss == pytest.approx(b.loss, rel=1e-4)


@pytest.mark.parametrize("world", WORLDS)
def test_a_batch_takes_the_rounds_of_the_slow_twin(
    make_task: Callable[..., fh.Task], monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    task, options = make_task(), OPTIONS | WORLDS[world]
    trials = [fh.Trial(method, task, seed=seed, **options) for method, seed in (("fedhist", 0), ("fedbuff", 1))]
    slow = fh.simulate_many(trials, trainer="reference")
    assert all(len(history.events) > 5 for history in slow)
    monkeypatch.setattr(Line, "arrivals", None)  # which takes uploads one by one
    for fast, other in zip(fh.simulate_many(trials, trainer="batched", device="cpu"), slow, strict=True):
        assert_same_but_for_rounding(fast, other)


@pytest.mark.parametrize("trainer", ["reference", "batched"])
def test_a_bad_upload_that_was_not_foreseen(make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str) -> None:
    """The run leaves its batch, and the rest of what is foreseen goes with it; stopped before and after that."""
    task = with_broken_client(make_task())
    options = BROKEN | {"faults": fh.Faults(nan=0.1, dropped=0.1), "trainer": trainer, "device": "cpu"}
    whole = fh.simulate("fedhist", task, **options)
    assert_same_but_for_rounding(whole, fh.simulate("fedhist", task, **options | {"trainer": "auto"}))
    assert {5} < {event["client"] for event in whole.events} and whole.events[-1]["round"] > 15
    for round_ in (1, 4, 9, 15):
        with pytest.raises(Stopped):
            fh.simulate(
                "fedhist", task, **options, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(round_)
            )
    assert_same(fh.simulate("fedhist", task, **options, checkpoint=tmp_path), whole)


@pytest.mark.parametrize("world", ["the first K", "day and night"])
def test_resumed_to_the_bit(make_task: Callable[..., fh.Task], tmp_path: Path, world: str) -> None:
    options = OPTIONS | WORLDS[world] | {"trainer": "batched", "device": "cpu"}
    whole = fh.simulate("fedhist", make_task(), **options)
    for round_ in (0, 7, 22):
        with pytest.raises(Stopped):
            fh.simulate(
                "fedhist", make_task(), **options, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(round_)
            )
    assert_same(fh.simulate("fedhist", make_task(), **options, checkpoint=tmp_path), whole)


def test_models_of_several_sizes_have_answers_of_their_own(make_task: Callable[..., fh.Task]) -> None:
    tasks = [make_task(model=lambda width=width: nn.Linear(5, width)) for width in (3, 4)]
    options = OPTIONS | {"faults": fh.Faults(wrong_length=0.2), "rounds": 10}
    trials = [fh.Trial("fedavg", task, **options) for task in tasks]
    small, large = fh.simulate_many(trials, trainer="batched", device="cpu")
    assert {event["reason"] for event in small.events} == {"it has 17 values instead of 18"}
    assert {event["reason"] for event in large.events} == {"it has 23 values instead of 24"}


def test_what_training_decides_is_not_foreseen(make_task: Callable[..., fh.Task]) -> None:
    task = make_task()

    def batched(method: str | fh.Strategy = "fedavg", **more: Any) -> bool:
        return plan([fh.Trial(method, task, **OPTIONS | more)], "batched", torch.device("cpu"))[0].scheduled

    assert batched() and batched(bad_updates="clip") and batched(faults=None)
    assert not batched(faults=fh.Faults(huge=0.01))
    assert not batched(bad_updates="stop") and not batched(bad_updates="accept")
    assert not batched("moon")  # clients keep models that nobody accepted
    assert not batched(fh.Private(fh.FedAvg(), clip=1.0, noise_multiplier=1.0))  # which judges by itself


def finished_or_not(*args: Any, **options: Any) -> tuple[fh.History, str]:
    try:
        return fh.simulate(*args, **options, device="cpu"), ""
    except fh.DivergedError as error:
        return error.histories[0], str(error)


@pytest.mark.parametrize("seed", [0, 2, 9])
def test_who_is_judged_where_most_uploads_become_bad(make_task: Callable[..., fh.Task], seed: int) -> None:
    """A batch knows who is accepted; its twin first judges all who may come, which decides when a run is given up."""
    faults = fh.Faults(nan=0.2, replayed=0.2, dropped=0.1, seed=1)
    options = {"k": 6, "rounds": 10, "eval_every": 5, "local": LOCAL, "faults": faults, "seed": seed}
    options["lr_schedule"] = lambda round_: 40.0 if round_ >= 5 else 1.0
    fast, slow = (finished_or_not("fedbuff", make_task(), trainer=name, **options) for name in ("batched", "reference"))
    assert fast[1] == slow[1] != ""
    assert_same_but_for_rounding(fast[0], slow[0])


@pytest.mark.parametrize(("clients", "leave", "seed", "end"), [(3, 15, 191, 8), (5, 5, 65, 8), (5, 5, 42, 5)])
def test_clients_who_leave_while_uploads_are_rejected(
    make_task: Callable[..., fh.Task], clients: int, leave: int, seed: int, end: int
) -> None:
    """Whether enough of them are left is known only once it is known who is rejected and starts again."""
    faults = fh.Faults(nan=0.2, replayed=0.2, seed=1)
    options = {"k": 2, "rounds": 8, "local": LOCAL, "faults": faults, "seed": seed, "availability": f"always:{leave=}"}
    fast, slow = (
        finished_or_not("fedavg", make_task(clients), trainer=name, **options) for name in ("batched", "reference")
    )
    assert len(slow[0].clients) == end and (end == 8 or "no client is at work" in slow[1])
    assert fast[1] == slow[1]
    assert_same_but_for_rounding(fast[0], slow[0])


def test_attackers_who_collude_are_judged_by_what_they_send(make_task: Callable[..., fh.Task]) -> None:
    """What one of them has honestly trained would be rejected, and nobody is sent that."""
    task, attack = make_task(model=lambda: nn.Linear(5, 3)), "little-is-enough:share=0.3"
    for client in fh.LittleIsEnough(share=0.3).attackers(task.num_clients, 0):
        task.x[task.client(int(client))] *= 10
    options = {"k": 6, "rounds": 20, "local": fh.LocalSGD(lr=0.001), "faults": fh.Faults(nan=0.1), "attack": attack}
    fast, slow = (fh.simulate("fedavg", task, trainer=name, **options) for name in ("batched", "reference"))
    assert {event.get("reason", "") for event in slow.events} == {"", "it holds NaN or infinity"}
    assert_same_but_for_rounding(fast, slow)


def test_attackers_who_overdo_it_among_bad_uploads_do_not_hold_a_round_up(make_task: Callable[..., fh.Task]) -> None:
    options = {
        "k": 2,
        "rounds": 10,
        "local": LOCAL,
        "faults": fh.Faults(nan=0.1),
        "attack": "little-is-enough:share=0.3",
    }
    options["lr_schedule"] = lambda round_: 1000.0 if round_ >= 5 else 1.0
    with pytest.raises(fh.DivergedError, match="uploads of attackers were rejected in round 7"):
        fh.simulate("fedavg", make_task(), trainer="reference", max_norm_ratio=3, **options)


def test_who_has_not_arrived_does_not_end_the_run(make_task: Callable[..., fh.Task]) -> None:
    """Most uploads of the first round would be too long, and all of these are dropped."""
    task = make_task(12, model=lambda: nn.Linear(5, 3), examples=240)
    for client in range(1, 12, 2):
        task.x[task.client(client)] *= 1000
    local, faults = fh.LocalSGD(lr=1e-3, batch_size=8), AlwaysDropped(range(1, 12, 2))
    options = {"closing": "synchronous:k=9", "rounds": 3, "local": local, "faults": faults}
    fast, slow = (fh.simulate("fedavg", task, trainer=name, **options) for name in ("batched", "reference"))
    assert {event["event"] for event in slow.events} == {"dropped"}
    assert_same_but_for_rounding(fast, slow)


def test_attackers_who_are_judged_late_start_again_late(make_task: Callable[..., fh.Task]) -> None:
    """When the round would have closed; that has to be said of a clock that goes on by arrivals."""
    local, attack = fh.LocalSGD(lr=0.1, steps=2, batch_size=8), "little-is-enough:share=0.3,z=60"
    options = {"rounds": 6, "seed": 7, "local": local, "attack": attack, "max_norm_ratio": 3, "trainer": "reference"}
    same = {"k": 5}, {"closing": "deadline:seconds=1e9,at_least=5,at_most=5"}
    fast, slow = (fh.simulate("fedavg", make_task(), **each, **options) for each in same)
    assert any("absurd" in event.get("reason", "") for event in slow.events)
    assert (np.diff(fast.arrived.ravel()) > 0).all()
    for name in ("arrived", "clients", "closed", "work", "sent", "received"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name


def test_whoever_was_accepted_is_not_judged_again_with_the_attackers(make_task: Callable[..., fh.Task]) -> None:
    """After an alarm, which an upload that came later has raised."""
    local, attack = fh.LocalSGD(lr=0.1, steps=2, batch_size=8), "little-is-enough:share=0.3"
    history = fh.simulate(
        "fedavg", make_task(), k=6, rounds=3, seed=41, local=local, attack=attack, max_norm_ratio=4,
        faults=fh.Faults(replayed=0.05), trainer="reference",
    )  # fmt: skip
    attackers, *rejected = history.events
    assert {event["client"] for event in rejected if "absurd" in event["reason"]} <= {*attackers["clients"]}
    history = fh.simulate(
        "fedavg", make_task(12), k=12, rounds=3, local=fh.LocalSGD(lr=0.001, steps=2, batch_size=8), attack=attack,
        max_norm_ratio=3, faults=fh.Faults(replayed=0.2), bad_updates="clip", trainer="reference",
    )  # fmt: skip
    clipped = [(event["round"], event["client"]) for event in history.events if event["event"] == "clipped"]
    assert len(clipped) == len({*clipped}) > 3


def test_faults_that_are_not_foreseen_do_not_keep_a_run_from_finding_out_who_comes(
    make_task: Callable[..., fh.Task],
) -> None:
    """If all uploads were accepted too few clients would be left, which is not the case."""
    kinds = [{}, {"huge": 1e-12}]
    trials = [
        fh.Trial(
            "fedavg", make_task(3), k=2, rounds=8, seed=191, local=LOCAL, availability="always:leave=15",
            faults=fh.Faults(nan=0.2, replayed=0.2, seed=1, **more),
        )
        for more in kinds
    ]  # fmt: skip
    histories = fh.simulate_many(trials, trainer="reference")
    assert [history.rounds for history in histories] == [8, 8]
    assert_same_but_for_rounding(*histories)


def test_a_model_whose_square_overflows_is_not_infinite(make_task: Callable[..., fh.Task]) -> None:
    options = {"k": 3, "rounds": 6, "eval_every": 6, "local": fh.LocalSGD(lr=1e20), "bad_updates": "accept"}
    task = make_task(5, model=lambda: nn.Linear(5, 3))
    fast, slow = (finished_or_not("fedavg", task, trainer=name, **options) for name in ("batched", "reference"))
    assert fast[1] == slow[1] and "the loss after round 6" in slow[1]


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "huge"])
def test_an_answer_takes_no_memory_and_is_that_to_a_real_upload(kind: str) -> None:
    faults, start = fh.Faults(**{kind: 1.0}), Start(1.5, 7, 3, 4)
    delta = torch.ones(10)
    with pytest.raises(Rejected) as real:
        Screen("reject", 30).admit(arrived(kind, Upload(delta, 3, 4), 8, 5)[1])
    small, large = (Foreseen(faults, 0, 8, (size, torch.float32)).rejection(start, 5) for size in (10, 10**15))
    assert small is not None and large is not None
    assert small == (5, 1.5, "rejected", 3, 4, str(real.value))
    assert kind == "wrong_length" or large == small


@pytest.mark.parametrize("trainer", ["reference", "batched"])
def test_nothing_but_faults_ends_the_run(make_task: Callable[..., fh.Task], trainer: str) -> None:
    with pytest.raises(fh.DivergedError, match=r"100 uploads in a row were rejected in round 1, .*the faults that"):
        fh.simulate("fedavg", make_task(), **OPTIONS | {"faults": fh.Faults(nan=1.0)}, trainer=trainer)


def test_of_runs_that_all_end_early_the_first_is_named(make_task: Callable[..., fh.Task]) -> None:
    """Not the first to end: here that is the second, since the first leaves the batch."""
    local = replace(LOCAL, schedule=lambda round_: 40.0 if round_ >= 5 else 1.0)
    options = {"k": 6, "rounds": 10, "local": local}
    bad = {0: fh.Faults(nan=0.2), 1: None}
    trials = [fh.Trial("fedavg", make_task(), seed=seed, faults=faults, **options) for seed, faults in bad.items()]
    with pytest.raises(fh.DivergedError, match="seed 0"):
        fh.simulate_many(trials, trainer="batched", device="cpu")

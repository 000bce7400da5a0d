"""Runs that take their rounds together, and what happens to the others when one has to leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.simulation.checkpoint import Checkpoints, Saved
from tests.simulation.test_checkpoint import LOCAL, Stopped, assert_same

OPTIONS: dict[str, Any] = {"k": 3, "rounds": 12, "eval_every": 4, "local": LOCAL}


@dataclass(frozen=True)
class NaNFrom(fh.Attack):
    """Upload NaN."""

    branch_free: ClassVar[bool] = True

    def uploads(self, deltas: Tensor, attacking: Tensor, keys: Tensor) -> Tensor:
        return torch.where(attacking, torch.nan, deltas)


class Counting(fh.Strategy):
    """Weighs by a number that is kept outside of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        self.count += 1
        return 1 + self.count * arrivals.staleness.double()


def trials(task: fh.Task, *strategies: Any) -> list[fh.Trial]:
    """Return runs of which the last meets bad uploads."""
    attacks = [None] * (len(strategies) - 1) + [NaNFrom(share=0.25)]
    return [fh.Trial(s, task, attack=attack, **OPTIONS) for s, attack in zip(strategies, attacks, strict=True)]


def test_every_round_is_reported_once(make_task: Callable[..., fh.Task]) -> None:
    seen: dict[str, list[int]] = {"FedHist": [], "FedAvg": []}

    def on_round(round_: int, histories: Sequence[fh.History]) -> None:
        for history in histories:
            seen[history.method].append(round_)

    fh.simulate_many(trials(make_task(), "fedhist", "fedavg"), trainer="batched", on_round=on_round)
    assert seen == {method: list(range(1, 13)) for method in seen}


@pytest.mark.parametrize("strategies", [(Counting(), "fedavg"), ("fedavg", Counting())])
def test_state_outside_of_buffers_is_no_obstacle_without_a_checkpoint(
    make_task: Callable[..., fh.Task], strategies: Sequence[Any]
) -> None:
    task = make_task()
    batched = fh.simulate_many(trials(task, *strategies), trainer="batched", checkpoint_every=0)
    alone = [fh.simulate_many([trial], trainer="batched")[0] for trial in trials(task, *strategies)]
    for one, other in zip(batched, alone, strict=True):
        assert one.events == other.events and one.round == other.round
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


class Exploding(fh.FedAvg):
    """Returns NaN in round 6."""

    def setup(self, num_clients: int, k: int, num_params: int, device: Any = None) -> Exploding:
        super().setup(num_clients, k, num_params, device)
        self.register_buffer("rounds", torch.zeros(1))
        return self

    def forward(self, arrivals: fh.Arrivals) -> Tensor:
        self.rounds += 1
        return torch.where(self.rounds == 6, torch.nan, super().forward(arrivals))


def test_events_are_not_repeated(make_task: Callable[..., fh.Task]) -> None:
    """A state that is kept in memory must not grow with the run that it was taken from."""
    calls: list[int] = []

    @dataclass(frozen=True)
    class Late(NaNFrom):
        def uploads(self, deltas: Tensor, attacking: Tensor, keys: Tensor) -> Tensor:
            calls.append(1)
            return super().uploads(deltas, attacking, keys) if len(calls) >= 6 else deltas

    task = make_task()
    runs = [fh.Trial(Exploding(), task, **OPTIONS), fh.Trial("fedavg", task, attack=Late(share=0.5), **OPTIONS)]
    histories = fh.simulate_many(runs, trainer="batched", checkpoint_every=0)
    assert [event["event"] for event in histories[0].events] == ["diverged"]


def test_a_run_that_left_keeps_its_progress_when_it_is_resumed(
    make_task: Callable[..., fh.Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task()
    options = {**OPTIONS, "attack": NaNFrom(share=0.5), "trainer": "batched", "checkpoint_every": 0}
    expected = fh.simulate("fedavg", task, **options)
    saved: list[tuple[str, int]] = []
    save = Checkpoints.save

    def counted(self: Checkpoints, state: Saved) -> None:
        save(self, state)
        saved.append((state.kind, state.round))
        if saved[-1] == ("batched-queue", 7):
            raise Stopped

    monkeypatch.setattr(Checkpoints, "save", counted)
    with pytest.raises(Stopped):
        fh.simulate("fedavg", task, **options, checkpoint=tmp_path)
    before = len(saved)
    assert_same(fh.simulate("fedavg", task, **options, checkpoint=tmp_path), expected)
    assert min(round_ for kind, round_ in saved[before:] if kind == "batched-queue") > 7


def test_the_recording_of_a_run_that_diverges_ends_there(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    sizes = []
    for folder in ("a", "b"):
        diverging = fh.Trial("fedavg", make_task(), record=tmp_path / folder, **OPTIONS, faults=fh.Faults(nan=0.995))
        other = fh.Trial("fedhist", make_task(), **OPTIONS, faults=fh.Faults(nan=0.1))
        history, _ = fh.simulate_many([diverging, other])
        assert history.diverged
        files = [tmp_path / folder / name for name in ("uploads.npy", "examples.npy", "updates.npy", "checksums.npy")]
        sizes.append([file.read_bytes() for file in files])
        with pytest.raises(fh.FedHistError, match="diverged, so there is nothing to compare with"):
            fh.replay(tmp_path / folder, "fedavg")
    assert sizes[0] == sizes[1]


def test_colluding_attackers_are_clipped(make_task: Callable[..., fh.Task]) -> None:
    lengths: list[float] = []

    class Seen(fh.FedAvg):
        def forward(self, arrivals: fh.Arrivals) -> Tensor:
            lengths.extend(arrivals.deltas.norm(dim=1).tolist())
            return super().forward(arrivals)

    attack = fh.LittleIsEnough(share=0.25, z=1e9)
    history = fh.simulate(Seen(), make_task(), attack=attack, bad_updates="clip", **OPTIONS)
    assert "clipped" in {event["event"] for event in history.events} and not history.diverged
    assert max(lengths) < 1000

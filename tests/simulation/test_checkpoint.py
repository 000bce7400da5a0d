"""A run that is stopped and resumed ends as one that was never stopped, to the bit."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedhist as fh
from fedhist.simulation.checkpoint import CheckpointWarning

LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
ROUNDS = 17


class Stopped(Exception):
    """Instead of a signal, for a stop at a certain round."""


def stop_after(round_: int) -> Callable[[int, Sequence[fh.History]], None]:
    def on_round(done: int, _: Sequence[fh.History]) -> None:
        if done > round_:
            raise Stopped

    return on_round


def options(**more: Any) -> dict[str, Any]:
    return {"k": 3, "rounds": ROUNDS, "eval_every": 5, "local": LOCAL, **more}


def assert_same(a: fh.History, b: fh.History) -> None:
    assert a.evaluations == b.evaluations
    assert a.events == b.events
    for name in ("clients", "staleness", "arrived", "weights"):
        assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True)
    assert (a.model is None) == (b.model is None) == a.diverged
    for name in a.model or {}:
        assert a.model is not None and b.model is not None
        assert torch.allclose(a.model[name], b.model[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("trainer", ["auto", "threaded", "reference", "batched"])
@pytest.mark.parametrize(
    "method", ["fedavg", "fedhist", "fedhist:memory_dtype=bfloat16", "moon", "refl", "wkafl", "dynsgd", "twafl"]
)
def test_resumed_to_the_bit(make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str, method: str) -> None:
    task = make_task()
    given = options(trainer=trainer)
    whole = fh.simulate(method, task, **given)
    for round_ in (0, 1, 9, 10, 16):
        with pytest.raises(Stopped):
            fh.simulate(method, task, **given, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(round_))
    assert_same(fh.simulate(method, task, **given, checkpoint=tmp_path), whole)
    assert_same(fh.simulate(method, task, **given, checkpoint=tmp_path), whole)  # when nothing is left to do


@pytest.mark.parametrize("name", ["concurrency", "schedule", "dropout", "float64"])
def test_resumed_to_the_bit_in_other_settings(make_task: Callable[..., fh.Task], tmp_path: Path, name: str) -> None:
    task, given = make_task(), options()
    if name == "concurrency":
        given["concurrency"] = 5
    if name == "schedule":
        given["schedule"] = fh.simulate("fedavg", task, **options(), seed=8)
    if name == "dropout":
        task = make_task(model=nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.3), nn.Linear(9, 3)))
    if name == "float64":
        task = fh.Task(
            nn.Linear(5, 3).double(),
            task.x.double(),
            task.y,
            [task.client(i) for i in range(task.num_clients)],
            task.x_test.double(),
            task.y_test,
        )
    whole = fh.simulate("fedhist", task, **given)
    with pytest.raises(Stopped):
        fh.simulate("fedhist", task, **given, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(8))
    assert_same(fh.simulate("fedhist", task, **given, checkpoint=tmp_path), whole)


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_many_trials_of_several_kinds(make_task: Callable[..., fh.Task], tmp_path: Path, trainer: str) -> None:
    """Those that are done stay done, and those under way go on together."""
    task = make_task()
    trials = [fh.Trial(method, task, **options(seed=seed)) for method in ("fedhist", "moon") for seed in (0, 1)]
    trials.append(fh.Trial("refl", task, **options(rounds=11)))
    whole = fh.simulate_many(trials, trainer=trainer)
    seen: list[int] = []

    def stop_in_the_second_wave(done: int, histories: Sequence[fh.History]) -> None:
        seen.append(done)
        if len(seen) in (6, 16, 22, 27):
            raise Stopped

    for _ in range(4):
        with pytest.raises(Stopped):
            fh.simulate_many(
                trials, trainer=trainer, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_in_the_second_wave
            )
    resumed = fh.simulate_many(
        trials, trainer=trainer, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_in_the_second_wave
    )
    for a, b in zip(resumed, whole, strict=True):
        assert_same(a, b)


def test_a_diverged_run_stays_so(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task = make_task(model=nn.Linear(5, 3))
    trials = [fh.Trial("fedavg", task, **options(local=fh.LocalSGD(lr=lr))) for lr in (0.1, 1e38)]
    whole = fh.simulate_many(trials)
    with pytest.raises(Stopped):
        fh.simulate_many(trials, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(12))
    for a, b in zip(fh.simulate_many(trials, checkpoint=tmp_path), whole, strict=True):
        assert_same(a, b)


@pytest.fixture
def _heard() -> Iterator[None]:
    """Hear Ctrl-C even where whoever started the tests does not, as a shell in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_first(make_task: Callable[..., fh.Task], tmp_path: Path, signum: int) -> None:
    task = make_task()

    def interrupt(round_: int, _: Sequence[fh.History]) -> None:
        if round_ == 6:
            os.kill(os.getpid(), signum)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="stopped after round 6") as stopped:
        fh.simulate("fedhist", task, **options(), checkpoint=tmp_path, on_round=interrupt)
    assert stopped.value.signum == signum  # type: ignore[attr-defined]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    seen: list[int] = []
    resumed = fh.simulate("fedhist", task, **options(), checkpoint=tmp_path, on_round=lambda r, _: seen.append(r))
    assert seen[:2] == [6, 7], "the last round that was done is told first"
    assert_same(resumed, fh.simulate("fedhist", task, **options()))


@pytest.mark.usefixtures("_heard")
def test_a_second_signal_stops_at_once(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    def impatient(round_: int, _: Sequence[fh.History]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        fh.simulate("fedhist", make_task(), **options(), checkpoint=tmp_path, on_round=impatient)
    assert type(stopped.value) is KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_checkpoint_before(
    make_task: Callable[..., fh.Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task()
    with pytest.raises(Stopped):
        fh.simulate("fedhist", task, **options(), checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(8))
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patched,
        pytest.warns(CheckpointWarning, match="could not be written .*No space left"),
    ):
        patched.setattr("os.fsync", full)
        finished = fh.simulate("fedhist", task, **options(), checkpoint=tmp_path, checkpoint_every=0)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    assert_same(finished, fh.simulate("fedhist", task, **options(), checkpoint=tmp_path))


def test_a_checkpoint_of_another_run_is_refused(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task = make_task()
    fh.simulate("fedhist", task, **options(), checkpoint=tmp_path)
    wrongs: list[tuple[str, str, fh.Task, dict[str, Any]]] = [
        ("method is 'FedHist' there and 'FedAvg' here", "fedavg", task, options()),
        ("k is 3 there and 4 here", "fedhist", task, options(k=4)),
        ("seed is 0 there and 1 here", "fedhist", task, options(seed=1)),
        ("lr is 0.1 there and 0.2 here", "fedhist", task, options(local=fh.LocalSGD(lr=0.2))),
        ("speeds is", "fedhist", task, options(speeds=fh.LogNormal(sigma=1.0))),
        ("data is", "fedhist", make_task(examples=119), options()),
        ("(speeds|schedule) is", "fedhist", task, options(schedule=fh.simulate("fedavg", task, **options(), seed=5))),
    ]
    for reason, method, other, given in wrongs:
        with pytest.raises(fh.FedHistError, match=f"holds another run: {reason}"):
            fh.simulate(method, other, **given, checkpoint=tmp_path)


def test_a_folder_that_holds_a_run_is_resumed(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    """One meaning: the folder is begun in if it is empty, and resumed from if it is not."""
    task = make_task()
    first = fh.simulate("fedavg", task, **options(), checkpoint=tmp_path)
    seen: list[int] = []
    again = fh.simulate("fedavg", task, **options(), checkpoint=tmp_path, on_round=lambda r, _: seen.append(r))
    assert seen == [ROUNDS], "nothing was left to do"
    assert_same(again, first)
    with pytest.raises(
        fh.InvalidInput, match=r"simulate\(\) has no option 'resume' any more; it is called 'checkpoint'"
    ):
        fh.simulate("fedavg", task, **options(), resume=tmp_path)


def test_another_trainer_is_refused(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    task = make_task()
    fh.simulate("fedavg", task, **options(trainer="batched"), checkpoint=tmp_path)
    with pytest.raises(fh.FedHistError, match="trainer='batched' and cannot be resumed with 'reference'"):
        fh.simulate("fedavg", task, **options(trainer="reference"), checkpoint=tmp_path)


def test_a_folder_that_cannot_be(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.InvalidInput, match="cannot be written: Not a directory"):
        fh.simulate("fedavg", make_task(), **options(), checkpoint=tmp_path / "file" / "below")
    with pytest.raises(fh.InvalidInput, match="checkpoint_every must not be negative"):
        fh.simulate("fedavg", make_task(), **options(), checkpoint=tmp_path, checkpoint_every=-1)


@pytest.mark.parametrize("defence", ["norm-clip", "median", "trimmed", "krum"])
def test_defences_under_attack_are_resumed_to_the_bit(
    make_task: Callable[..., fh.Task], tmp_path: Path, defence: str
) -> None:
    task, given = make_task(), options(attack="scaled-noise:share=0.25", k=4)
    method = f"fedhist + {defence}"
    whole = fh.simulate(method, task, **given)
    with pytest.raises(Stopped):
        fh.simulate(method, task, **given, checkpoint=tmp_path, checkpoint_every=0, on_round=stop_after(8))
    assert_same(fh.simulate(method, task, **given, checkpoint=tmp_path), whole)


def test_one_process_at_a_time(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    def again(*_: object) -> None:
        with pytest.raises(fh.InvalidInput, match="is in use by another process"):
            fh.simulate("fedavg", make_task(), **options(), checkpoint=tmp_path)

    fh.simulate("fedavg", make_task(), **options(), checkpoint=tmp_path, on_round=again)
    assert fh.simulate("fedavg", make_task(), **options(), checkpoint=tmp_path).rounds == ROUNDS


def test_other_options_that_no_name_shows_are_noticed(make_task: Callable[..., fh.Task], tmp_path: Path) -> None:
    class Quiet(fh.FedAvg):
        def __init__(self, rate: float = 0.9) -> None:
            super().__init__()
            self._rate = rate

    fh.simulate(Quiet(0.9), make_task(), **options(), checkpoint=tmp_path)
    with pytest.raises(
        fh.FedHistError, match=r"the strategy has changed since the run in .*\.safetensors began; use another folder"
    ):
        fh.simulate(Quiet(0.1), make_task(), **options(), checkpoint=tmp_path)


def stopped(task: fh.Task, folder: Path, **options: Any) -> None:
    """Leave a checkpoint of a run that was interrupted after its third round."""

    def stop(round_: int, _: object) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fh.simulate("fedavg", task, k=2, rounds=6, checkpoint=folder, checkpoint_every=0, on_round=stop, **options)


@pytest.mark.parametrize(
    ("trainer", "name", "value", "says"),
    [
        ("auto", "fedhist.native.fingerprint", lambda: "another", "compiled kernel .* there, another here"),
        ("auto", "fedhist.simulation.numerics.why_not_native", lambda *_: "no compiler", "kernel .* there, none here"),
        ("threaded", "fedhist.simulation.numerics.processor", lambda: "Abacus 3", "processor .* there, Abacus 3 here"),
        ("reference", "torch.get_num_threads", lambda: 77, r"threads \d+ there, 77 here"),
        ("batched", "torch.get_num_threads", lambda: 77, r"threads \d+ there, 77 here"),
        ("threaded", "torch.__version__", "9.9.9", "PyTorch .* there, 9.9.9 here"),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_to_the_bit_is_refused_unless_asked_for(
    task: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, name: str, value: object, says: str
) -> None:
    stopped(task, tmp_path, trainer=trainer)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    same = {"k": 2, "rounds": 6, "checkpoint": tmp_path, "checkpoint_every": 0, "trainer": trainer}
    with monkeypatch.context() as patch:
        patch.setattr(name, value)
        with pytest.raises(fh.FedHistError, match=f"cannot be resumed to the bit: .*{says}; with --inexact"):
            fh.simulate("fedavg", task, **same)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
        history = fh.simulate("fedavg", task, **same, inexact=True)
    (event,) = history.events
    assert event["event"] == "resumed inexactly" and event["round"] in (2, 3) and history.rounds == 6


def test_threads_do_not_matter_where_a_client_has_one(
    task: fh.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fh.simulate("fedavg", task, k=2, rounds=6)
    stopped(task, tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        history = fh.simulate("fedavg", task, k=2, rounds=6, checkpoint=tmp_path)
    finally:
        torch.set_num_threads(before)
    assert history.events == [] and history.evaluations == whole.evaluations


def test_each_of_several_runs_must_be_resumed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: None
) -> None:
    """The first of them is not trained by the compiled kernel, the second is."""

    class Sine(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.inner(x))

    x, y = torch.randn(60, 5), torch.arange(60) % 3
    plain = torch.nn.Linear(5, 3)
    tasks = [fh.Task(model, x, y, [range(i, 60, 6) for i in range(6)], x, y) for model in (Sine(plain), plain)]
    trials = [fh.Trial("fedavg", each, k=2, rounds=6) for each in tasks]

    def stop(round_: int, _: object) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fh.simulate_many(trials, checkpoint=tmp_path, checkpoint_every=0, on_round=stop)
    monkeypatch.setattr("fedhist.native.fingerprint", lambda: "another")
    with pytest.raises(fh.FedHistError, match="compiled kernel .* there, another here"):
        fh.simulate_many(trials, checkpoint=tmp_path)

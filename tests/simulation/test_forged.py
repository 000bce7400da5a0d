"""Checkpoints with the right checksum that no run has written end with a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import fedhist as fh
from fedhist.simulation.checkpoint import KIND
from fedhist.store import snapshot

Tensors, State = dict[str, Tensor], dict[str, Any]
Forger = Callable[[Tensors, State], object]
ROUNDS = {"k": 3, "rounds": 8, "eval_every": 2}


def trials(task: fh.Task, kind: str) -> list[fh.Trial]:
    faults = {"faults": fh.Faults(nan=0.2), "concurrency": 5} if kind == "clock" else {}
    return [fh.Trial("moon" if kind == "moon" else "fedhist", task, **ROUNDS, **faults)]


def stop(round_: int, _: object) -> None:
    if round_ == 6:
        raise InterruptedError


def changed(**values: Tensor) -> Forger:
    return lambda tensors, _: tensors.update({f"0.{n.replace('__', '.')}": value for n, value in values.items()})


def without(name: str) -> Forger:
    return lambda tensors, _: tensors.pop(f"0.{name}")


def fact(**values: Any) -> Forger:
    return lambda _, state: state["facts"][0].update(values)


def stored(**values: Any) -> Forger:
    return lambda _, state: state.update(values)


def at(name: str, value: float, place: int = 0) -> Forger:
    return lambda tensors, _: tensors[f"0.{name}"].view(-1).__setitem__(place, value)


FORGED: dict[str, tuple[str, Forger]] = {
    "no model": ("fedhist", without("model")),
    "a longer model": ("fedhist", changed(model=torch.zeros(99))),
    "a model of halves": ("fedhist", lambda t, _: t.update({"0.model": t["0.model"].half()})),
    "no memory": ("fedhist", without("strategy.utility")),
    "other memory": ("fedhist", changed(strategy__utility=torch.zeros(3, dtype=torch.float64))),
    "memory of a table": ("fedhist", changed(strategy__utility=torch.zeros(8, 1, dtype=torch.float64))),
    "no rows": ("fedhist", without("rows.clients")),
    "rows of more rounds": ("fedhist", lambda t, _: t.update({"0.rows.weights": t["0.rows.weights"].repeat(2, 1)})),
    "a client that is not there": ("fedhist", at("rows.clients", 99)),
    "a negative client": ("fedhist", at("rows.clients", -7)),
    "staleness without a version": ("fedhist", at("rows.staleness", 99)),
    "traces of other rounds": ("fedhist", at("traces.round", 77)),
    "traces in a row": ("fedhist", changed(traces__utility=torch.zeros(2))),
    "no versions": ("fedhist", changed(source__held=torch.zeros(0, dtype=torch.int64))),
    "versions to come": ("fedhist", at("source.held", 99)),
    "models of versions in a row": ("fedhist", changed(source__versions=torch.zeros(3))),
    "models of strangers": ("moon", at("source.previous.clients", 99)),
    "models of one client twice": ("moon", lambda t, _: t["0.source.previous.clients"].fill_(0)),
    "no clock": ("clock", lambda t, _: [t.pop(name) for name in list(t) if "clock" in name]),
    "half a clock": ("clock", without("source.clock.version")),
    "a stranger at work": ("clock", at("source.clock.client", 99)),
    "somebody at work twice": ("clock", lambda t, _: t["0.source.clock.client"].fill_(0)),
    "work on a version to come": ("clock", at("source.clock.version", 99)),
    "work without end": ("clock", at("source.clock.time", float("nan"))),
    "a clock that is ahead": ("clock", at("source.clock.count", 99, 1)),
    "a negative count": ("clock", at("source.clock.count", -1)),
    "somebody idle twice": ("clock", lambda t, _: t["0.source.clock.idle"].fill_(0)),
    "a round to come": ("fedhist", fact(round=99)),
    "a negative round": ("fedhist", fact(round=-1)),
    "no round": ("fedhist", lambda _, state: state["facts"][0].pop("round")),
    "another round than the others": ("fedhist", stored(round=4)),
    "evaluations of nothing": ("fedhist", fact(evaluations={})),
    "an evaluation without accuracy": ("fedhist", lambda _, state: state["facts"][0]["evaluations"][0].pop("accuracy")),
    "evaluations twice": ("fedhist", lambda _, s: s["facts"][0].update(evaluations=2 * s["facts"][0]["evaluations"])),
    "events in words": ("fedhist", fact(events=["diverged"])),
    "an event without a round": ("fedhist", fact(events=[{"time": 1.0, "event": "x"}])),
    "no screen": ("fedhist", fact(screen=None)),
    "lengths in words": (
        "fedhist",
        fact(screen={"usual": 1.0, "clients": 6, "alarmed": False, "recent": [[0, "long"]]}),
    ),
    "lengths below zero": ("fedhist", fact(screen={"usual": -1.0, "clients": 6, "alarmed": False, "recent": []})),
    "diverged in numbers": ("fedhist", fact(diverged=7)),
    "gone and nowhere else": ("fedhist", fact(left=True)),
    "no facts": ("fedhist", stored(facts=[])),
    "facts of two": ("fedhist", lambda _, state: state["facts"].append(state["facts"][0])),
    "seconds in words": ("fedhist", stored(wall_seconds="long")),
    "another kind": ("fedhist", stored(kind="../../x")),
    "no members": ("fedhist", stored(members=[])),
    "a member on no device": ("fedhist", stored(members=[[0, -1]])),
    "a member twice": ("fedhist", stored(members=[[0, 0], [0, 0]])),
    "a member in words": ("fedhist", stored(members=[["first", 0]])),
    "a description in words": ("fedhist", stored(described=["moon"])),
    "no description": ("fedhist", stored(described=[])),
    "a tensor of nobody": ("fedhist", lambda t, _: t.update({"7.model": torch.zeros(3)})),
    "a tensor without a place": ("fedhist", lambda t, _: t.update({"model": torch.zeros(3)})),
    "values in a list": ("fedhist", lambda _, state: state.clear()),
}


@pytest.fixture(scope="module")
def saved() -> dict[str, tuple[Tensors, State]]:
    return {}


@pytest.mark.parametrize("name", FORGED)
def test_forged_checkpoints(
    make_task: Callable[..., fh.Task], tmp_path: Path, saved: dict[str, tuple[Tensors, State]], name: str
) -> None:
    kind, forger = FORGED[name]
    own = trials(make_task(), kind)
    if kind not in saved:
        with pytest.raises(InterruptedError):
            fh.simulate_many(own, trainer="threaded", checkpoint=tmp_path, checkpoint_every=0, on_round=stop)
        saved[kind] = snapshot.read(tmp_path / "runs-threaded-00000.safetensors", KIND)
        assert fh.simulate_many(own, trainer="threaded", checkpoint=tmp_path)[0].rounds == 8  # as it is, it is fine
    tensors, state = copy.deepcopy(saved[kind])
    forger(tensors, state)
    snapshot.write(tmp_path / "runs-threaded-00000.safetensors", KIND, tensors, state)
    with pytest.raises(fh.FedHistError) as caught:
        fh.simulate_many(own, trainer="threaded", checkpoint=tmp_path)
    assert 20 < len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "7", "[" * 100_000, '{"a": ' * 100_000, "{", "\ud800"])
def test_forged_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.safetensors"
    snapshot.write(file, "a kind", {}, {})
    with safe_open(file, "pt") as stored:
        assert json.loads(stored.get_tensor(snapshot.STATE).numpy().tobytes()) == {}
    own = {snapshot.STATE: torch.frombuffer(bytearray(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)}
    from safetensors.torch import save_file  # noqa: PLC0415

    save_file(own, file, metadata={"kind": "a kind", "blake2b": snapshot._digest(own)})
    with pytest.raises(fh.FedHistError, match="is not a kind, or it is damaged"):
        snapshot.read(file, "a kind")

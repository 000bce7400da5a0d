"""The checkpoint of a K-async server on a network: read to resume it, or to get out what it has learned.

Reading needs no Flower.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedhist.errors import FedHistError, InvalidInput, reason, require, whole
from fedhist.store.evaluation import Evaluation, check_evaluations
from fedhist.store.history import History, sample
from fedhist.store.journal import read
from fedhist.store.measure import ACCURACY, LOSS
from fedhist.store.tables import check_per_client, check_traces, checked_arrivals

CHECKPOINT = "kasync.safetensors"
KINDS = ("a checkpoint of a K-async server, 6", "a checkpoint of a K-async server, 5")
"""What a checkpoint is, now and in earlier versions that are still read."""
MOST = 10**9
"""Clients and rounds of a run, at most; tables of that length are made when one is resumed."""
ROOM = 1000
"""Clients there is room for, at least, where `num_clients` is not given."""
METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
"""The parts of Flower's result that a checkpoint keeps."""
GROWING = ("events", "evaluations", *METRICS, "rows.", "traces.", "per_client.")
"""What only grows from round to round."""
UPLOAD, MAIL = "upload", "mail"


class State(NamedTuple):
    """A server as it was after some round: its tensors, and all else as JSON has it."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def room(self) -> int:
        """How many clients there is room for."""
        return room_for(self.facts["num_clients"], self.facts["expected"])

    def model(self) -> dict[str, Tensor]:
        """Return the model's state dict: that of the last round, or of the moving average if there is one."""
        flat, trained = self.tensors.get("averaged", self.tensors["model"]), set(self.facts["trained"])
        sizes = {name: torch.Size(shape) for name, _, shape in self.facts["entries"]}
        vectors = torch.split(flat, [sizes[name].numel() for name in self.facts["trained"]])
        parts = dict(zip(self.facts["trained"], vectors, strict=True))
        parts |= {name: self.tensors[f"rest.{name}"] for name in sizes.keys() - trained}
        kinds = {name: getattr(torch, kind) for name, kind, _ in self.facts["entries"]}
        return {name: parts[name].to(kinds[name]).view(size).clone() for name, size in sizes.items()}

    def history(self) -> History:
        """Return the rounds up to then."""
        from fedhist.store.schema import Event, Summary, reader  # noqa: PLC0415 (pydantic is not needed to resume)

        facts, done = self.facts, self.facts["server"]["round"]
        tables: dict[str, dict[str, Any]] = {"rows": {}, "traces": {}, "per_client": {}}
        for name, tensor in self.tensors.items():
            table, _, column = name.partition(".")
            if table in tables:
                tables[table][column] = tensor.numpy()
        evaluations = [reader(Evaluation)(json.dumps(each)) for each in facts["evaluations"]]
        events = [reader(Event)(json.dumps(each)).model_dump() for each in facts["events"]]
        accurate = any(each.accuracy is not None for each in evaluations)
        about = facts.get("history", {"metrics": {ACCURACY: True} if accurate else {LOSS: False}, "setting": {}})
        rows, clients = checked_arrivals(tables["rows"]), {"id": sample(self.room)}
        check_evaluations(evaluations, done)
        check_traces(tables["traces"], done, clients)
        check_per_client(tables["per_client"], done, clients)
        history = History(
            facts["method"], 0, f"Flower, {len(facts['clients'])} clients", **rows, evaluations=evaluations,
            events=events, wall_seconds=float(facts["elapsed"]), about_clients=clients, traces=tables["traces"],
            per_client=tables["per_client"], **about,
        )  # fmt: skip
        require(history.rounds == done, f"its tables are not of {done} rounds")
        reader(Summary)(json.dumps(history.summary()))
        return history


def room_for(num_clients: int | None, expected: int) -> int:
    """Return how many clients there is room for, where so many are expected."""
    return num_clients or max(ROOM, 10 * expected)


def read_state(folder: Path) -> State | None:
    """Return the run in a folder, in today's form; None if there is none."""
    if not (folder / CHECKPOINT).exists():
        return None
    tensors, facts = read(folder / CHECKPOINT, KINDS, GROWING)
    try:
        if "evaluations" not in facts:
            facts = _of_version_5(facts)
        for place, event in facts.get("counted", ()):
            facts["events"][place] = event
        counts = whole("expected", facts["expected"], 0), whole("round", facts["server"]["round"], 0)
        require(max(counts) < MOST, "its numbers are absurd")
        require(isinstance(facts["run"], str), "its run has no name")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FedHistError(f"{folder} holds a run that cannot be resumed: {reason(error)}.") from error
    return State(tensors, facts)


def _of_version_5(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint of version 5 holds, in today's form."""
    server = dict(facts["server"])
    lists = {name: server.pop(name) for name in ("events", "evaluations")}
    lists |= {name: [[int(r), values] for r, values in facts[name].items()] for name in METRICS}
    screens = {UPLOAD: server.pop("screen")} | ({} if facts["mail"] is None else {MAIL: facts["mail"]})
    return {**facts, **lists, "server": server, "screens": screens, "configs": {}}


def export(folder: Path, model: Path, history: Path | None = None) -> State:
    """Write the model of a server, dead or alive, into a safetensors file, and its history into a folder."""
    from fedhist.store.snapshot import write_tensors  # noqa: PLC0415

    state = read_state(folder)
    if state is None:
        raise InvalidInput(f"{folder} holds no state of a server: there is no {CHECKPOINT}.")
    for path in (model, history):
        require(path is None or not path.exists(), f"{path} exists already; choose another name.")
    try:
        entries, course = state.model(), state.history()
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise FedHistError(f"{folder} holds a run that cannot be exported: {reason(error)}.") from error
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(model, entries, {"format": "pt"}, private=True)
    except OSError as error:
        raise FedHistError(f"{model} cannot be written: {reason(error)}.") from error
    if history is not None:
        course.save(history)
    return state

"""What can be seen of a deployment while it runs: hooks, and the log."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import ArrayRecord, Error, Message, MetricRecord

import fedhist as fh
from fedhist.flower.log import LONGEST_RECORD, log_round
from fedhist.flower.replies import printable
from fedhist.report.live import JsonLines, Prometheus
from fedhist.store.events import count
from fedhist.store.journal import Journal
from tests.flower.grid import FakeGrid
from tests.flower.helpers import Killed, bad, final, kasync, kill_in, moved, network, run
from tests.flower.test_evaluation import central, evaluates
from tests.report.live.test_prometheus import scrape
from tests.report.live.test_tracking import example
from tests.simulation.test_hooks import Hook


def two() -> FakeGrid:
    return network({node: evaluates(10) for node in (1, 2)})


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def test_several_hooks_see_every_round_and_are_closed_once() -> None:
    first, second = Hook(), Hook()
    server = run(two(), rounds=4, on_round=[first, second])
    assert first.rounds == second.rounds == [1, 2, 3, 4] and first.closed == second.closed == 1
    assert server.history.setting["rounds"] == 4


@pytest.mark.parametrize("dies", [Killed(), KeyboardInterrupt(), ValueError("x")])
def test_hooks_are_closed_however_a_run_ends(dies: BaseException) -> None:
    first, second = Hook(dies=dies, fails=OSError("disk")), Hook()
    with pytest.raises(type(dies)) as caught:
        run(two(), rounds=4, on_round=[first, second])
    assert first.closed == second.closed == 1
    assert caught.value.__notes__ == ["A hook of on_round could not be closed: OSError: disk."]


def test_hooks_are_closed_when_an_evaluation_fails_a_checkpoint_is_refused_or_a_run_diverges(tmp_path: Path) -> None:
    def broken(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        raise RuntimeError("no test data")

    def wild(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"loss": 1.0 + 1e6 * round_})

    run(two(), rounds=1, checkpoint=tmp_path)
    hooks = [Hook(), Hook(), Hook()]
    with pytest.raises(RuntimeError, match="no test data"):
        run(two(), rounds=4, evaluate_fn=broken, on_round=hooks[0])
    with pytest.raises(fh.FedHistError, match="k=2, this one has 1"):
        run(two(), k=1, checkpoint=tmp_path, on_round=hooks[1])
    with pytest.raises(fh.DivergedError, match="the loss after round"):
        run(two(), rounds=40, evaluate_fn=wild, on_round=hooks[2])
    assert [hook.closed for hook in hooks] == [1, 1, 1]


def test_one_server_can_be_started_twice_with_the_same_hooks(tmp_path: Path) -> None:
    path, grid = tmp_path / "log.jsonl", two()
    server = kasync(grid, on_round=JsonLines(path))
    for rounds in (2, 3):
        server.start(grid, ArrayRecord(dict(final(run(two(), rounds=1)))), rounds)
    assert [line["round"] for line in lines_of(path, "round")] == [1, 2, 1, 2, 3]


def test_the_last_call_sees_the_last_evaluation_also_where_nothing_was_left_to_do(tmp_path: Path) -> None:
    seen: list[tuple[int, list[int]]] = []

    def on_round(round_: int, histories: Sequence[fh.History]) -> None:
        seen.append((round_, list(histories[0].round)))

    def dies(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        if round_ == 3:
            raise Killed
        return central(round_, arrays)

    with pytest.raises(Killed):  # in its last evaluation, when all rounds are saved
        run(two(), rounds=3, evaluate_fn=dies, checkpoint=tmp_path, on_round=on_round)
    assert [round_ for round_, _ in seen] == [1, 2]
    run(two(), rounds=3, evaluate_fn=central, checkpoint=tmp_path, on_round=on_round)
    ((round_, evaluated),) = seen[2:]
    assert round_ == 3 and evaluated[-1] == 3


@pytest.mark.parametrize("saved", [6, 4])
def test_json_lines_of_a_deployment_that_is_resumed(
    saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that were not saved any more are followed by those that count, after an event that says so."""
    path, options, write = tmp_path / "log.jsonl", {"checkpoint": tmp_path / "state"}, Journal._write

    def until_then(*arguments: Any) -> None:
        if arguments[2]["server"]["round"] <= saved:
            write(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Journal, "_write", until_then)
        hooks = [JsonLines(path), kill_in(6)]
        run(two(), rounds=9, evaluate_fn=central, **options, on_round=hooks)
    history = run(two(), rounds=9, evaluate_fn=central, **options, on_round=JsonLines(path)).history
    rounds, events = lines_of(path, "round"), lines_of(path, "event")
    (resumed,) = (event for event in events if event["event"] == "resumed")
    assert resumed["round"] == saved + 1 and {line["id"] for line in rounds} == {history.id}
    assert [line["round"] for line in rounds] == [1, 2, 3, 4, 5, 6, *range(saved + 1, 10)]
    assert [line["time"] for line in rounds[6:]] == history.closed[saved:].tolist()
    evaluated = [line["round"] for line in lines_of(path, "evaluation")]
    assert evaluated[-1] == 9 and {*history.round} <= {*evaluated}  # those under way when it was killed are lost
    if saved == 6:
        assert evaluated == history.round
        assert [(line["number"], line["event"]) for line in events] == list(
            enumerate((event["event"] for event in history.events), 1)
        )


def test_events_have_the_time_of_day(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    history = run(two(), rounds=2, on_round=JsonLines(path)).history
    assert [event["event"] for event in history.events] == ["joined", "joined"]
    assert [line["at"] for line in lines_of(path, "event")] == [event["at"] for event in history.events]
    assert all(datetime.fromisoformat(event["at"]).tzinfo is not None for event in history.events)
    assert fh.History.load(history.save(tmp_path / "run")).events == history.events


def test_a_run_that_diverges_says_so_in_the_file(tmp_path: Path) -> None:
    def wild(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"loss": 1.0 + 1e6 * round_})

    with pytest.raises(fh.DivergedError):
        run(two(), rounds=40, evaluate_fn=wild, on_round=JsonLines(tmp_path / "log.jsonl"))
    assert lines_of(tmp_path / "log.jsonl", "event")[-1]["event"] == "diverged"


def test_nodes_are_counted_for_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="its package is not installed (pip install 'fedhist[prometheus]')")
    grid = network({node: moved(-1.0, identity=f"site {node}") for node in (1, 2, 3)})
    grid.add(4, bad(lambda content: content["metrics"].update({"num-examples": -1})))
    grid.clock.at(2.2, lambda: grid.kill(3, notice=1))
    hook, seen = Prometheus(port=0), list[dict[tuple[str, ...], float]]()
    server = run(grid, rounds=6, on_round=[hook, lambda *_: seen.append(scrape(hook))], evaluate_fn=central)
    name = server.history.name
    assert (seen[0]["fedhist_connected_nodes", name], seen[-1]["fedhist_connected_nodes", name]) == (4, 3)
    assert seen[-1]["fedhist_events_total", name, "rejected"] >= 1
    assert seen[-1]["fedhist_evaluation", name, "w"] == -6.0 and seen[-1]["fedhist_evaluated_round", name] == 6


@pytest.mark.parametrize(("stopped", "status", "code"), [(None, "FINISHED", 0), (8, "KILLED", 1)])
def test_runs_of_mlflow_and_wandb_end_with_the_deployment(
    stopped: int | None, status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks of the examples, with stand-ins for what they need."""
    mlflow, wandb = MagicMock(), MagicMock()
    for name, module in {"mlflow": mlflow, "mlflow.entities": MagicMock(), "wandb": wandb}.items():
        monkeypatch.setitem(sys.modules, name, module)
    client = mlflow.MlflowClient.return_value
    client.search_runs.return_value = []
    hooks = [example("mlflow_hook").MLflow("sqlite://"), example("wandb_hook").WandB(project="p")]
    with pytest.raises(Killed) if stopped else contextlib.nullcontext():
        run(two(), rounds=9, evaluate_fn=central, on_round=[*hooks, kill_in(stopped or 0)])
    (ended,) = client.set_terminated.call_args_list
    assert ended.args == (client.create_run.return_value.info.run_id, status)
    wandb.init.return_value.finish.assert_called_once_with(code)
    sent = [call.args[0]["accuracy"] for call in wandb.init.return_value.log.call_args_list]
    assert len(sent) == client.log_batch.call_count  # rounds wait for evaluations that are four behind
    assert sent[:3] == [0.1, 0.2, 0.3] and (stopped or len(sent) == 9)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Return what Flower's logger is given; pytest's own handler sees it once or twice, as others have set it up."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    yield found
    logging.getLogger("flwr").removeHandler(handler)


def test_the_log_has_rounds_metrics_and_evaluations_as_flower_logs_them(lines: list[str]) -> None:
    run(two(), rounds=2, evaluate_every=2, evaluate_fn=central)
    first = lines.index("[ROUND 1/2] closed at 1.0 s with clients 0 (τ 1), 1 (τ 1)")
    assert lines[first + 1] == "\t└──> Aggregated MetricRecord: {'loss': -1.0}"
    for what, found in {
        "Global evaluation of the first model": "\t└──> MetricRecord: {'accuracy': 0.0, 'loss': 1.0, 'w': 0.0}",
        "Global evaluation after round 1": "\t└──> MetricRecord: {'accuracy': 0.1, 'loss': 1.0, 'w': -1.0}",
        "Global evaluation after round 2": "\t└──> MetricRecord: {'accuracy': 0.2, 'loss': 1.0, 'w': -2.0}",
        "Evaluation on 2 clients after round 2": "\t└──> Aggregated MetricRecord: {'seen': -2.0, 'share': 10.0}",
    }.items():
        assert lines.count(what) == 1 and lines[lines.index(what) + 1] == found
    end = next(place for place, line in enumerate(lines) if line.startswith("FedAvg finished after 2 rounds and "))
    assert lines[end + 1 :] == [
        "\t└──> training, round 2: {'loss': -1.0}",
        "\t└──> evaluation on clients, round 2: {'seen': -2.0, 'share': 10.0}",
        "\t└──> global evaluation, round 2: {'accuracy': 0.2, 'loss': 1.0, 'w': -2.0}",
        "\t└──> events: joined 2",
    ]


def test_the_log_is_terse_without_metrics_and_with_many_clients(lines: list[str]) -> None:
    log_round(3, 9, 1.25, dict.fromkeys(range(100), 2), {})
    log_round(4, 9, 1.25, {7: 1}, {f"metric {i}": 1 / 3 for i in range(1000)})
    first, second, metrics = lines
    assert first.endswith("18 (τ 2), 19 (τ 2) and 80 others") and second.endswith("with clients 7 (τ 1)")
    assert "'metric 0': 0.3333, " in metrics and len(metrics) < LONGEST_RECORD + 50


def test_what_a_client_sends_is_one_line_of_the_log(lines: list[str]) -> None:
    evil = "oops\n\x1b[2J\rINFO : [ROUND 99/99] closed\u2028\ud800 für τ"

    def raises(message: Message) -> Message | Error | None:
        return Error(code=2, reason=evil)

    def names(message: Message) -> Message | Error | None:
        answer = moved(-1.0)(message)
        assert isinstance(answer, Message)
        answer.content["metrics"][evil] = 1.0
        return answer

    run(network({1: names, 2: names, 3: raises}), rounds=2, evaluate_every=0)
    assert any("oops\\n\\x1b[2J\\rINFO" in line and "für τ" in line for line in lines if line.startswith("failed: "))
    assert any("oops\\" in line for line in lines if "Aggregated MetricRecord" in line)
    assert all(line.removeprefix("\t").isprintable() for line in lines)
    assert printable("a\tb") == "a\\tb" and printable("naïve → τ") == "naïve → τ"


@pytest.mark.filterwarnings("ignore:in round")
def test_events_beyond_those_kept_are_counted_through_a_restart(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhist.store.events.MOST_EVENTS", 6)

    def grid() -> FakeGrid:
        behaviours = {1: moved(-1.0), 2: moved(-1.0), 3: bad(lambda content: content["metrics"].clear())}
        return network(behaviours, [1.0, 1.0, 0.2])

    with pytest.raises(Killed):
        run(grid(), rounds=200, evaluate_every=0, checkpoint=tmp_path, on_round=kill_in(60))
    history = run(grid(), rounds=200, evaluate_every=0, checkpoint=tmp_path).history
    logged = sum(line.startswith("rejected: ") for line in lines)
    assert count(history.events, "rejected") == logged > 6 and count(history.events, "joined") == 6
    assert [event["event"] for event in history.events[6:]] == ["summed up", "rejected", "resumed", "joined"]
    assert lines[-1] == f"\t└──> events: rejected {logged}, joined 6, summed up 1, resumed 1"

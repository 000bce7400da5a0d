"""Metrics for Prometheus, scraped over loopback while runs are under way."""

from __future__ import annotations

import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.report.live import Prometheus
from fedhist.report.live.prometheus import KINDS, connected, samples
from tests.report.fake import fake_history

SERIES = re.compile(r'(\w+)\{(?:(?:event|metric)="((?:[^"\\]|\\.)*)",)?run="([^"]*)"\} (\S+)')


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("prometheus_client", reason="its package is not installed (pip install 'fedhist[prometheus]')")


def scrape(hook: Prometheus) -> dict[tuple[str, ...], float]:
    """Return all series: by the name, the run, and the value of the other label."""
    with urllib.request.urlopen(f"http://{hook.host}:{hook.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [SERIES.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), lines
    return {(m[1], m[3], *([] if m[2] is None else [m[2]])): float(m[4]) for m in found if m}


@pytest.mark.usefixtures("_installed")
def test_runs_are_scraped_while_they_are_under_way(task: fh.Task) -> None:
    hook, seen = Prometheus(port=0), list[dict[tuple[str, ...], float]]()
    faults = fh.Faults(nan=0.2, dropped=0.1)

    def look(round_: int, _: object) -> None:
        seen.append(scrape(hook))

    runs = fh.compare(
        ["fedavg", "fedhist"], task, k=3, rounds=6, seeds=1, eval_every=2, faults=faults, on_round=[hook, look]
    )
    for history in runs:
        run = history.name
        assert [each["fedhist_rounds_total", run] for each in seen] == [1, 2, 3, 4, 5, 6]
        assert [each["fedhist_uploads_total", run] for each in seen] == [3, 6, 9, 12, 15, 18]
        last = seen[-1]
        assert last["fedhist_staleness_mean", run] == pytest.approx(history.staleness[-1].mean())
        assert last["fedhist_staleness_max", run] == history.staleness[-1].max()
        assert last["fedhist_evaluated_round", run] == 6
        assert last["fedhist_evaluation", run, "loss"] == pytest.approx(history.loss[-1])
        assert last["fedhist_evaluation", run, "accuracy"] == pytest.approx(history.accuracy[-1])
        for kind in ("rejected", "dropped"):
            assert last["fedhist_events_total", run, kind] == sum(e["event"] == kind for e in history.events) > 0
        assert 0 <= last["fedhist_last_round_age_seconds", run] < 60
        assert ("fedhist_evaluation", run, "loss") not in seen[0]
        assert ("fedhist_epsilon", run) not in last and ("fedhist_connected_nodes", run) not in last


@pytest.mark.usefixtures("_installed")
def test_the_port_is_free_when_the_run_has_ended_and_the_hook_can_be_used_again(task: fh.Task) -> None:
    hook, ports, before = Prometheus(port=0), list[int](), threading.active_count()

    def dies(round_: int, _: object) -> None:
        ports.append(hook.port)
        assert ("fedhist_rounds_total", "FedAvg-seed0") in scrape(hook)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fh.simulate("fedavg", task, k=2, rounds=3, on_round=[hook, dies])
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", hook.port))
        with pytest.raises(urllib.error.URLError, match="refused"):
            scrape(hook)
    assert ports == [hook.port] * 2 and threading.active_count() <= before
    hook.close()


@pytest.mark.usefixtures("_installed")
def test_a_port_that_is_in_use_is_told_in_one_sentence() -> None:
    hook = Prometheus(port=0)
    told = f"^port={hook.port} on host='127.0.0.1' cannot be listened on: Address already in use; choose another\\.$"
    with pytest.raises(fh.InvalidInput, match=told):
        Prometheus(port=hook.port)
    hook.close()
    Prometheus(port=hook.port).close()


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"port": -1}, "port must lie between 0 and 65535, got -1"),
        ({"port": 65536}, "port must lie between 0 and 65535"),
        ({"port": "9464"}, "port must be a whole number"),
        ({"host": ""}, "host must be an address"),
        ({"host": None}, "host must be an address"),
        ({"port": 0, "host": "256.1.1.1"}, "port=0 on host='256.1.1.1' cannot be listened on: .*; choose another"),
    ],
)
def test_refuses(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(fh.InvalidInput, match=told):
        Prometheus(**wrong)


@pytest.mark.usefixtures("_installed")
def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    hook = Prometheus(port=0)
    assert hook._server.server_address[0] == "127.0.0.1"
    hook.close()


def test_without_the_package_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(fh.InvalidInput, match=r"pip install 'fedhist\[prometheus\]'"):
        Prometheus(port=0)


@pytest.mark.usefixtures("_installed")
def test_labels_are_bounded_and_escaped() -> None:
    """Whatever is in a history: kinds that are not known are one series, and there are not endless metrics."""
    history = fake_history('a"b\\c\nd')
    kinds = [f'kind {i}"\n' for i in range(500)]
    history.events += [{"time": 0.0, "round": 1, "event": kind, "node": i} for i, kind in enumerate(kinds)]
    metrics: dict[str, float | None] = {f"m{i}": float(i) for i in range(500)}
    last = history.evaluations[-1]
    odd = {'"\n\\': 1.0, "none": None}
    history.evaluations[-1] = fh.Evaluation(60, last.time, None, 0.5, [], 1.0, 2, epsilon=3.0, metrics=odd | metrics)
    hook = Prometheus(port=0)
    hook(60, [history])
    found = scrape(hook)
    hook.close()
    events = {key[2]: value for key, value in found.items() if key[0] == "fedhist_events_total"}
    assert events.keys() == {*KINDS, "other"} and events["other"] == 500 and events["rejected"] == 0
    own = [key[2] for key in found if key[0] == "fedhist_evaluation"]
    assert len(own) <= 100 and {"loss", '\\"\\n\\\\', "m0"} <= {*own} and "none" not in own
    assert found["fedhist_epsilon", history.name] == 3.0


@pytest.mark.usefixtures("_installed")
def test_scraping_does_not_disturb_a_run_that_appends() -> None:
    """Histories change while the server's thread reads them."""
    whole, history, hook = fake_history(rounds=500), fake_history(rounds=1), Prometheus(port=0)
    hook(1, [history])

    def append() -> None:
        for i in range(50_000):
            rounds = 1 + i // 100
            history.clients, history.staleness = whole.clients[:rounds], whole.staleness[:rounds]
            history.events.append({"time": 0.0, "round": rounds, "event": "left" if i % 2 else "joined"})
            history.evaluations.append(whole.evaluations[i % len(whole.evaluations)])

    thread = threading.Thread(target=append)
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(scrape(hook))
    seen.append(scrape(hook))
    hook.close()
    joined = [each["fedhist_events_total", history.name, "joined"] for each in seen]
    assert joined == sorted(joined) and joined[-1] == 25_000
    assert {each.get(("fedhist_connected_nodes", history.name), 0) for each in seen} <= {0, 1}
    assert seen[-1]["fedhist_uploads_total", history.name] == 2500


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"time": 0.0, "round": 1, "event": kind, **more}


def test_connected_nodes_are_counted_since_the_last_restart() -> None:
    assert connected([]) is None and connected([event("rejected")]) is None
    first = [event("joined"), event("joined"), event("left")]
    assert connected(first) == 1 and connected([*first, event("returned")]) == 2
    restarted = [*first, event("resumed"), event("joined"), event("joined"), event("joined")]
    assert connected(restarted) == 3
    assert connected([*restarted, event("left", times=2, since=1)]) == 1
    assert connected([event("joined", times=5, since=1), event("resumed"), event("joined")]) is None


def test_a_round_that_closed_with_fewer_counts_what_there_was() -> None:
    history = fake_history(rounds=4, k=3)
    history.clients[3, 1:], history.staleness[3] = -1, [4, 0, 0]
    found = {name: value for name, labels, value in samples(history) if not labels}
    assert found["fedhist_uploads"] == 10
    assert found["fedhist_staleness_mean"] == 4.0 and found["fedhist_staleness_max"] == 4


def test_all_kinds_of_events_there_are_have_a_series() -> None:
    """Those that a literal names where an event is noted."""
    source, named = Path(fh.__file__).parent, set[str]()
    for file in [*source.glob("flower/*.py"), *source.glob("simulation/**/*.py")]:
        named |= {*re.findall(r'(?:note|fail)\([\w., +]*?"([a-z ]+)"', file.read_text())}
    assert len(named) > 10 and named <= KINDS

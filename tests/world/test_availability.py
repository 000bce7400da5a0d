from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from fedhist.streams import Stream
from fedhist.world.availability import Availability, Stretches, as_availability
from tests.world.fedscale import CPH1801, write_trace

There = Callable[[float], bool]


def check(stretches: Stretches, client: int, there: There, times: np.ndarray, edges: list[float]) -> None:
    """Compare stretches with a function that says at any time whether a client is there.

    `edges` are all moments at which that may change, in order.
    """
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    for time in times.tolist():
        found = stretches.next(client, time)
        later = [m for m in middles if m > time and there(m)]
        if found is None:
            assert not there(time) and not later
            continue
        begin, end = found
        assert begin < end and end > time
        assert (begin <= time) == there(time)
        if begin > time:
            assert not any(there(m) for m in middles if time < m < begin)
        assert all(there(m) for m in middles if max(begin, time) < m < end)
        if end < edges[-1]:
            assert not there(end + 1e-7)  # stretches do not touch each other
        beyond = stretches.next(client, end)
        assert beyond is None or beyond[0] > end


def test_always_is_always() -> None:
    stretches = fh.Always().stretches(3, seed=0)
    assert [stretches.next(client, 1e9) for client in range(3)] == [(0.0, math.inf)] * 3


@pytest.mark.parametrize(
    "model", [fh.DayNight(), fh.DayNight(10.0, 9.9, 3.0), fh.DayNight(7.3, 0.01, 20.0), fh.DayNight(5, 2, 0)], ids=repr
)
def test_days_against_a_membership_function(model: fh.DayNight) -> None:
    starts = Stream(2, "availability").at().uniform(0, model.spread, 5)
    stretches = model.stretches(5, seed=2)
    rng = np.random.default_rng(0)
    for client, start in enumerate(starts):
        assert 0 <= start <= model.spread

        def there(time: float, start: float = start) -> bool:
            return time >= 0 and (time - start) % model.period < model.on

        days = [start + day * model.period for day in range(-30, 60)]
        edges = sorted(edge for day in days for edge in (day, day + model.on) if edge > 0)
        check(stretches, client, there, rng.uniform(0, 10 * model.period, 60), [0.0, *edges])


def test_days_and_time_zones_have_their_shares() -> None:
    spread = fh.DayNight(24, 8, 24).stretches(4000, seed=1)
    for time in (0.0, 5.0, 100.0):
        there = np.mean(
            [found is not None and found[0] <= time for c in range(4000) if (found := spread.next(c, time))]
        )
        assert there == pytest.approx(1 / 3, abs=0.03)
    together = fh.DayNight(24, 8, 0).stretches(50, seed=1)
    assert {together.next(client, 30.0) for client in range(50)} == {(24.0, 32.0)}
    assert fh.DayNight(8, 8, 24).stretches(1, 0).next(0, 1e6) == (0.0, math.inf)


def test_stretches_go_on_where_numbers_are_coarse() -> None:
    stretches = fh.DayNight(period=1e-9, on=1e-10, spread=0).stretches(1, 0)
    for time in (1e9, 1e18):
        found = stretches.next(0, time)
        assert found is not None and found[1] > time


def test_clients_join_late_and_leave_for_good() -> None:
    stretches = fh.Always(join=50.0, leave=100.0).stretches(20_000, seed=3)
    found = np.array([stretches.next(client, 0.0) for client in range(20_000)])
    begin, life = found[:, 0], found[:, 1] - found[:, 0]
    assert begin.min() >= 0 and begin.max() <= 50 and begin.mean() == pytest.approx(25, rel=0.02)
    assert np.median(begin) == pytest.approx(25, rel=0.03)
    assert life.mean() == pytest.approx(100, rel=0.03) and life.std() == pytest.approx(100, rel=0.05)
    for client in (0, 1, 2):
        assert stretches.next(client, found[client, 1]) is None
        inside = (found[client, 0] + found[client, 1]) / 2
        assert stretches.next(client, inside) == tuple(found[client])


def test_joining_and_leaving_cut_days() -> None:
    model = fh.DayNight(10.0, 4.0, 10.0, join=30.0, leave=60.0)
    plain, ends = fh.DayNight(10.0, 4.0, 10.0).stretches(20, 5), fh.Always(join=30.0, leave=60.0).stretches(20, 5)
    stretches = model.stretches(20, seed=5)
    rng = np.random.default_rng(1)
    for client in range(20):
        life = ends.next(client, 0.0)
        assert life is not None

        def there(time: float, client: int = client, life: tuple[float, float] = life) -> bool:
            found = plain.next(client, time)
            return found is not None and found[0] <= time and life[0] <= time < life[1]

        edges, time = [0.0, *life], 0.0
        while time < 1000:
            found = plain.next(client, time)
            assert found is not None
            edges += found
            time = found[1]
        check(stretches, client, there, rng.uniform(0, 300, 40), sorted(edges))


def random_row(rng: np.random.Generator, period: float) -> list[tuple[float, float]]:
    """Return windows, some of which touch, overlap, are empty, or reach beyond the period."""
    cuts = np.sort(rng.choice(np.arange(0, period + 3), rng.integers(2, 9) * 2)).reshape(-1, 2)
    return [(float(begin), float(end)) for begin, end in cuts]


def test_fedscales_trace_against_a_membership_function(tmp_path: Path) -> None:
    rng, table = np.random.default_rng(4), {}
    for device in range(60):
        period = int(rng.integers(10, 30))
        row = random_row(rng, period) if device else [(0.0, period / 2), (period / 2, float(period))]
        rng.shuffle(row)
        active, inactive = [int(2 * b) for b, _ in row], [int(2 * e) for _, e in row]
        table[device + 1] = {"active": active, "inactive": inactive, "finish_time": 2 * period, "model": "x"}
    stretches = fh.AvailabilityTrace(write_trace(tmp_path / "trace", table)).stretches(60, seed=0)
    assert stretches.next(0, 123.0) is not None and stretches.next(0, 123.0)[1] == math.inf  # type: ignore[index]
    for client, row in enumerate(table.values()):
        period = row["finish_time"]
        pairs = list(zip(row["active"], row["inactive"], strict=True))

        def there(time: float, pairs: list[tuple[int, int]] = pairs, period: int = period) -> bool:
            return any(begin <= time % period < end for begin, end in pairs)

        edges = [float(i) for i in range(10 * period)]
        times = np.concatenate([rng.uniform(0, 4 * period, 30), rng.integers(0, 4 * period, 30)])
        check(stretches, client, there, times, edges)


def test_a_real_phone_is_there_as_long_as_its_trace_says(tmp_path: Path) -> None:
    stretches = fh.AvailabilityTrace(write_trace(tmp_path / "trace", {3834: CPH1801})).stretches(1, seed=0)
    time, total = 0.0, 0.0
    while (found := stretches.next(0, time)) is not None and found[1] <= 518400:
        total += found[1] - found[0]
        time = found[1]
    assert total == CPH1801["duration"]
    assert stretches.next(0, 518400 + 13000) == (518400 + 12788, 518400 + 65881)
    assert stretches.next(0, 500_000) == (518400 + 12788, 518400 + 65881)


def write(folder: Path, rows: list[tuple[object, object, object]], name: str = "windows.csv") -> str:
    (folder / name).write_text("client,begin,end\n" + "".join(f"{c},{b},{e}\n" for c, b, e in rows))
    return str(folder / name)


@pytest.mark.parametrize("repeat", [None, 40.0])
def test_csv_against_a_membership_function(tmp_path: Path, repeat: float | None) -> None:
    rng, rows = np.random.default_rng(5), []
    known = {client: [(b, e) for b, e in random_row(rng, 36) if b < e] for client in range(30)}
    for client, windows in known.items():
        rows += [(client, *window) for window in windows]
    rng.shuffle(rows)
    rows = [(int(client), begin, end) for client, begin, end in rows]
    stretches = fh.AvailabilityTrace(write(tmp_path, rows), repeat).stretches(30, seed=0)
    for client in {client for client, *_ in rows}:

        def there(time: float, client: int = client) -> bool:
            at = time % repeat if repeat is not None else time
            return any(begin <= at < end for begin, end in known[client])

        check(stretches, client, there, rng.uniform(0, 120, 40), [float(i) for i in range(400)])


def test_devices_of_a_trace_are_dealt_out(tmp_path: Path) -> None:
    file = write(tmp_path, [(f"phone {i}", i, i + 1) for i in range(500)])
    model = fh.AvailabilityTrace(file)
    one, other = ([model.stretches(20, seed).next(client, 0.0) for client in range(20)] for seed in (0, 1))
    assert len({*one}) == 20 and one != other
    assert one == [model.stretches(20, 0).next(client, 0.0) for client in range(20)]
    own = fh.AvailabilityTrace(write(tmp_path, [(2, 5, 6), (0, 1, 2), (1, 3, 4)], "own.csv")).stretches(3, seed=9)
    assert [own.next(client, 0.0) for client in range(3)] == [(1, 2), (3, 4), (5, 6)]
    assert own.next(1, 4.0) is None


@pytest.mark.parametrize(
    "model", [fh.Always(), fh.DayNight(leave=5.0), fh.DayNight(join=2, interrupted="pause", gives_up=0.5)], ids=repr
)
def test_models_can_be_kept(model: Availability) -> None:
    assert pickle.loads(pickle.dumps(model)) == model and hash(model) == hash(pickle.loads(pickle.dumps(model)))
    stretches = model.stretches(10, seed=4)
    again = pickle.loads(pickle.dumps(stretches))
    assert [stretches.next(c, 3.0) for c in range(10)] == [again.next(c, 3.0) for c in range(10)]
    assert [stretches.next(c, 3.0) for c in range(10)] == [model.stretches(10, 4).next(c, 3.0) for c in range(10)]


def test_a_trace_can_be_kept(tmp_path: Path) -> None:
    model = fh.AvailabilityTrace(write(tmp_path, [(0, 1, 2)]), repeat=3)
    assert pickle.loads(pickle.dumps(model)) == model and hash(model) is not None
    assert pickle.loads(pickle.dumps(model)).stretches(1, 0).next(0, 30.0) == (31.0, 32.0)
    other = fh.AvailabilityTrace(write(tmp_path, [(0, 1, 2.5)]), repeat=3)
    assert other != model and repr(other) != repr(model)


def test_texts_and_objects(tmp_path: Path) -> None:
    assert as_availability(None) is None
    assert as_availability("always") == fh.Always()
    assert as_availability("day-night:on=6,interrupted=pause") == fh.DayNight(on=6, interrupted="pause")
    assert as_availability("always:leave=none,gives_up=0.1") == fh.Always(gives_up=0.1)
    file = write(tmp_path, [(0, 1, 2)])
    assert as_availability(f"trace:file={file},repeat=10") == fh.AvailabilityTrace(file, 10)
    model = fh.DayNight()
    assert as_availability(model) is model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.Always(interrupted="stop"), "interrupted must be 'abandon' or 'pause', got 'stop'."),
        (lambda: fh.Always(gives_up=2), r"gives_up must lie in \[0, 1\], got 2."),
        (lambda: fh.Always(join=-1), "join must not be negative, got -1."),
        (lambda: fh.Always(leave=0), "leave must be positive, got 0."),
        (lambda: fh.DayNight(period=0), "period must be positive, got 0."),
        (lambda: fh.DayNight(on=0), "on must be positive, got 0."),
        (lambda: fh.DayNight(on=25), "on=25 must not exceed period=24.0."),
        (lambda: fh.DayNight(spread=-1), "spread must not be negative, got -1."),
        (lambda: fh.AvailabilityTrace("no such file"), "cannot be read: No such file or directory."),
        (lambda: fh.AvailabilityTrace("x", repeat=0), "repeat must be positive, got 0."),
        (lambda: as_availability("night"), "unknown availability 'night'"),
        (lambda: as_availability(5), r"availability must be a name or an object such as fedhist.DayNight\(\), got 5."),
        (lambda: as_availability(fh.DayNight), "availability must be a name or an object"),
    ],
)
def test_refuses(make: object, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "its first line must name client"),
        ("client,begin,end\n", "it holds no stretches"),
        ("client,begin,end\n0,2,2\n", "end in line 2 must be a number above 2, got '2'"),
        ("client,begin,end\n0,-2,2\n", "begin in line 2 must be a number of at least 0, got '-2'"),
        ("client,begin,end\n0,2,200\n", "line 2 ends at 200, after repeat=100"),
        ("client,begin\n0,2\n", "its first line must name end"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "windows.csv").write_text(text)
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.AvailabilityTrace(str(tmp_path / "windows.csv"), repeat=100)


def test_fedscales_trace_repeats_by_itself(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="it says itself when it repeats; leave repeat away"):
        fh.AvailabilityTrace(write_trace(tmp_path / "trace", {0: CPH1801}), repeat=5)

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import fedhist as fh

HEAD = "client,start,end\n"


def as_csv(schedule: fh.Schedule, shift: float = 0.0) -> str:
    """Return a schedule as the work it is made of."""
    closes = [0.0, 0.0, *schedule.time.tolist()]  # when each version came to be; there is no version 0
    lines = io.StringIO()
    lines.write(HEAD)
    rows = zip(*(t.ravel().tolist() for t in (schedule.clients, schedule.versions, schedule.arrived)), strict=True)
    for client, version, end in rows:
        lines.write(f"{client},{closes[version] + shift!r},{end + shift!r}\n")
    return lines.getvalue()


@pytest.mark.parametrize(
    ("devices", "k"), [(fh.LogNormal(), 4), (fh.Uniform(jitter=0.0), 3), (fh.Constant(jitter=1.0), 1)]
)
def test_a_schedule_comes_back_from_a_file(tmp_path: Path, devices: fh.LogNormal, k: int) -> None:
    made = fh.make_schedule(20, k, 50, devices, seed=1)
    file = tmp_path / "log.csv"
    file.write_text(as_csv(made))
    read = fh.read_schedule(file, k)
    assert np.array_equal(read.clients, made.clients) and np.array_equal(read.staleness, made.staleness)
    assert np.array_equal(read.arrived, made.arrived)
    lines = file.read_text().splitlines(keepends=True)[1:]
    random.Random(0).shuffle(lines)
    file.write_text(HEAD + "".join(lines))
    again = fh.read_schedule(file, k)
    assert np.array_equal(again.clients, made.clients) and np.array_equal(again.staleness, made.staleness)


def test_rounds_that_close_at_once_are_all_before_who_starts_then(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(HEAD + "a,0,1\nb,0,1\nc,0,1\na,1,2\n")
    assert fh.read_schedule(tmp_path / "log.csv", k=1).staleness.tolist() == [[1], [2], [3], [1]]


def test_a_simulation_follows_it(task: fh.Task, tmp_path: Path) -> None:
    made = fh.make_schedule(8, 2, 10, fh.LogNormal(), seed=0)
    (tmp_path / "log.csv").write_text(as_csv(made))
    read = fh.read_schedule(tmp_path / "log.csv", k=2)
    a = fh.simulate("fedhist", task, k=2, rounds=10, schedule=read)
    b = fh.simulate("fedhist", task, k=2, rounds=10, speeds=fh.LogNormal(), seed=0)
    assert a.accuracy == b.accuracy and np.array_equal(a.weights, b.weights)
    with pytest.raises(fh.InvalidInput, match="has 10 rounds, rounds=11 were asked for; give rounds=10 or fewer"):
        fh.simulate("fedhist", task, k=2, rounds=11, schedule=read)


def test_by_hand(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "node,end,client,start\n"
        "x,110,ann,100\n"  # round 1
        "x,130,bob,100\n"  # round 1, closes at 130
        "x,140,cid,129.9\n"  # round 2, from version 1
        "x,150,ann,130\n"  # round 2, closes at 150, from version 2: it starts as the round closes
        "x,170,bob,140\n"  # round 3, from version 2
        "x,180,cid,150\n"  # round 3, from version 3
        "x,190,ann,150\n"  # does not fill a round
    )
    read = fh.read_schedule(tmp_path / "log.csv", k=2)
    assert read.num_clients == 3 and read.clients.tolist() == [[0, 1], [2, 0], [1, 2]]
    assert read.versions.tolist() == [[1, 1], [1, 2], [2, 3]]
    assert read.arrived.tolist() == [[10, 30], [40, 50], [70, 80]]


def test_jsonl_and_compression(tmp_path: Path) -> None:
    rows = [{"client": c, "start": s, "end": e, "more": [1]} for c, s, e in (("a", 0, 2), ("b", 0.5, 1), ("a", 2, 3))]
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "log.jsonl").write_text(text)
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "log.csv").write_text("\ufeff" + HEAD + "a,0,2\n\nb,0.5,1\na,2,3\n")
    for name in ("log.jsonl", "log.jsonl.gz", "log.csv"):
        read = fh.read_schedule(tmp_path / name, k=1)
        assert read.clients.tolist() == [[1], [0], [0]] and read.staleness.tolist() == [[1], [2], [1]]


def test_what_names_a_client(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text(HEAD + "7,0,1\n3,0,2\n")
    assert fh.read_schedule(file, k=1).clients.tolist() == [[7], [3]]
    assert fh.read_schedule(file, k=1, clients="labels").clients.tolist() == [[0], [1]]
    file.write_text(HEAD + "7,0,1\nx,0,2\n")
    assert fh.read_schedule(file, k=1).clients.tolist() == [[0], [1]]
    with pytest.raises(fh.FedHistError, match="client 'x' is not an id"):
        fh.read_schedule(file, k=1, clients="ids")
    with pytest.raises(fh.InvalidInput, match="clients must be 'auto', 'ids' or 'labels', got 'names'"):
        fh.read_schedule(file, k=1, clients="names")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "its first line must name client, got \\[\\]"),
        ("client,begin,end\n", "its first line must name start"),
        ("client,start,end,end\na,0,1,2\n", "its first line must name each column once"),
        (HEAD, "it holds no trainings"),
        (HEAD + "a,0,1\n", "it has 1 arrivals, fewer than k=2"),
        (HEAD + "a,0,1\na,0\n", "line 3 has 2 values for 3 columns"),
        (HEAD + "a,0,1\nb,nan,1\n", "start in line 3 is not a time in seconds: 'nan'"),
        (HEAD + "a,0,1\nb,0,inf\n", "end in line 3 is not a time in seconds: 'inf'"),
        (HEAD + "a,0,1\nb,0,2026-11-15T10:00\n", "end in line 3 is not a time in seconds: '2026-11-15T10:00'"),
        (HEAD + "a,0,1\nb,0,1e300\n", "end in line 3 is not a time in seconds"),
        (HEAD + "a,0,1\nb,3,2\n", "client 'b' ends at 2, no later than it starts"),
        (HEAD + "a,0,1\nb,2,2\n", "client 'b' ends at 2, no later than it starts"),
        (HEAD + "a,0,5\nb,0,1\na,4,6\n", "client 'a' starts at 4, before its training until then ends"),
        (HEAD + "a,0,1\na,1,2\na,2,3\n", "it has 3 arrivals, fewer than k=2 of different clients"),
        (HEAD + ",0,1\nb,0,1\n", "line 2 names no client: ''"),
        (HEAD + "x" * 300 + ",0,1\n", "line 2 names no client"),
        (HEAD + "99999999999,0,1\n07,0,1\n", "it has"),
        (HEAD + "9999999999,0,1\n1,0,1\n", "client 9999999999 is not an id; give clients='labels'"),
        (HEAD + "7,0,1\n07,0,1\n", "an id is written in two ways"),
        (HEAD + 'a,0,"1\n', "unexpected end of data"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "log.csv"
    file.write_text(content)
    if sentence == "it has":  # a number too long for an id is a name
        assert fh.read_schedule(file, k=2).num_clients == 2
        return
    with pytest.raises(fh.FedHistError, match=sentence) as caught:
        fh.read_schedule(file, k=2)
    assert str(caught.value).startswith(f"schedule={file} cannot be used: ") and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[1]\n", "line 1 is not a JSON object"),
        (b'{"client": "a", "start": 0}\n', "line 1 has no end"),
        (b'{"client": 1.5, "start": 0, "end": 1}\n', "line 1 names no client: 1.5"),
        (b'{"client": true, "start": 0, "end": 1}\n', "line 1 names no client: True"),
        (b'{"client": 1, "start": 0, "end": true}\n', "end in line 1 is not a time in seconds: True"),
        (b'{"client": 1, "start": NaN, "end": 1}\n', "NaN is not a finite number"),
        (b'{"client": 1, "start": 0, "end": 1' + b"0" * 400 + b"}\n", "end in line 1 is not a time"),
        (b"\xff\xfe\n", "can't decode"),
        (b"{\n", "Expecting property name"),
        (b'{"client": ' + b"[" * 100000 + b"\n", "too many values|too deeply"),
    ],
)
def test_jsonl_that_cannot_be_used(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "log.jsonl").write_bytes(content)
    with pytest.raises(fh.FedHistError, match=sentence):
        fh.read_schedule(tmp_path / "log.jsonl", k=1)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, Path("/dev/zero")):
        with pytest.raises(fh.InvalidInput, match=f"schedule={path} cannot be read: "):
            fh.read_schedule(path, k=1)
    with pytest.raises(fh.InvalidInput, match="k must be at least 1"):
        fh.read_schedule(tmp_path / "none.csv", k=0)


def test_more_clients_than_the_task_has(task: fh.Task, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(HEAD + "".join(f"c{i},0,{i + 1}\n" for i in range(9)))
    with pytest.raises(fh.InvalidInput, match="names client 8, the task has 8 clients"):
        fh.simulate("fedavg", task, k=3, rounds=3, schedule=fh.read_schedule(tmp_path / "log.csv", k=3))


works = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 12)).map(lambda w: (w[0], w[1], w[1] + w[2])),
    max_size=30,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(works, st.integers(1, 4))
def test_any_work_is_a_schedule_or_a_sentence(tmp_path: Path, work: list[tuple[int, int, int]], k: int) -> None:
    (tmp_path / "log.csv").write_text(HEAD + "".join(f"{c},{s},{e}\n" for c, s, e in work))
    try:
        read = fh.read_schedule(tmp_path / "log.csv", k)
    except fh.FedHistError:
        return
    assert read.rounds == len(work) // k and (np.diff(read.arrived.ravel()) >= 0).all()
    assert (read.staleness >= 1).all() and (read.versions >= 1).all()
    assert all(len(set(row)) == k for row in read.clients.tolist())
    first = min(start for _, start, _ in work)
    pieces = {(c, e - first): s - first for c, s, e in work}
    for row, (clients, times) in enumerate(zip(read.clients.tolist(), read.arrived.tolist(), strict=True)):
        for client, time, version in zip(clients, times, read.versions[row].tolist(), strict=True):
            start = pieces[client, time]
            assert version == 1 + sum(close <= start for close in read.time.tolist())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 300), st.sampled_from(["log.csv", "log.jsonl", "log.csv.gz"]))
def test_any_bytes_are_a_schedule_or_a_sentence(tmp_path: Path, noise: bytes, at: int, name: str) -> None:
    good = (HEAD + "".join(f"{i % 3},{i},{i + 2.5}\n" for i in range(20))).encode()
    if name == "log.jsonl":
        good = b"".join(b'{"client": %d, "start": %d, "end": %d}\n' % (i % 3, i, i + 2) for i in range(9))
    content = good[:at] + noise + good[at + len(noise) :]
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") and at % 2 else content)
    try:
        assert fh.read_schedule(tmp_path / name, 2).k == 2
    except fh.FedHistError as error:
        assert "\n" not in str(error) and len(str(error)) < 600

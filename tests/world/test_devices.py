from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import fedhist as fh
from fedhist.world import tables, windows
from fedhist.world.network import as_network
from fedhist.world.speeds import as_speeds, per_of
from fedhist.world.tables import deal
from tests.world.fedscale import CPH1801, capacities, write_trace

TABLE = "client,compute,up,down,latency,model\n" + "".join(
    f"{i},{0.01 * (i + 1)},{1e6 * (i + 1)},{1e7 * (i + 1)},{0.1 * i},phone\n" for i in range(6)
)


def write(folder: Path, text: str, name: str = "devices.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_table_says_how_long_clients_compute_and_transfer(tmp_path: Path) -> None:
    table = fh.DeviceTable(write(tmp_path, TABLE))
    assert per_of(table) == "example" and table.jitter == 0
    assert table.mean_times(6, seed=0) == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])
    # 8 · 125,000 bits up at 1 Mbit/s and 8 · 1,250,000 down at 10 Mbit/s are 2 s for the first client.
    expected = [2 / (i + 1) + 2 * 0.1 * i for i in range(6)]
    assert table.times(6, 0, upload=125_000, download=1_250_000) == pytest.approx(expected)


def test_clients_with_ids_have_their_own_rows(tmp_path: Path) -> None:
    rows = TABLE.splitlines()
    table = fh.DeviceTable(write(tmp_path, "\n".join([rows[0], *rows[:0:-1]])))
    for clients in (3, 6):
        assert table.mean_times(clients, seed=5) == pytest.approx([0.01 * (i + 1) for i in range(clients)])
    more = table.mean_times(40, seed=5)
    assert more[:6] == pytest.approx([0.01 * (i + 1) for i in range(6)])
    assert {*more.round(6)} == {0.01, 0.02, 0.03, 0.04, 0.05, 0.06}
    assert not np.array_equal(more, table.mean_times(40, seed=6))


def test_rows_without_ids_are_dealt_out_by_the_seed() -> None:
    few = deal(None, 1000, 30, 4, "x")
    assert len({*few.tolist()}) == 30 and few.max() > 100
    assert np.array_equal(few, deal(None, 1000, 30, 4, "x"))
    assert not np.array_equal(few, deal(None, 1000, 30, 5, "x"))
    assert deal(None, 30, 30, 4, "x").tolist() == [*range(30)]
    many = deal(None, 3, 3003, 4, "x")
    assert many[:3].tolist() == [0, 1, 2] and np.bincount(many).min() > 900
    from_one = deal(np.arange(1, 101), 100, 100, 4, "x")  # ids that are not those of clients 0 to 99
    assert from_one.tolist() == [*range(100)]


def test_a_client_has_one_device_for_work_and_traffic(tmp_path: Path) -> None:
    lines = "compute,up\n" + "".join(f"{i},{i}\n" for i in range(1, 400))
    table = fh.DeviceTable(write(tmp_path, lines))
    assert table.times(50, 3, upload=1000, download=1000) == pytest.approx(8000 / table.mean_times(50, 3))


def test_fedscales_capacities_give_fedscales_times(tmp_path: Path) -> None:
    """As its ``get_completion_time`` has them: 3·ms/1000 for an example, and kilobits of 1024 over the kbps."""
    known = {1: (162.0, 5648.109619499134), 2: (1000.0, 1.0), 3: (20.0, 300.0)}
    (tmp_path / "client_device_capacity").write_bytes(capacities(known))
    table = fh.DeviceTable(str(tmp_path / "client_device_capacity"))
    assert table.mean_times(3, seed=0) == pytest.approx([0.486, 3.0, 0.06])
    size = 25_000
    expected = [2 * (size / 1024 * 8) / kbps for _, kbps in known.values()]
    assert table.times(3, 0, size, size) == pytest.approx(expected)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_numbers_are_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    entries = {"a": {"computation": 100, "communication": 8.0}, 7: {"computation": 1.5, "communication": 9}}
    (tmp_path / "devices.pkl").write_bytes(pickle.dumps(entries, protocol=protocol))
    assert fh.DeviceTable(str(tmp_path / "devices.pkl")).mean_times(2, 0) == pytest.approx([0.3, 0.0045])


def test_scalars_of_both_numpys_are_read(tmp_path: Path) -> None:
    for number, kind in enumerate((np.float64, np.float32, np.int64, np.uint32)):
        entries = {0: {"computation": kind(2), "communication": kind(4)}}
        for protocol in (3, 4, 5):
            file = tmp_path / f"{number}-{protocol}"
            file.write_bytes(pickle.dumps(entries, protocol=protocol))
            assert fh.DeviceTable(str(file)).mean_times(1, 0) == pytest.approx([0.006])


def test_compressed_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv.gz"
    file.write_bytes(gzip.compress(TABLE.encode("utf-8-sig").replace(b"\n", b"\r\n")))
    assert fh.DeviceTable(file).mean_times(2, 0) == pytest.approx([0.01, 0.02])  # type: ignore[arg-type]


def test_a_table_is_told_from_others_by_its_content(tmp_path: Path) -> None:
    one, same = fh.DeviceTable(write(tmp_path, TABLE)), fh.DeviceTable(write(tmp_path, TABLE))
    assert one == same and hash(one) == hash(same) and repr(one) == repr(same)
    again = pickle.loads(pickle.dumps(one))
    assert again == one and np.array_equal(again.mean_times(9, 1), one.mean_times(9, 1))
    other = fh.DeviceTable(write(tmp_path, TABLE + "6,1,1,1,1,x\n"))
    assert other != one and repr(other) != repr(one)


def test_a_text_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, TABLE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-folder").mkdir()
    write(tmp_path / "some-folder", TABLE, "my devices_2.csv")
    for name in (file, "devices.csv", "./devices.csv", "some-folder/my devices_2.csv", '"devices.csv"'):
        speeds = as_speeds(f"table:file={name},jitter=0.5")
        assert isinstance(speeds, fh.DeviceTable) and speeds.jitter == 0.5
        network = as_network(f"table:file={name}")
        assert network is not None and network.times(1, 0, 125_000, 1_250_000) == pytest.approx([2.0])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it must have a line for each device, with some of the columns compute, up, down, latency"),
        ("compute\n", "it must have a line for each device"),
        ("speed\n1\n", "it must have a line for each device"),
        ("compute,compute\n1,1\n", "its first line must name each column once"),
        ("compute\n1,2\n", "line 2 has 2 values for 1 columns"),
        ("compute\n1\n0\n", "compute in line 3 must be a number above 0, got '0'"),
        ("up\nfast\n", "up in line 2 must be a number above 0, got 'fast'"),
        ("down\nnan\n", "down in line 2 must be a number above 0, got 'nan'"),
        ("latency\n-1\n", "latency in line 2 must be a number of at least 0, got '-1'"),
        ("compute\n1e300\n", "compute in line 2 must be a number above 0, got '1e300'"),
        ("client,compute\n1,1\n1,2\n", "it has a client twice"),
        ('compute\n"1', "unexpected end of data"),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match="devices.csv' cannot be used: ") as error:
        fh.DeviceTable(write(tmp_path, text))
    assert sentence in str(error.value)


def test_columns_that_are_needed_are_named(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="has no column compute, which says how long clients take."):
        fh.DeviceTable(write(tmp_path, "up\n5\n")).mean_times(1, 0)
    with pytest.raises(fh.InvalidInput, match="has none of the columns up, down and latency"):
        fh.DeviceTable(write(tmp_path, "compute\n5\n", "other.csv")).times(1, 0, 1, 1)
    assert fh.DeviceTable(write(tmp_path, "latency\n5\n", "third.csv")).times(2, 0, 1, 1).tolist() == [10, 10]


def test_files_that_are_not_there_and_options_are_refused(tmp_path: Path) -> None:
    for make, sentence in (
        (lambda: fh.DeviceTable(str(tmp_path / "no.csv")), "no.csv' cannot be read: No such file or directory."),
        (lambda: fh.DeviceTable(str(tmp_path)), "cannot be read: Is a directory."),
        (lambda: fh.DeviceTable(5), "file must be the name of a file, got 5."),  # type: ignore[arg-type]
        (
            lambda: fh.DeviceTable(write(tmp_path, TABLE), per="step"),
            "per must be 'training' or 'example', got 'step'.",
        ),
        (lambda: fh.DeviceTable(write(tmp_path, TABLE), jitter=-1), "jitter must not be negative, got -1."),
        (lambda: as_speeds("table"), "table needs file, as in table:file=…."),
    ):
        with pytest.raises(fh.InvalidInput, match=sentence):
            make()


class Reduced:
    """Pickled as a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def scalar(code: str, order: str, raw: bytes) -> bytes:
    """Return a capacity whose NumPy scalars are of any type."""
    kind = b"cnumpy\ndtype\n" + pickle.dumps((code, 0, 1), 2)[2:-1] + b"R"
    kind += pickle.dumps((3, order, None, None, None, -1, -1, 0), 2)[2:-1] + b"b"
    value = b"cnumpy.core.multiarray\nscalar\n(" + kind + pickle.dumps(raw, 3)[2:-1] + b"tR"
    return b"\x80\x03}K\x01}(U\x0bcomputation" + value + b"U\x0dcommunicationG@\x00\x00\x00\x00\x00\x00\x00us."


def test_no_pickle_can_call_anything(tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    good = {"computation": 1.0, "communication": 1.0}
    evil = {
        "system": {1: {**good, "x": Reduced(os.system, f"touch '{marker}'")}},
        "eval": Reduced(eval, f"open({str(marker)!r}, 'w')"),
        "exec": [Reduced(exec, f"open({str(marker)!r}, 'w')")],
        "import": {Reduced(__import__, "antigravity"): good},
        "array": {1: np.zeros(3)},
        "object": {1: {**good, "x": Path("/")}},
        "complex": {1: {**good, "x": 1j}},
    }
    for name, thing in evil.items():
        for protocol in (0, 2, 3, 4, 5):
            file = tmp_path / f"{name}{protocol}"
            file.write_bytes(pickle.dumps(thing, protocol=protocol))
            for read in (fh.DeviceTable, fh.AvailabilityTrace):
                with pytest.raises(fh.InvalidInput, match=r"neither CSV by its name nor a pickle of .* \(it names "):
                    read(str(file))
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"compute\n1\n",
        b"\x80\x03}",
        b"\x80\x63}.",
        b"\x80\x03Pperson\n.",
        b"\x80\x03K\x01Q.",
        b"\x80\x02\x82\x01.",
        b"\x80\x05\x97.",
        b"\x80\x03cnumpy\ndtype\n(tR.",
        b"\x80\x03cnumpy\ndtype\n(]tR]b.",
        b"\x80\x03cnumpy.core.multiarray\nscalar\n(K\x01K\x02tR.",
        b"\x80\x03B\xff\xff\xff\x7f.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        scalar("O8", "|", b"12345678"),
        scalar("f8", "999999999s", b"12345678"),
        scalar("f8", "<", b"1234"),
        scalar("S8", "<", b"12345678"),
    ],
)
def test_damaged_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "devices").write_bytes(content)
    with pytest.raises(fh.InvalidInput, match="neither CSV by its name nor a pickle"):
        fh.DeviceTable(str(tmp_path / "devices"))


def test_the_forged_scalar_is_otherwise_right(tmp_path: Path) -> None:
    (tmp_path / "devices").write_bytes(scalar("f8", ">", b"@Y\x00\x00\x00\x00\x00\x00"))
    assert fh.DeviceTable(str(tmp_path / "devices")).mean_times(1, 0) == pytest.approx([0.3])


DEEP: list[object] = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        ([], "it must hold a dictionary of devices"),
        ({}, "it must hold a dictionary of devices"),
        ({1: 5}, r"device 1 must be a dictionary with computation \(float\), communication \(float\), got 5"),
        ({1: {"computation": 1.0}}, "device 1 must be a dictionary with"),
        ({1: {"computation": "1", "communication": 1.0}}, "device 1 must be a dictionary with"),
        ({1: {"computation": DEEP, "communication": 1.0}}, "device 1 must be a dictionary with"),
        ({1: {"computation": True, "communication": 1.0}}, "computation must be a number above 0, got True"),
        ({1: {"computation": 0.0, "communication": 1.0}}, "computation must be a number above 0, got 0.0"),
        ({1: {"computation": 1.0, "communication": float("nan")}}, "communication must be a number above 0, got nan"),
        ({1: {"computation": 10**400, "communication": 1.0}}, "computation must be a number above 0, got 1000"),
    ],
)
def test_capacities_of_another_form_are_refused(tmp_path: Path, thing: object, sentence: str) -> None:
    (tmp_path / "devices").write_bytes(pickle.dumps(thing))
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.DeviceTable(str(tmp_path / "devices"))


TRACE = {"active": [1], "inactive": [2], "finish_time": 9}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"active": [1, 3]}, "active and inactive of device 'a' must have the same length"),
        (
            {"active": (1,)},
            r"device 'a' must be a dictionary with active \(list\), inactive \(list\), finish_time \(int\)",
        ),
        ({"finish_time": None}, "device 'a' must be a dictionary"),
        ({"finish_time": 0}, "finish_time must be a number above 0, got 0"),
        ({"inactive": ["2"]}, "inactive times must be a number of at least 0, got '2'"),
        ({"active": [-1]}, "active times must be a number of at least 0, got -1"),
        ({"active": [DEEP]}, "active times must be a number of at least 0"),
    ],
)
def test_traces_of_another_form_are_refused(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    file = write_trace(tmp_path / "trace", {0: TRACE, "a": TRACE | change})
    with pytest.raises(fh.InvalidInput, match=sentence):
        fh.AvailabilityTrace(file)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_trace(tmp_path / "trace", dict.fromkeys(range(50), CPH1801))  # one list, 50 times
    monkeypatch.setattr(windows, "MOST_WINDOWS", 8 * 49)
    with pytest.raises(fh.InvalidInput, match="it holds more than 392 stretches"):
        fh.AvailabilityTrace(file)
    monkeypatch.setattr(tables, "MOST_BYTES", 100)
    with pytest.raises(fh.InvalidInput, match="it is larger than 100 bytes"):
        fh.AvailabilityTrace(file)

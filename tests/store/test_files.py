from __future__ import annotations

import errno
import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedhist as fh
from fedhist.command.settings import Settings
from fedhist.store.files import parse_json, parse_toml, plain, read_gzip, read_lines, read_text, whole_file


def peak(work: Callable[[], Any], raises: type[Exception] = ValueError) -> int:
    """Return the memory that work takes until it is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(raises):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "a") as part:
        part.write_text("half")
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a plain file"):
            plain(path)
    with pytest.raises(IsADirectoryError):
        plain(tmp_path)


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the answer is played."""

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "a.toml").write_text("k = 3")
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(fh.InvalidInput, match="config=.*a.toml cannot be read: Permission denied."):
        Settings.read(tmp_path / "a.toml")
    for name in ("arrivals.npz", "summary.json", "history.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(fh.FedHistError, match="does not hold a complete run: Permission denied."):
        fh.History.load(tmp_path)


def test_lines_of_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("ä\r\nb\x0b\u2028c\n\nd".encode())
    (tmp_path / "a.gz").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    for name in ("a", "a.gz"):
        assert list(read_lines(tmp_path / name)) == ["ä\r\n", "b\x0b\u2028c\n", "\n", "d"]
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="codec can't decode"):
        read_text(tmp_path / "b")


def test_a_bomb_does_not_go_off(tmp_path: Path) -> None:
    """A gigabyte of zeros in a megabyte."""
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b"\0" * (1 << 20)) * 1000)
    assert bomb.stat().st_size < 1.1e6
    assert peak(lambda: read_gzip(bomb)) < 10 * bomb.stat().st_size
    assert peak(lambda: list(read_lines(bomb))) < 12 * bomb.stat().st_size


@pytest.mark.parametrize("cut", [1, 5, 9, 30])
def test_a_compressed_file_cut_short(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "a.gz"
    file.write_bytes(gzip.compress(os.urandom(50))[:-cut])
    with pytest.raises(ValueError, match="its compressed content is damaged"):
        read_gzip(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1e999]", "1e999 is not a finite number"),
        ("[-1e999]", "-1e999 is not a finite number"),
        ("NaN", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ("[" * 1100, "nested too deeply|Expecting value"),
        ("[" * 100_000, "too many values for its length"),
        ("9" * 5000, "4300 digits"),
        ("", "Expecting value"),
    ],
)
def test_json_that_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text)


@pytest.mark.parametrize("item", ["[]", "{}", '{"":0}', '"ab"', "[0]"])
def test_json_of_many_small_things(item: str) -> None:
    text = f"[{','.join([item] * 500_000)}]"
    assert peak(lambda: parse_json(text)) < len(text)


def test_json_of_numbers_takes_no_more_than_ten_times_its_size() -> None:
    text = f"[{', '.join(['0.0'] * 500_000)}]"
    tracemalloc.start()
    assert len(parse_json(text)) == 500_000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 * len(text)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000,
        "a = " + "[" * 900 + "]" * 900,
        ".".join("a" * 100_000) + " = 1",
        "[" + ".".join("a" * 100_000) + "]",
        "x = {" + ".".join("a" * 100_000) + " = 1}",
        "\n".join(f"a{i} = 1" for i in range(50_000)),
        "a = [" + "{b=1}," * 50_000 + "]",
        "#" * 2_000_000,
        "a = " + "9" * 5000,
        "a = 1\na = 2",
    ],
    ids=lambda text: text[:12],
)
def test_toml_that_is_refused(text: str) -> None:
    assert peak(lambda: parse_toml(text)) < 10 * len(text) + (1 << 20)


def test_toml_as_long_as_settings_may_be() -> None:
    """Ten thousand clients' times, in a string."""
    times = ",".join(["0.5", "12"] * 5000)
    assert parse_toml(f'devices = "explicit:times=[{times}]"')["devices"].count(",") == 9999

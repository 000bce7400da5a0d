from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.command.settings import Settings
from fedhist.store import files
from fedhist.store.arrays import read_arrays
from fedhist.store.files import parse_json, parse_toml, plain, read_bytes, read_lines, read_text, slug, whole_file


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "a") as part:
        part.write_text("half")
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a plain file"):
            plain(path)
    with pytest.raises(IsADirectoryError):
        plain(tmp_path)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the error is simulated."""

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


@pytest.mark.parametrize("cut", [1, 5, 9, 30])
def test_a_compressed_file_cut_short(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "a.gz"
    file.write_bytes(gzip.compress(os.urandom(50))[:-cut])
    with pytest.raises(ValueError, match="its compressed content is damaged"):
        read_bytes(file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1e999]", "1e999 is not a finite number"),
        ("[-1e999]", "-1e999 is not a finite number"),
        ("NaN", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "4300 digits"),
        ("", "Expecting value"),
    ],
)
def test_json_that_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a = " + "9" * 5000, "4300 digits"),
        ("a = 1\na = 2", "Cannot overwrite a value"),
        ("a", "Expected '='"),
    ],
)
def test_toml_that_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_toml(text)


def test_long_settings_are_read() -> None:
    """Ten thousand clients' times, in a string."""
    times = ",".join(["0.5", "12"] * 5000)
    assert parse_toml(f'speeds = "explicit:times=[{times}]"')["speeds"].count(",") == 9999


def test_names_of_folders_read_like_the_text() -> None:
    assert slug("FedHist(h=5, ina=False) + Median") == "FedHist-h=5-ina=False-+-Median"
    assert slug("fedhist:h=5").startswith("fedhist-h=5-")  # and more, since "fedhist-h=5" is a name as well


def test_different_texts_have_different_names() -> None:
    texts = ["x" * 300, "x" * 301, "x" * 300 + " ", "Hinge", "HINGE", "A(b=1)", "A-b=1", "A(b=1, c=2)", "A(b=1) + C"]
    texts += [
        "A b",
        "A  b",
        "A/b",
        "../A",
        ".",
        "..",
        "",
        "-",
        "Ä",
        "ä",
        "A(b=-1)",
        "A(b=1e-05)",
        "\0",
        "a" * 100,
        "\U0001f600",
    ]
    names = [slug(text) for text in texts]
    assert len(set(names)) == len(names) and max(len(name.encode()) for name in names) <= 100
    assert not any(set(name) & set("/\0") or name.startswith(".") for name in names)


def test_size_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a terabyte, all of it a hole, is refused before it is read, a small one once it unpacks to more."""
    huge = tmp_path / "huge"
    huge.touch()
    os.truncate(huge, 1 << 40)
    for read in (read_bytes, read_text, lambda path: list(read_lines(path))):
        with pytest.raises(OSError, match="it is larger than [0-9,]+ bytes"):
            read(huge)
    with pytest.raises(fh.InvalidInput, match="config=.*huge cannot be read: it is larger than 1,048,576 bytes"):
        Settings.read(huge)
    with pytest.raises(OSError, match="it is larger than"):
        read_arrays(huge)
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    monkeypatch.setattr(files, "MOST_TEXT", 100)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"0" * 2000))
    with pytest.raises(ValueError, match="it is larger than 1,000 bytes"):
        read_bytes(tmp_path / "bomb.gz", 1000)
    with pytest.raises(ValueError, match="a line is larger than 100 bytes"):
        list(read_lines(tmp_path / "bomb.gz"))
    (tmp_path / "lines.gz").write_bytes(gzip.compress(b"0\n" * 1000))
    with pytest.raises(ValueError, match="it is larger than 1,000 bytes"):
        list(read_lines(tmp_path / "lines.gz"))
    assert read_bytes(tmp_path / "lines.gz", 2000) == b"0\n" * 1000

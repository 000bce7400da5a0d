"""Downloads from a server on this machine that misbehaves on request."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.data.datasets import DATASETS, Dataset, download, load_dataset

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = self.server.files.get(self.path.lstrip("/"))  # type: ignore[attr-defined]
        if content is None and self.path not in ("/cut", "/unsized"):
            self.send_error(404)
            return
        content = CONTENT if content is None else content
        self.send_response(200)
        if self.path != "/unsized":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 3] if self.path == "/cut" else content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.files = {"whole": CONTENT}  # type: ignore[attr-defined]
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def url(server: ThreadingHTTPServer, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}/{path}"


@pytest.mark.parametrize("path", ["whole", "unsized"])
def test_a_good_download(server: ThreadingHTTPServer, tmp_path: Path, path: str) -> None:
    seen: list[tuple[int, int]] = []
    download(url(server, path), tmp_path / "new" / "file", MD5, lambda done, total: seen.append((done, total)))
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT) if path == "whole" else 0)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("path", "checksum", "sentence"),
    [
        ("cut", MD5, "broke off after 341333 of 1024000 bytes; try again."),
        ("whole", "0" * 32, f"has MD5 {MD5} where {'0' * 32} was expected; it was not kept."),
        ("missing", MD5, "could not be downloaded to .*: Not Found."),
    ],
)
def test_a_bad_download_leaves_nothing(
    server: ThreadingHTTPServer, tmp_path: Path, path: str, checksum: str, sentence: str
) -> None:
    with pytest.raises(fh.DataError, match=sentence):
        download(url(server, path), tmp_path / "file", checksum)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fh.DataError, match="could not be downloaded to .*Not a directory"):
        download(url(server, "whole"), tmp_path / "file" / "deep" / "x", MD5)


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(fh.DataError, match=r"could not be downloaded to .*Connection refused"):
        download("http://127.0.0.1:9/file", tmp_path / "file", MD5)


def packed(folder: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}" if not name.startswith("..") else name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def small_cifar(server: ThreadingHTTPServer, archive: bytes, files: dict[str, bytes]) -> Dataset:
    server.files["c.tar.gz"] = archive  # type: ignore[attr-defined]
    return replace(
        DATASETS["cifar100"],
        files={name: hashlib.md5(content).hexdigest() for name, content in files.items()},
        sources={url(server, "c.tar.gz"): hashlib.md5(archive).hexdigest()},
    )


def test_an_archive_is_unpacked_in_torchvisions_layout(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    files = {"train": b"one", "test": b"two"}
    dataset = small_cifar(server, packed("cifar-100-python", {**files, "../evil": b"x"}), files)
    dataset.fetch(tmp_path)
    assert dataset.place([tmp_path]) == tmp_path / "cifar-100-python"
    assert {name: (tmp_path / "cifar-100-python" / name).read_bytes() for name in files} == files
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["c.tar.gz", "test", "train"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"not a tar", "cannot be unpacked"),
        (packed("cifar-100-python", {"train": b"one"}), "cannot be unpacked"),
        (packed("cifar-100-python", {"train": b"one", "test": b"bad"}), "holds a damaged test; delete it"),
    ],
    ids=["no archive", "incomplete", "damaged"],  # an archive holds the time at which it was packed
)
def test_a_bad_archive(server: ThreadingHTTPServer, tmp_path: Path, content: bytes, sentence: str) -> None:
    dataset = small_cifar(server, content, {"train": b"one", "test": b"two"})
    with pytest.raises(fh.DataError, match=sentence):
        dataset.fetch(tmp_path)
    assert dataset.place([tmp_path]) is None


def test_missing_data_says_where_it_was_looked_for(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = replace(DATASETS["cifar10"], sources={url(server, "none"): MD5})
    monkeypatch.setitem(DATASETS, "cifar10", gone)
    with pytest.raises(fh.DataError, match=r"cifar10 is not in .*cifar-10-batches-py and could not be fetched: "):
        load_dataset("cifar10", tmp_path)

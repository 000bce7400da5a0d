"""The folder of a run: whose it is, and what is left of it when something goes wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import fedhist as fh
from fedhist.command.folder import RunFolder
from fedhist.command.settings import Settings
from tests.command.calls import contents, fails, fedhist, in_process, succeeds

QUICK = ["--rounds", "6", "--eval-every", "3", "--clients", "8", "--k", "2", "--quiet", "--device", "cpu"]


def racing(count: int, claim: Callable[[int], RunFolder]) -> list[RunFolder]:
    """Let some threads claim at the same moment; return the folders of those that could, which are still held."""
    together, won = threading.Barrier(count), list[RunFolder]()

    def one(number: int) -> None:
        together.wait()
        with contextlib.suppress(fh.InvalidInput):
            won.append(claim(number))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_one_of_ten_gets_the_folder_and_nobody_harms_it(tmp_path: Path) -> None:
    for trial in range(50):
        path = tmp_path / "deep" / str(trial)
        won = racing(10, lambda number, path=path: RunFolder.begin(path, "a", "run", Settings({"rounds": number + 1})))
        assert len(won) == 1
        assert sorted(file.name for file in path.iterdir()) == ["checkpoint", "config.toml"]
        assert Settings.read(path / "config.toml")["rounds"] == won[0].settings["rounds"]
        won[0].close()


def test_who_gives_up_does_not_take_the_folder_from_others(tmp_path: Path) -> None:
    """Some find out that their run cannot begin, and clear up, while others claim the same folder."""

    def claim(number: int) -> RunFolder:
        folder = RunFolder.begin(tmp_path / "a" / "b", "a", "run", Settings())
        if number % 2:
            folder.abandon()
            folder.close()
            raise fh.InvalidInput("its data cannot be found")
        return folder

    for _ in range(50):
        for folder in racing(8, claim):
            assert (folder.path / "config.toml").is_file() and (folder.checkpoint / "begun.json").is_file()
            folder.abandon()
            folder.close()
        assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_default_names_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(10):
        won = racing(4, lambda number: RunFolder.begin(None, "fedhist", "run", Settings({"lr": 0.1 * (number + 1)})))
        assert len({folder.path for folder in won}) == 4 == len(list((tmp_path / "runs").iterdir()))
        for folder in won:
            assert Settings.read(folder.path / "config.toml")["lr"] == folder.settings["lr"]
            folder.close()
        shutil.rmtree(tmp_path / "runs")


def test_every_method_has_a_folder_of_its_own(tmp_path: Path) -> None:
    long = [f"fedhist:alpha=0.123456789012345,gamma=0.123456789012345,lam=0.123456789012345,h={h}" for h in (1, 2, 3)]
    methods = [each for name in long for each in ("--strategy", name)]
    private = ["--clip", "0.123456789012", "--noise-multiplier", "0", "--defence", "trimmed:share=0.123456789012"]
    succeeds("compare", *methods, *private, *QUICK, "--out", "a", cwd=tmp_path)
    runs = [fh.History.load(folder) for folder in (tmp_path / "a").iterdir() if folder.is_dir()]
    assert len({run.method for run in runs}) == 3

    class Hinge(fh.FedAvg):
        pass

    class HINGE(fh.FedAvg):
        pass

    task = fh.load_task("digits", clients=8)
    pair = fh.compare([Hinge(), HINGE()], task, k=2, rounds=2, seeds=1, record=tmp_path / "recorded")
    assert len({run.name for run in pair}) == 2 == len(list((tmp_path / "recorded").iterdir()))


def test_the_folder_is_held_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = []

    def in_the_middle(*_: object) -> None:
        sentences.append(fails("resume", "a", cwd=tmp_path))
        sentences.append(fails("run", *QUICK, "--out", "a", cwd=tmp_path))

    monkeypatch.setattr("fedhist.store.history.History.save", lambda *_: in_the_middle() or tmp_path / "a")
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert sentences == ["a is in use by another process."] * 2


def test_an_edited_config_does_not_put_two_runs_into_one_folder(tmp_path: Path) -> None:
    assert (
        in_process(
            "run", *QUICK, "--checkpoint-every", "0", "--out", tmp_path / "a", log=tmp_path / "log", checkpoints=2
        )
        is None
    )
    config = tmp_path / "a" / "config.toml"
    for old, new in (('strategy = ["fedhist"]', 'strategy = ["fedhist", "fedavg"]'), ("seeds = 1", "seeds = 2")):
        text = config.read_text()
        assert old in text
        config.write_text(text.replace(old, new))
        assert fails("resume", "a", cwd=tmp_path).startswith("run takes one strategy and one seed, got")
        config.write_text(text)
    succeeds("resume", "a", "--quiet", cwd=tmp_path)


def test_killed_at_every_step_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was done until then, one of `run` and `resume` goes on."""

    class Killed(BaseException):
        pass

    def until(count: int, out: Path) -> bool:
        """Begin, and stop before the operation of this number; return whether there was one."""
        left = [count]

        def deadly(name: str) -> None:
            real = getattr(os, name)

            def step(*arguments: object, **more: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return real(*arguments, **more)

            patch.setattr(os, name, step)

        with monkeypatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "fsync"):
                deadly(name)
            patch.setattr(RunFolder, "abandon", lambda *_: None)
            with contextlib.suppress(Killed):
                RunFolder.begin(out, "a", "run", Settings({"rounds": 3, "clients": 8, "k": 2, "device": "cpu"})).close()
        return left[0] < 0

    count = 0
    while until(count, tmp_path / str(count)):
        out = tmp_path / str(count)
        again = fedhist("run", *QUICK, "--out", out, cwd=tmp_path)
        if again.code:
            assert f"{count} is unfinished; resume it with: fedhist resume {count}" in again.err
            succeeds("resume", out, "--quiet", cwd=tmp_path)
        assert fh.History.load(out).rounds in (3, 6) and not [each for each in out.iterdir() if each.name[0] == "."]
        count += 1
    assert count > 5


def test_killed_as_it_ended(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    (tmp_path / "a" / ".checkpoint").mkdir()
    (tmp_path / "a" / ".checkpoint" / "runs-native-00000.safetensors").touch()
    assert "a is finished" in succeeds("resume", "a", cwd=tmp_path).out
    assert not (tmp_path / "a" / ".checkpoint").exists()


def test_a_checkpoint_that_is_a_link(tmp_path: Path) -> None:
    for target in (tmp_path / "elsewhere", tmp_path / "nowhere"):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        (tmp_path / "a").mkdir()
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "a" / "checkpoint").symlink_to(target)
        assert "a exists already" in fails("run", *QUICK, "--out", "a", cwd=tmp_path)
        assert fails("resume", "a", cwd=tmp_path) == "a/checkpoint is a link, not the folder of a run."


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    out, arguments = tmp_path / "a", ["run", *QUICK, "--checkpoint-every", "0"]
    assert in_process(*arguments, "--out", out, log=log, checkpoints=2) is None
    for name in (".summary.json.1.part", ".model.safetensors.1.a.part/.tmpA", "checkpoint/.runs-x.1.a.part/.tmpA"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("half a file")
    succeeds("resume", "a", "--quiet", cwd=tmp_path)
    assert not [file.name for file in out.rglob("*") if file.name[0] == "."]


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        succeeds("run", *QUICK, "--record", "--out", "a", cwd=tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "a").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o640}


def test_a_full_disk_while_the_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError, torch  # noqa: PLC0415

    save = torch.save_file

    def full(tensors: object, file: Path, metadata: object = None) -> None:
        if "model" in file.name:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(tensors, file, metadata)

    succeeds("run", *QUICK, "--out", "whole", cwd=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save_file", full)
        sentence = fails("run", *QUICK, "--out", "a", cwd=tmp_path)
    assert sentence.startswith("out=a cannot be written: Error while serializing: I/O error: No space left on device")
    assert sentence.endswith("; make room, then resume with: fedhist resume a.")
    succeeds("resume", "a", "--quiet", cwd=tmp_path)
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


def test_nothing_is_left_where_a_run_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(fh.InvalidInput, match="cannot be written: No space left on device"):
        RunFolder.begin(tmp_path / "deep" / "a", "a", "run", Settings())
    assert list(tmp_path.iterdir()) == []


def test_what_a_folder_was_begun_with(tmp_path: Path) -> None:
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    begun = tmp_path / "a" / "checkpoint" / "begun.json"
    begun.parent.mkdir()
    for content in ("[]", "3", "null", '"run"', '{"command": ["run"], "fedhist": 1}', json.dumps({"command": "run"})):
        begun.write_text(content)
        assert "a/checkpoint/begun.json" in fails("resume", "a", cwd=tmp_path)


def test_only_what_is_ours_is_removed(tmp_path: Path) -> None:
    """Other runs may lie below the folder of a run that fails, and anybody's files in one that is resumed."""
    outer = RunFolder.begin(tmp_path / "runs", "a", "compare", Settings())
    succeeds("run", *QUICK, "--record", "--out", "runs/inner", cwd=tmp_path)
    inner = contents(tmp_path / "runs" / "inner")
    outer.home("FedAvg-seed0").mkdir()
    (outer.home("FedAvg-seed0") / "uploads.npy").touch()
    outer.abandon()
    outer.close()
    assert contents(tmp_path / "runs" / "inner") == inner
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["inner"]

    (tmp_path / "project" / ".checkpoint").mkdir(parents=True)
    (tmp_path / "project" / ".checkpoint" / "data").write_text("precious")
    (tmp_path / "project" / "config.toml").write_text("rounds = 1\n")
    assert fails("resume", "project", cwd=tmp_path) == "project holds no run, so there is nothing to resume."
    assert (tmp_path / "project" / ".checkpoint" / "data").read_text() == "precious"

    folder = RunFolder.begin(tmp_path / "w", "a", "run", Settings())
    (folder.path / "notes" / ".thesis.part").mkdir(parents=True)
    (folder.path / ".movie.mkv.part").touch()
    with folder.finishing():
        pass
    folder.close()
    assert {each.name for each in folder.path.iterdir()} == {"config.toml", "notes", ".movie.mkv.part"}
    assert (folder.path / "notes" / ".thesis.part").is_dir()


def test_odd_names(tmp_path: Path) -> None:
    result = succeeds("run", *QUICK, "--out", "a:bomb:[b]", cwd=tmp_path)
    assert "Results are in a:bomb:[b]." in result.out and (tmp_path / "a:bomb:[b]").is_dir()
    (tmp_path / "loop").symlink_to("loop")
    for arguments in (
        ["run", "--out", "x" * 300],
        ["run", "--out", "loop"],
        ["resume", "y" * 300],
        ["report", "z" * 300],
    ):
        fails(*arguments, cwd=tmp_path)
    assert "data_dir must be a string in UTF-8" in fails("run", *QUICK, "--data-dir", "d\udcff", cwd=tmp_path)
    settings = Settings({"data_dir": "d\x7fx"})
    settings.write(tmp_path / "config.toml")
    assert Settings.read(tmp_path / "config.toml")["data_dir"] == Path("d\x7fx")


def test_the_page_is_not_written_over_a_pipe(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    succeeds("run", *QUICK, "--out", "a", cwd=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert fails("report", "a", "-o", "pipe", cwd=tmp_path) == "out=pipe is not a plain file."
    assert (tmp_path / "pipe").is_fifo()

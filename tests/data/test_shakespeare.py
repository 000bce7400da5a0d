from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import fedhist as fh
from fedhist.data import shakespeare
from fedhist.data.places import data_folders
from fedhist.data.plays import roles
from fedhist.data.shakespeare import LEAST, LETTERS, TEST_WINDOWS, WINDOW, divide, encode, fetch
from tests.data.test_download import server, url  # noqa: F401 (a fixture)


def line(name: str, number: int) -> str:
    return f"{name} says sentence {number}, which is like no other."


def play(sizes: dict[str, int]) -> str:
    """A play in which each of these says this many sentences, by turns."""
    said = [(i, name) for name, count in sizes.items() for i in range(count)]
    return "ACT I\n\n" + "\n\n".join(f"{name.upper()}.\n{line(name, i)}" for i, name in sorted(said)) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shakespeare._load.cache_clear()
    shakespeare._texts.cache_clear()
    plays = tmp_path / "shakespeare"
    plays.mkdir()
    (plays / "one.txt").write_text(play({"Anne": 40, "Ben": 20, "Cole": 3}))
    (plays / "two.txt").write_text(play({"Anne": 60, "Dora": 25}))
    return tmp_path


def text_of(codes: torch.Tensor) -> str:
    return "".join(LETTERS[int(code)] for code in codes)


def load(folder: Path, clients: int = 4, validation: bool = False) -> shakespeare.Held:
    return shakespeare.load([folder], clients, validation)


def test_a_client_is_one_role_in_one_play(folder: Path) -> None:
    held = load(folder)
    assert sorted(held.names) == ["one: ANNE", "one: BEN", "two: ANNE", "two: DORA"]
    assert held.clients.about == {"split": "roles", "plays": 2, "roles_left_out": 1}
    assert held.x.dtype == torch.uint8 and held.y.dtype == torch.int64 and held.x.shape[1] == WINDOW
    for name, own, test in zip(held.names, held.clients, held.client_test, strict=True):
        who = name.split(": ")[1].title()
        role = "\n".join(line(who, i) for i in range({"one: ANNE": 40, "one: BEN": 20, "two: ANNE": 60}.get(name, 25)))
        cut = len(role) * 4 // 5
        assert text_of(held.x[own[0]]) == role[:WINDOW]
        assert "".join(LETTERS[c] for c in held.y[own].tolist()) == role[WINDOW:cut], "stride one, in order"
        assert text_of(held.x_test[test[0]]) == role[cut : cut + WINDOW], "no window reaches across the cut"
        assert LETTERS[int(held.y_test[test[-1]])] == role[-1] and len(test) == min(
            TEST_WINDOWS, len(role) - cut - WINDOW
        )
    assert np.array_equal(np.sort(np.concatenate(held.client_test)), np.arange(len(held.x_test)))


def test_validation_holds_back_the_end_of_the_training_text(folder: Path) -> None:
    full, held = load(folder), load(folder, validation=True)
    assert held.names == full.names
    for i, own in enumerate(held.clients):
        before = full.x[full.clients[i]]
        assert torch.equal(held.x[own], before[: len(own)]) and len(own) < len(before)
        windows = {bytes(each) for each in before.numpy()}
        assert all(bytes(each) in windows for each in held.x_test[held.client_test[i]].numpy())


def test_the_largest_roles_are_chosen_in_an_order_that_does_not_tell_their_size(folder: Path) -> None:
    assert sorted(load(folder, 2).names) == ["one: ANNE", "two: ANNE"]
    assert load(folder).names == load(folder).names
    sizes = [len(own) for own in load(folder).clients]
    assert sizes != sorted(sizes, reverse=True)
    with pytest.raises(
        fh.InvalidInput, match=r"^clients=5 is more than the 4 roles of shakespeare; choose at most 4\.$"
    ):
        load(folder, 5)


def test_a_task_and_what_it_refuses(folder: Path) -> None:
    task = fh.load_task("shakespeare", 3, data_dir=folder, model="char-transformer")
    assert (task.num_clients, task.num_classes, task.name) == (3, 80, "shakespeare")
    assert task.about == {
        "dataset": "shakespeare", "split": "roles", "plays": 2, "roles_left_out": 1, "model": "char-transformer",
    }  # fmt: skip
    own = task.client_test
    assert (
        own is not None and own.owner is not None and [each.name for each in task.metrics] == ["accuracy", "perplexity"]
    )
    for client, examples in enumerate(load(folder, 3).client_test):
        assert torch.equal(own.x[own.owner == client], task.x_test[examples])
    for name, value in {"beta": 0.3, "rare_class": 3, "split": fh.iid}.items():
        sentence = (
            rf"^{name}=.* cannot divide shakespeare: a client of shakespeare is one role in one play; leave {name} out"
        )
        with pytest.raises(fh.InvalidInput, match=sentence):
            fh.load_task("shakespeare", 3, data_dir=folder, **{name: value})
    with pytest.raises(fh.InvalidInput, match="beta=None cannot divide shakespeare"):
        fh.load_task("shakespeare", 3, beta=None, data_dir=folder)
    with pytest.raises(fh.InvalidInput, match=r"model='lenet' takes square images, not inputs of shape \(80,\)"):
        fh.load_task("shakespeare", 3, data_dir=folder, model="lenet")


@pytest.mark.parametrize("model", ["char-lstm", "char-transformer"])
def test_a_run(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shakespeare, "TEST_WINDOWS", 10)
    task = fh.load_task("shakespeare", 2, data_dir=folder, model=model)
    local = fh.LocalSGD(lr=0.1 if model == "char-transformer" else 1.0, batch_size=8)
    history = fh.simulate("fedavg", task, k=1, rounds=5, local=local, device="cpu")
    assert history.setting["model"] == model
    assert history.evaluations[-1].loss < 4.2, "less than the 4.38 of a guess among eighty"


def test_characters_outside_the_vocabulary() -> None:
    assert len(LETTERS) == len(set(LETTERS)) == 80
    assert text_of(torch.from_numpy(encode("“Æsop’s café”—a*b\t…\n"))) == '"AEsop\'s cafe"--ab...\n'


def test_too_little_text(folder: Path) -> None:
    for file in (folder / "shakespeare").iterdir():
        file.write_text(play({"Anne": 3}))
    with pytest.raises(fh.DataError, match=f"holds no play in which a role says at least {LEAST} characters"):
        load(folder)


WORKS = """\ufeffThe Project Gutenberg eBook of The Complete Works

*** START OF THE PROJECT GUTENBERG EBOOK 100 ***
The Complete Works of William Shakespeare

                    Contents

    THE SONNETS
    THE TRAGEDY OF ANNE
    BEN’S LABOUR




THE SONNETS

                    1

From fairest creatures we desire increase,



THE TRAGEDY OF ANNE



Contents

ACT I
Scene I. A hall.

Dramatis Personæ

ANNE, a queen.
BEN, her servant.

ACT I

SCENE I. A hall.

 Enter Anne and Ben.

{first}


BEN’S LABOUR

ACT I
SCENE I. A field.

{second}
 [_Exeunt._]

*** END OF THE PROJECT GUTENBERG EBOOK 100 ***
License.
"""


def works() -> str:
    first, second = (play(sizes).removeprefix("ACT I\n\n") for sizes in ({"Anne": 30, "Ben": 20}, {"Ben": 40}))
    return WORKS.replace("{first}", first.replace("'", "’")).replace("{second}", second)


def test_the_complete_works_are_divided_into_plays() -> None:
    plays = divide(works())
    assert list(plays) == ["THE TRAGEDY OF ANNE", "BEN’S LABOUR"], "poems are not plays"
    found = roles(plays["THE TRAGEDY OF ANNE"])
    assert found.keys() == {"ANNE", "BEN"} and len(found["ANNE"]) == 30 and found["BEN"][-1] == line("Ben", 19)
    assert roles(plays["BEN’S LABOUR"]) == {"BEN": [line("Ben", i) for i in range(40)]}


def test_a_download(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    server.files["pg100.txt"] = works().replace("\n", "\r\n").encode()
    seen: list[str] = []
    monkeypatch.setattr(fetch, "__defaults__", (None, url(server, "pg100.txt")))
    held = shakespeare.load([tmp_path / "new"], 3, progress=lambda name, done, total: seen.append(name))
    assert len(held.clients) == 3 and set(seen) == {"pg100.txt"}
    assert len(list((tmp_path / "new" / "shakespeare").glob("*.txt"))) == 2
    shutil.rmtree(tmp_path / "new" / "shakespeare")
    (tmp_path / "new" / "pg100.txt").write_text("something else")
    with pytest.raises(fh.DataError, match="does not hold plays below a list of contents; delete it and try again"):
        shakespeare.load([tmp_path / "new"], 3)


REAL = data_folders()


@pytest.mark.skipif(shakespeare.place(REAL) is None, reason="the plays are not on this machine; see $FEDHIST_DATA")
def test_the_real_plays() -> None:
    place = shakespeare.place(REAL)
    assert place is not None
    for file in place.glob("*.txt"):
        said = {name: len("\n".join(speeches)) for name, speeches in roles(shakespeare._read(file)).items()}
        kept = [name for name, size in said.items() if size >= LEAST]
        assert 12 <= len(kept) <= 40, file.name
        text = len(file.read_text(encoding="utf-8"))
        assert 0.8 < sum(said.values()) / text < 0.95, f"{file.name}: most of a play is speech"
        first = {"hamlet": "HAMLET", "macbeth": "MACBETH", "othello": "IAGO", "lear": "LEAR"}.get(file.stem)
        if first:
            largest = max(said, key=lambda name: said[name])
            assert largest == first
            assert not any(name != first and first.startswith(name) for name in said), "it is one role"
        if first == "HAMLET":
            assert 55_000 < said["HAMLET"] < 65_000

"""What attackers upload, who they are, and that every trainer has the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import fedhist as fh
from fedhist.noise import keyed
from fedhist.simulation.plan import plan
from fedhist.simulation.run import Run
from fedhist.simulation.server import Server
from fedhist.simulation.sources.batch import Batch
from fedhist.world.attacks import ATTACKS, Adversary, as_attack

CPU = torch.device("cpu")
LOCAL = fh.LocalSGD(lr=0.1, steps=2, batch_size=8)
EVERY = [f"{name}:share=0.25" for name in ATTACKS]
DELTAS = torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
BAD = torch.tensor([False, True, False, True, False])[:, None]
KEYS = keyed(7, torch.arange(5), 3)


def sent(attack: fh.Attack) -> Tensor:
    """Return the uploads that arrive; what the honest send is looked at here."""
    arrived = attack.uploads(DELTAS, BAD, KEYS)
    assert torch.equal(arrived[~BAD[:, 0]], DELTAS[~BAD[:, 0]])
    return arrived


def planned(trials: list[fh.Trial]) -> list[Run]:
    """Return runs that could begin."""
    return [Run(each.trial, each.arriving, CPU) for each in plan(trials, "batched", CPU)]


def poisoned(task: fh.Task, attack: fh.Attack, seed: int) -> fh.Task:
    return Adversary(attack, task.num_clients, seed, CPU).poisoned(task)


def test_sign_flip() -> None:
    arrived = sent(fh.SignFlip(0.4, scale=3.0))
    for i in (1, 3):
        assert arrived[i].tolist() == pytest.approx([-3.0 * value for value in DELTAS[i].tolist()])


def test_same_value() -> None:
    arrived = sent(fh.SameValue(0.4, scale=-2.0))
    for i in (1, 3):
        length = math.sqrt(sum(value**2 for value in DELTAS[i].tolist()))
        assert arrived[i].tolist() == pytest.approx([-2.0 * length / 20] * 400, rel=1e-5)


def test_scaled_noise_is_new_in_every_upload_and_as_long_as_said() -> None:
    arrived = sent(fh.ScaledNoise(0.4, scale=5.0))
    for i in (1, 3):
        assert float(arrived[i].norm() / DELTAS[i].norm()) == pytest.approx(5, rel=0.15)
        assert abs(float(torch.cosine_similarity(arrived[i], DELTAS[i], dim=0))) < 0.2
    assert abs(float(torch.cosine_similarity(arrived[1], arrived[3], dim=0))) < 0.2
    assert torch.equal(sent(fh.ScaledNoise(0.4, scale=5.0)), arrived)
    later = fh.ScaledNoise(0.4, scale=5.0).uploads(DELTAS, BAD, keyed(7, torch.arange(5), 4))
    assert abs(float(torch.cosine_similarity(later[1], arrived[1], dim=0))) < 0.2


def test_a_little_is_enough() -> None:
    arrived = sent(fh.LittleIsEnough(0.4, z=0.7))
    for j, column in enumerate(DELTAS.T.tolist()):
        mean = sum(column) / 5
        deviation = math.sqrt(sum((value - mean) ** 2 for value in column) / 5)
        assert arrived[1, j].item() == arrived[3, j].item() == pytest.approx(mean - 0.7 * deviation, abs=1e-5)


def test_the_shift_that_hides_grows_with_the_share() -> None:
    """With 30 % attackers, 20/70 of the honest must lie beyond the shift: z is the 5/7 quantile."""
    assert fh.LittleIsEnough(0.3).shift == pytest.approx(0.5659, abs=1e-4)
    assert fh.LittleIsEnough(0.1).shift == pytest.approx(0.1397, abs=1e-4)
    assert fh.LittleIsEnough(0.3, z=1.0).shift == 1.0


def test_label_flip_touches_only_attackers_labels(task: fh.Task) -> None:
    attack = fh.LabelFlip(0.25)
    attackers = attack.attackers(task.num_clients, seed=3)
    flipped = poisoned(task, attack, 3)
    assert len(attackers) == 2
    for i in range(task.num_clients):
        before, after = task.y[task.client(i)], flipped.y[flipped.client(i)]
        assert after.tolist() == [2 - y if i in attackers else y for y in before.tolist()]
    assert flipped.x is task.x and flipped.y_test is task.y_test
    assert poisoned(task, attack, 3) is flipped  # so that runs can share a batch
    assert poisoned(task, attack, 4) is not flipped
    assert poisoned(task, fh.SignFlip(0.25), 3) is task


def test_attackers_are_drawn_by_seed_and_more_of_them_are_the_same_and_others() -> None:
    few, many = (set(fh.SignFlip(share).attackers(100, seed=1).tolist()) for share in (0.1, 0.3))
    assert len(few) == 10 and len(many) == 30 and few < many
    assert few == set(fh.LabelFlip(0.1).attackers(100, seed=1).tolist())
    assert few != set(fh.SignFlip(0.1).attackers(100, seed=2).tolist())


@pytest.mark.parametrize("attack", EVERY)
@pytest.mark.parametrize("method", ["fedhist", "moon"])
def test_every_trainer_has_the_same_attackers(task: fh.Task, attack: str, method: str) -> None:
    settings = {"k": 3, "rounds": 12, "local": LOCAL, "seed": 2, "eval_every": 4, "device": "cpu"}
    expected = fh.simulate(method, task, trainer="reference", attack=attack, **settings)
    honest = fh.simulate(method, task, trainer="reference", **settings)
    assert expected.loss != pytest.approx(honest.loss, rel=1e-3)
    for trainer in ("threaded", "auto", "batched"):
        assert fh.simulate(method, task, trainer=trainer, attack=attack, **settings).loss == pytest.approx(
            expected.loss, rel=1e-3
        )


def test_attacked_and_honest_runs_side_by_side(task: fh.Task) -> None:
    """Each is what it would be alone, and what changes labels does not change its neighbours'."""
    attacks = [None, *EVERY]
    trials = [fh.Trial("fedhist", task, k=3, rounds=8, local=LOCAL, attack=attack) for attack in attacks]
    together = fh.simulate_many(trials, trainer="batched", device="cpu")
    for attack, history in zip(attacks, together, strict=True):
        alone = fh.simulate("fedhist", task, k=3, rounds=8, local=LOCAL, attack=attack)
        assert history.loss == pytest.approx(alone.loss, rel=1e-4)


def test_all_clients_attacking_by_sign_flip_is_walking_backwards(task: fh.Task) -> None:
    settings = {"k": 4, "rounds": 5, "local": LOCAL, "eval_every": 1}
    start = fh.simulate("fedavg", task, k=4, rounds=1, local=fh.LocalSGD(lr=1e-9)).loss[0]
    assert fh.simulate("fedavg", task, attack=fh.SignFlip(1.0), **settings).final_accuracy < 0.5
    assert fh.simulate("fedavg", task, attack="sign-flip:share=1", **settings).loss[-1] > start


def test_the_history_names_the_attackers(task: fh.Task, tmp_path: Path) -> None:
    history = fh.simulate("fedavg", task, k=3, rounds=3, attack="sign-flip:share=0.25,scale=2", seed=5)
    loaded = fh.History.load(history.save(tmp_path))
    (event,) = loaded.events
    assert event["event"] == "attack" and event["attack"] == "SignFlip(share=0.25, scale=2)"
    assert event["clients"] == fh.SignFlip(0.25).attackers(8, 5).tolist()


def test_compare_attacks_every_method_and_seed(task: fh.Task) -> None:
    runs = fh.compare(["fedavg", "fedavg + median"], task, k=3, rounds=3, seeds=2, attack=fh.SameValue(0.25))
    assert [history.events[0]["event"] for history in runs] == ["attack"] * 4
    assert runs.methods == ["FedAvg", "FedAvg + median"]


def test_an_attack_of_ones_own(task: fh.Task) -> None:
    class Silence(fh.Attack):
        def uploads(self, deltas: Tensor, attacking: Tensor, keys: Tensor) -> Tensor:
            return torch.where(attacking, 0.0, deltas)

    attacks = (None, fh.SignFlip(0.5), fh.ScaledNoise(0.5), Silence(0.5))
    runs = planned([fh.Trial("fedavg", task, k=3, rounds=4, attack=attack) for attack in attacks])
    assert [run.capturable() for run in runs] == [True, True, True, False]  # it has not said that it may be
    everyone = fh.simulate("fedavg", task, k=8, rounds=3, attack=Silence(1.0), local=LOCAL, eval_every=1)
    assert len(set(everyone.loss)) == 1  # nothing is ever learned


def test_no_round_looks_at_values(task: fh.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured must not ask for a number: here such a question is an error."""
    trials = [
        fh.Trial(method, task, k=3, rounds=4, attack=attack)
        for method in ("fedavg + krum", "refl + median", "wkafl + trimmed", "fedavg:ina=true + norm-clip")
        for attack in EVERY
    ]
    source = Batch(planned(trials))
    source.play(Server.close)

    def asked(*_: object) -> bool:
        raise AssertionError("a tensor's value was looked at")

    with monkeypatch.context() as patched, torch.no_grad():
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
            patched.setattr(Tensor, name, asked)
        for server, arrivals in source.next():
            server.close(arrivals)
    ((_, card),) = source._cards
    assert int(card._done) == 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fh.SignFlip(0.0), "share must be positive, got 0.0."),
        (lambda: fh.SignFlip(1.5), r"share must lie in \[0, 1\], got 1.5."),
        (lambda: fh.SignFlip(0.2, scale=-1), "scale must be positive, got -1."),
        (lambda: fh.ScaledNoise(0.2, scale=0), "scale must be positive, got 0."),
        (lambda: fh.SameValue(0.2, scale="big"), "scale must be a number, got 'big'."),
        (lambda: fh.LittleIsEnough(0.2, z=-1), "z must be positive, got -1."),
        (lambda: fh.LittleIsEnough(0.6), "share=0.6 is a majority, which need not hide; give z."),
        (lambda: fh.SignFlip(0.001).attackers(100, 0), "share=0.001 of 100 clients is less than one attacker."),
        (lambda: as_attack("sign-flop:share=0.1"), "unknown attack 'sign-flop': did you mean 'sign-flip'?"),
        (lambda: as_attack("sign-flip"), "sign-flip needs share, as in sign-flip:share=…"),
        (lambda: as_attack(0.3), "attack must be a name or a fedhist.Attack, got float."),
    ],
)
def test_refuses(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        make()


def test_labels_that_honest_clients_share_cannot_be_flipped(task: fh.Task) -> None:
    everyone = fh.Task(task.model, task.x, task.y, [np.arange(120)] * 4, task.x_test, task.y_test)
    with pytest.raises(fh.InvalidInput, match=r"attackers and honest clients share example \[0\]"):
        fh.simulate("fedavg", everyone, k=2, rounds=1, attack="label-flip:share=0.25")


def test_a_trial_refuses_too_few_attackers(task: fh.Task) -> None:
    with pytest.raises(fh.InvalidInput, match="share=0.01 of 8 clients is less than one attacker."):
        fh.Trial("fedavg", task, k=2, rounds=1, attack="label-flip:share=0.01")

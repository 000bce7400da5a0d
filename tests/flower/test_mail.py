"""Vectors that servers and clients send along with models, as SCAFFOLD does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (pip install 'fedhist[flower]')")

from flwr.app import Array, ArrayRecord, Message, RecordDict

import fedhist as fh
from fedhist import Scaffold
from fedhist.clients.job import Job
from fedhist.flower import ClientSide, KAsync, load, reply
from fedhist.flower.mail import MAIL, RUN, VECTOR
from tests.flower.grid import Behaviour, FakeGrid
from tests.flower.helpers import Killed, final, kasync, kill_in, kinds, moved, network, rejections, run
from tests.flower.scaffold import LR, START, STEPS, Weights, client, context

TARGETS = {1: (3.0, 0.0), 2: (-1.0, 1.0)}
Change = Callable[[RecordDict], object]


def two() -> FakeGrid:
    return network({node: client(target) for node, target in TARGETS.items()})


def scaffold(grid: FakeGrid, rounds: int = 2, **options: Any) -> KAsync:
    usual: dict[str, Any] = {"k": 2, "num_clients": 2, "strategy": Scaffold(), "start": START}
    return run(grid, rounds=rounds, **usual | options)


def by_hand(rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model and `c` as the paper's equations have them, with all clients in every round."""
    x, c = START["w"].clone(), torch.zeros(2)
    own = {node: torch.zeros(2) for node in TARGETS}
    for _ in range(rounds):
        ends, moves = [], []
        for node, target in TARGETS.items():
            y = x.clone()
            for _ in range(STEPS):
                y = y - LR * (y - torch.tensor(target) - own[node] + c)
            new = own[node] - c + (x - y) / (STEPS * LR)
            moves.append(new - own[node])
            ends.append(y)
            own[node] = new
        x = torch.stack(ends).mean(0)
        c = c + torch.stack(moves).sum(0) / len(TARGETS)
    return x, c


@pytest.mark.parametrize("packed", [False, True])
def test_rounds_follow_the_equations(packed: bool) -> None:
    """In the first, with no variates yet: y = x - 0.1·(x - t) twice, so x₁ = t̄ + 0.81·(x - t̄), c = 0.95·(x - t̄)."""
    grid = two()
    server = scaffold(grid, rounds=1, packed=packed)
    assert final(server)["w"].tolist() == pytest.approx([1.0, 1.715])
    assert server.session.source.mail is not None
    assert server.session.source.mail.tolist() == pytest.approx([0.0, 1.425])
    for rounds in (2, 5):
        server = scaffold(two(), rounds, packed=packed)
        x, c = by_hand(rounds)
        torch.testing.assert_close(final(server)["w"], x)
        torch.testing.assert_close(server.session.source.mail, c)
        assert "rejected" not in kinds(server) and "forgot" not in kinds(server)


def test_a_simulation_of_the_same_arrivals_ends_with_the_same_model(
    grid: FakeGrid, make_task: Callable[..., fh.Task]
) -> None:
    times = [1.0, 1.3, 1.71, 2.03, 2.57, 3.11]
    task, local, rounds, seed = make_task(clients=6), fh.LocalSGD(lr=0.1, steps=2, batch_size=8), 10, 3
    speeds = fh.Explicit(times)
    simulated = fh.simulate(
        Scaffold(), task, k=3, rounds=rounds, local=local, speeds=speeds, seed=seed, trainer="reference"
    )

    def trains(partition: int) -> Behaviour:
        own = context()

        def work(message: Message) -> Message:
            model = task.build(seed)
            load(message, model)
            control = ClientSide(message, own, Scaffold())
            version = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
            flat = task.layout.flatten(model)
            job = Job(task, local, fh.CrossEntropy(), seed, partition, version, flat, None, rounds)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in job.minibatches(torch.device("cpu")):
                optimizer.zero_grad()
                torch.autograd.backward(batch.loss(model(batch.x)))
                control.add_to_gradients(model)
                optimizer.step()
            mail = control.finish(model, 2, 0.1)
            return reply(message, model, int(task.sizes[partition]), identity=f"partition {partition}", mail=mail)

        return work

    for partition, duration in enumerate(times):
        grid.add(100 + partition, trains(partition), duration)
    server = kasync(grid, Scaffold(), 3, poll_interval=1e-3, evaluate_every=0, num_clients=6)
    result = server.start(grid, ArrayRecord(task.build(seed).state_dict()), rounds)
    assert server.history.clients.tolist() == simulated.clients.tolist()
    for entry, values in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(values, simulated.model[entry], rtol=1e-4, atol=1e-6)  # type: ignore[index]


def test_every_train_message_carries_the_mail_of_its_version() -> None:
    grid = two()
    server = scaffold(grid, rounds=2, evaluate_every=1)
    train = [message.content for message in grid.sent if message.metadata.message_type == "train"]
    sent = [content.array_records[MAIL][VECTOR].numpy() for content in train]
    assert [each.tolist() for each in sent[:2]] == [[0.0, 0.0]] * 2
    assert sent[2].tolist() == sent[3].tolist() == by_hand(1)[1].tolist()
    assert all(each.dtype == np.float32 for each in sent)
    assert len({content[RUN]["id"] for content in train}) == 1
    others = [message.content for message in grid.sent if message.metadata.message_type != "train"]
    assert others and not any(MAIL in content or RUN in content for content in others)
    assert server.history.setting["bytes_per_upload"] == 16  # two numbers, and two sent along


def test_a_method_without_mail_sends_what_it_sent() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    server = run(grid, rounds=2)
    assert {tuple(sorted(message.content)) for message in grid.sent} == {("arrays", "config")}
    assert {tuple(message.content["config"]) for message in grid.sent} == {("server-round",)}
    assert server.history.setting["bytes_per_upload"] == 32


def with_vector(values: np.ndarray | None) -> Change:
    """Return a change that sends something else along."""

    def change(content: RecordDict) -> None:
        content[MAIL] = ArrayRecord({} if values is None else {VECTOR: Array(values)})

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.pop(MAIL), "nothing is sent along: there is no array 'vector'"),
        (with_vector(None), "nothing is sent along"),
        (with_vector(np.zeros(3, np.float32)), "must be 2 floating-point numbers, got float32 of (3,)"),
        (with_vector(np.zeros((2, 1), np.float32)), "must be 2 floating-point numbers"),
        (with_vector(np.zeros((), np.float32)), "must be 2 floating-point numbers"),
        (with_vector(np.zeros(2, np.int64)), "must be 2 floating-point numbers, got int64"),
        (with_vector(np.array([0, np.nan], np.float32)), "what is sent along holds NaN or infinity"),
        (with_vector(np.array([0, np.inf], np.float32)), "what is sent along holds NaN or infinity"),
        (with_vector(np.full(2, 1e300)), "what is sent along holds NaN or infinity"),
        (with_vector(np.full(2, 1e9, np.float32)), "what it sends along is too long: its length 1.41e+09 is absurd"),
        (
            lambda content: content[MAIL].update({VECTOR: Array("float32", (2,), "numpy.ndarray", b"x")}),
            "cannot be read",
        ),
        (
            lambda content: content[MAIL].update({VECTOR: Array("float32", (2,), "pickle", b"x")}),
            "must be sent as numpy.ndarray",
        ),
    ],
)
def test_bad_mail_never_reaches_the_strategy(change: Change, reason: str) -> None:
    nodes = {66: client((0.0, 0.0), change)} | {node: client((2.0, float(node))) for node in (1, 2, 3)}
    server = scaffold(network(nodes, [0.9, 1.0, 1.0, 1.0]), rounds=4, k=3, num_clients=4)
    assert rejections(server)
    assert all(event["node"] == 66 and reason in event["reason"] for event in rejections(server))
    assert server.session.source.mail is not None and float(server.session.source.mail.norm()) < 10


def test_long_mail_can_be_clipped_or_stop_the_run() -> None:
    long = with_vector(np.full(2, 1e9, np.float32))

    def nodes() -> FakeGrid:
        return network({66: client((2.0, 0.0), long)} | {node: client((2.0, float(node))) for node in (1, 2, 3)})

    server = scaffold(nodes(), rounds=2, k=4, num_clients=4, bad_updates="clip")
    clipped = [event["reason"] for event in server.history.events if event["event"] == "clipped"]
    assert clipped == ["the length of its mail was 1.41e+09"] * 2
    assert server.session.source.mail is not None and float(server.session.source.mail.norm()) < 10
    with pytest.raises(fh.BadUpload, match="node 66's upload in round 1 is bad: what it sends along is too long"):
        scaffold(nodes(), k=4, num_clients=4, bad_updates="stop")


def test_long_mail_does_not_hide_a_long_upload() -> None:
    """Mail is as long as gradients are, here five times as long as uploads; in a common length it would."""

    def far(content: RecordDict) -> None:
        content.array_records["arrays"]["w"] = Array(np.full(2, 15.0, np.float32))

    nodes = {66: client((2.0, 0.0), far)} | {node: client((2.0, float(node))) for node in (1, 2, 3)}
    server = scaffold(network(nodes), rounds=2, k=3, num_clients=4)
    assert {event["node"] for event in rejections(server)} == {66}
    assert all(event["reason"].startswith("its length") for event in rejections(server))


def test_mail_may_be_zero_at_first() -> None:
    zero = with_vector(np.zeros(2, np.float32))
    server = scaffold(network({node: client((2.0, 0.0), zero) for node in (1, 2, 3)}), rounds=5, num_clients=3)
    assert server.history.rounds == 5 and "rejected" not in kinds(server)


def test_a_resumed_server_sends_the_mail_it_had(tmp_path: Path) -> None:
    whole = scaffold(two(), rounds=5)
    contexts = {node: context() for node in TARGETS}

    def same() -> FakeGrid:
        return network({node: client(target, own=contexts[node]) for node, target in TARGETS.items()})

    with pytest.raises(Killed):
        scaffold(same(), rounds=5, checkpoint=tmp_path, on_round=kill_in(3))
    grid = same()
    resumed = scaffold(grid, rounds=5, checkpoint=tmp_path)
    assert grid.sent[0].content.array_records[MAIL][VECTOR].numpy().tolist() == by_hand(3)[1].tolist()
    assert torch.equal(final(whole)["w"], final(resumed)["w"])
    assert resumed.session.source.exchange.screens["mail"].usual > 0
    assert "forgot" not in kinds(resumed)


@pytest.mark.parametrize("folder", [False, True])
def test_clients_that_lose_their_context_are_noted_unless_they_have_a_folder(folder: bool, tmp_path: Path) -> None:
    def fresh() -> FakeGrid:
        own: dict[int, dict[str, Any]] = {node: {"folder": tmp_path / str(node)} if folder else {} for node in TARGETS}
        return network({node: client(target, **own[node]) for node, target in TARGETS.items()})

    with pytest.raises(Killed):
        scaffold(fresh(), rounds=5, checkpoint=tmp_path, on_round=kill_in(3))
    resumed = scaffold(fresh(), rounds=5, checkpoint=tmp_path)
    forgot = [event for event in resumed.history.events if event["event"] == "forgot"]
    assert sorted(event["client"] for event in forgot) == ([] if folder else [0, 1])
    assert torch.allclose(final(resumed)["w"], by_hand(5)[0]) == folder
    assert fh.History.load(resumed.history.save(tmp_path / "out")).events == resumed.history.events


def test_what_was_kept_for_another_run_is_not_used(tmp_path: Path) -> None:
    contexts = {node: context() for node in TARGETS}
    for _ in range(2):
        grid = network({node: client(target, own=contexts[node]) for node, target in TARGETS.items()})
        torch.testing.assert_close(final(scaffold(grid))["w"], by_hand(2)[0])


def test_mail_is_refused_where_it_is_not_covered(tmp_path: Path) -> None:
    with pytest.raises(fh.InvalidInput, match="Private does not protect what clients of Scaffold .* send along"):
        KAsync(fh.Private(Scaffold(), clip=1.0, noise_multiplier=1.0), 2, num_clients=2)
    with pytest.raises(fh.InvalidInput, match="record does not keep what clients of Scaffold send along"):
        KAsync(Scaffold(), 2, num_clients=2, record=tmp_path)
    with pytest.raises(fh.InvalidInput, match="num_clients must be given for Scaffold"):
        KAsync(Scaffold(), 2)
    with pytest.raises(fh.InvalidInput, match=r"num_clients must be given for CA2FL \+ momentum, whose rule"):
        KAsync("ca2fl + momentum", 2)
    with pytest.raises(fh.InvalidInput, match="num_clients must be given for DelayAdaptive, whose rule depends on it"):
        KAsync("delayadaptive", 2)
    assert KAsync("delayadaptive:tau_c=3", 2).num_clients is None


def test_a_strategy_without_the_mail_its_clients_need_is_refused() -> None:
    class Forgets(fh.FedAvg):
        objective = Scaffold().objective

    with pytest.raises(fh.InvalidInput, match=r"Forgets must have a buffer `mail` of shape \(2,\)"):
        scaffold(two(), strategy=Forgets())


def test_a_defended_strategy_sends_the_mail_of_the_one_inside() -> None:
    server = scaffold(two(), strategy=fh.NormClip(Scaffold(), ratio=10))
    torch.testing.assert_close(final(server)["w"], by_hand(2)[0])


def test_mail_that_overflows_ends_the_run() -> None:
    class Explodes(Scaffold):
        def forward(self, arrivals: fh.Arrivals) -> torch.Tensor:
            self.mail += torch.inf
            return super().forward(arrivals)

    with pytest.raises(fh.DivergedError, match="the model diverged in round 1 .*what is sent along holds NaN"):
        scaffold(two(), strategy=Explodes())


def first_message(grid: FakeGrid, **options: Any) -> Message:
    scaffold(grid, rounds=1, **options)
    return grid.sent[0]


def test_a_client_says_what_is_wrong() -> None:
    other = network({node: moved(-1.0) for node in (1, 2)})
    run(other, rounds=1)
    with pytest.raises(fh.InvalidInput, match="the server has sent nothing along for Scaffold; it runs another method"):
        ClientSide(other.sent[0], context(), Scaffold())
    message = first_message(two())
    with pytest.raises(fh.InvalidInput, match="clients of FedAvg send nothing along, and need no ClientSide"):
        ClientSide(message, context(), "fedavg")
    control = ClientSide(message, context(), Scaffold())
    for steps, lr, named in ((0, 0.1, "steps"), (2, 0.0, "lr"), (2, float("nan"), "lr")):
        with pytest.raises(fh.InvalidInput, match=named):
            control.finish(Weights(), steps, lr)
    with pytest.raises(
        fh.InvalidInput, match="the trained model does not fit the one that was sent: the model lacks 'w'"
    ):
        control.finish(torch.nn.Linear(1, 1), 2, 0.1)


def test_a_client_whose_training_diverged_keeps_what_it_had() -> None:
    message, own = first_message(two()), context()
    ClientSide(message, own, Scaffold()).finish(Weights(), 2, 0.1)
    before = ClientSide(message, own, Scaffold()).shift["w"]
    model = Weights()
    model.w.data.fill_(torch.nan)
    sent = ClientSide(message, own, Scaffold()).finish(model, 2, 0.1)
    assert np.isnan(sent[VECTOR].numpy()).all()
    assert torch.equal(ClientSide(message, own, Scaffold()).shift["w"], before)


def test_parameters_that_the_loss_does_not_reach_are_shifted_and_frozen_ones_are_not() -> None:
    message, own = first_message(two()), context()
    ClientSide(message, own, Scaffold()).finish(Weights(), 2, 0.1)
    control, model = ClientSide(message, own, Scaffold()), Weights()
    control.add_to_gradients(model)
    assert model.w.grad is not None and torch.equal(model.w.grad, control.shift["w"])
    model = Weights().requires_grad_(False)
    control.add_to_gradients(model)
    assert model.w.grad is None


def test_strategies_can_ask_for_the_models_that_uploads_started_from() -> None:
    seen: list[list[float]] = []

    class Looks(fh.FedAvg):
        def forward(self, arrivals: fh.Arrivals) -> torch.Tensor:
            assert arrivals.model is not None
            seen.append([*arrivals.received[:, 0].tolist(), float(arrivals.model[0])])
            return super().forward(arrivals)

    grid = network({node: moved(-1.0) for node in (11, 12, 13)}, [1.0, 1.0, 2.5])
    history = run(grid, rounds=3, strategy=Looks()).history
    assert history.staleness.tolist() == [[1, 1], [1, 1], [3, 1]]
    assert seen == [[0.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [0.0, -2.0, -2.0]]


def test_fedprox_tells_clients_its_option_as_flower_does() -> None:
    grid = network({node: moved(-1.0) for node in (1, 2)})
    server = run(grid, rounds=2, strategy="fedprox:mu=0.5", evaluate_every=1)
    configs: Mapping[str, set[Any]] = {"train": set(), "evaluate": set()}
    for message in grid.sent:
        configs[message.metadata.message_type].add(message.content["config"].get("proximal-mu"))
    assert configs == {"train": {0.5}, "evaluate": {None}}
    assert server.history.method == "FedProx(mu=0.5)"


def test_clients_halves_that_are_not_on_the_network_are_refused() -> None:
    class Own(fh.FedAvg):
        objective = fh.Contrastive()

    class Loss:
        uses_previous = False

        def __call__(self, net: Any, params: Any, anchor: Any, batch: Any) -> Any: ...

    class Other(fh.FedAvg):
        objective = Loss()

    for strategy in ("moon", "moon + median", Own()):
        with pytest.raises(fh.InvalidInput, match="compare with a model they have kept, which a ClientApp is not told"):
            KAsync(strategy, 2)
    with pytest.raises(fh.InvalidInput, match="clients of Other minimise a loss of their own, which a ClientApp"):
        KAsync(Other(), 2)

"""The CIFAR-10 setting of pfl-research's own benchmarks, with fedhist, with pfl, and as a plain loop, on one device.

    python benchmarks/peers/pfl_setting.py fedhist --rounds 1500
    python benchmarks/peers/pfl_setting.py pfl --rounds 60
    python benchmarks/peers/pfl_setting.py loop --rounds 4

Its ``image_classification/configs/baseline.yaml`` at c9d1f32: 1,000 users of 50 images, 50 of them a round, one epoch
of minibatches of 10 at a rate of 0.1, a CNN of two convolutions (1.6 million parameters) with dropout, 1,500 rounds,
an evaluation on 10,000 images every 10 of them. The images are noise, as only the time counts. fedhist takes the first
50 uploads of all users; pfl and the loop do as many client updates a round, of which the loop averages and evaluates
none. Each runs on the GPU where there is one, pfl in one process.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

USERS, EXAMPLES, COHORT, BATCH, RATE, EVERY, ROUNDS = 1_000, 50, 50, 10, 0.1, 10, 1_500


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(USERS * EXAMPLES + 10_000, 3, 32, 32, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    own = USERS * EXAMPLES
    return x[:own], y[:own], x[own:], y[own:]


def with_fedhist(rounds: int) -> list[float]:
    import fedhist as fh  # noqa: PLC0415

    x, y, x_test, y_test = data()
    clients = [range(i * EXAMPLES, (i + 1) * EXAMPLES) for i in range(USERS)]
    task = fh.Task(cnn, x, y, clients, x_test, y_test)
    local = fh.Local(RATE, epochs=1, batch_size=BATCH)
    times = [time.perf_counter()]
    noted = lambda *_: times.append(time.perf_counter())  # noqa: E731
    fh.simulate("fedavg", task, k=COHORT, rounds=rounds, local=local, eval_every=EVERY, on_round=noted)
    return [*times, time.perf_counter()]


def with_pfl(rounds: int) -> list[float]:
    import numpy as np  # noqa: PLC0415
    from pfl.aggregate.simulate import SimulatedBackend  # noqa: PLC0415
    from pfl.algorithm.base import NNAlgorithmParams  # noqa: PLC0415
    from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: PLC0415
    from pfl.callback.base import TrainingProcessCallback  # noqa: PLC0415
    from pfl.callback.central_evaluation import CentralEvaluationCallback  # noqa: PLC0415
    from pfl.data.federated_dataset import FederatedDataset  # noqa: PLC0415
    from pfl.data.pytorch import PyTorchTensorDataset  # noqa: PLC0415
    from pfl.data.sampling import get_user_sampler  # noqa: PLC0415
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: PLC0415
    from pfl.internal.ops.pytorch_ops import get_default_device  # noqa: PLC0415
    from pfl.metrics import Metrics, Weighted  # noqa: PLC0415
    from pfl.model.pytorch import PyTorchModel  # noqa: PLC0415

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = cnn()

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return F.cross_entropy(self.net(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
            self.train(not eval)
            outputs = self.net(x)
            right = (outputs.argmax(dim=1) == y).sum().item()
            return {"accuracy": Weighted(right, len(y)), "loss": Weighted(F.cross_entropy(outputs, y).item(), 1)}

    class Timer(TrainingProcessCallback):
        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
            times.append(time.perf_counter())
            return False, Metrics()

    times = [time.perf_counter()]
    np.random.seed(0)
    # On its device at once, as a careful user would.
    x, y, x_test, y_test = (each.to(get_default_device()) for each in data())
    own = [PyTorchTensorDataset((x[i : i + EXAMPLES], y[i : i + EXAMPLES])) for i in range(0, len(x), EXAMPLES)]
    users = FederatedDataset(lambda user: own[int(user)], get_user_sampler("random", list(range(USERS))))
    module = Model().to(get_default_device())
    server = torch.optim.SGD(module.parameters(), lr=1.0)
    evaluation = NNEvalHyperParams(local_batch_size=10_000)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=EVERY, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=PyTorchModel(module, torch.optim.SGD, server),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        model_eval_params=evaluation,
        callbacks=[
            CentralEvaluationCallback(
                PyTorchTensorDataset((x_test, y_test)), model_eval_params=evaluation, frequency=EVERY
            ),
            Timer(),
        ],
    )
    return times


def as_a_loop(rounds: int) -> list[float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y, *_ = (each.to(device) for each in data())
    model = cnn().to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    times = [time.perf_counter()]
    for _ in range(rounds):
        for user in torch.randperm(USERS)[:COHORT].tolist():
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for index in (torch.randperm(EXAMPLES, device=device) + user * EXAMPLES).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    return times


WAYS = {"fedhist": with_fedhist, "pfl": with_pfl, "loop": as_a_loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2.")
    times = WAYS[args.way](args.rounds)
    first, rest = times[1] - times[0], times[-1] - times[1]
    rate = (args.rounds - 1) * COHORT / rest
    minutes = (first + rest * (ROUNDS - 1) / (args.rounds - 1)) / 60
    speed = f"{rate:,.0f} client updates/s, first round after {first:.1f} s"
    print(f"{args.way}: {speed}, {ROUNDS:,} rounds in {minutes:.2f} min")


if __name__ == "__main__":
    main()

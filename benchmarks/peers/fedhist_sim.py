"""Workload W with fedhist itself: FedAvg or FedHist weights in the K-async simulator.

    python benchmarks/peers/fedhist_sim.py --updates 300 --mode fedhist

Run by ``measure.py`` with the Python that runs it. The last round is evaluated, on 32 examples.
"""

from __future__ import annotations

import os

import torch
import workload as w

import fedhist as fh

args = w.parse(__doc__ or "")
sizes: list[int] = []
draw = fh.LocalSGD.batches


def counted(self: fh.LocalSGD, *of):
    """Draw a client's minibatches and count them: fast paths use neither LeNet.forward nor an optimizer."""
    plan = draw(self, *of)
    sizes.extend(map(len, plan))
    return plan


def main() -> None:
    fh.LocalSGD.batches = counted
    torch.set_num_threads(os.cpu_count() or 1)  # one client a core, each on one thread
    x, y = w.data()
    clients = [range(i * w.SAMPLES, (i + 1) * w.SAMPLES) for i in range(w.CLIENTS)]
    task = fh.Task(fh.LeNet(), x, y, clients, x[: w.BATCH], y[: w.BATCH])
    clock = w.Clock(lambda: len(sizes))
    method = args.mode or "fedavg"
    fh.simulate(
        method,
        task,
        k=w.K,
        rounds=args.rounds,
        local=fh.LocalSGD(lr=w.LR, steps=w.STEPS, batch_size=w.BATCH),
        eval_every=args.rounds,
        device="cpu",
        on_round=lambda *_: clock.mark(),
    )
    clock.report(fh.__version__, "async", method, sizes)


if __name__ == "__main__":
    main()

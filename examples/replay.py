"""Record a run's uploads, then see what other strategies would have made of the same ones.

A replay trains nothing and takes seconds. It shows how aggregation differs, not how well another method would have
learned; for that, compare.

python examples/replay.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import fedhist as fh


def main() -> None:
    task = fh.load_task("digits", clients=60, beta=0.3)
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "run"
        history = fh.simulate(
            "fedhist", task, k=6, rounds=100, local=fh.LocalSGD(lr=0.1), eval_every=50, record=recorded
        )
        print(f"recorded: {history.method}, {history.rounds} rounds, {100 * history.final_accuracy:.1f} % in the end")

        print(f"{'replayed':22}{'weight moved':>14}{'cosine':>10}{'length':>10}")
        for method in ("fedhist", "fedhist:haa=false", "fedavg", "refl"):
            other = fh.replay(recorded, method)
            length = other.norm.mean() / other.recorded_norm.mean()
            moved = 100 * other.weight_distance.mean()
            print(f"{other.method:22}{moved:13.1f}%{other.cosine.mean():10.2f}{length:9.2f}×")

        print("mean weight of an upload by its staleness, FedHist's and what FedAvg would have given:")
        for row in fh.replay(recorded, "fedavg").by_staleness():
            print(f"  τ {row['from']:3} to {row['to']:3}: {row['recorded_weight']:.3f}  {row['weight']:.3f}")


if __name__ == "__main__":
    main()

"""Who is left behind? Only a tenth of the clients hold the digit 9, and these work at half speed.

Prints, for each method, the accuracy over all classes, on the rare class and on the worst one, and the share of the
weight that the slow clients had.

python examples/fairness.py
"""

from __future__ import annotations

import numpy as np

import fedhist as fh

RARE, CLIENTS, SLOW = 9, 60, range(6)


def main() -> None:
    task = fh.load_task("digits", clients=CLIENTS, beta=1.0, rare_class=RARE, rare_clients=SLOW)
    runs = fh.compare(
        ["fedavg", "fedavg:ina=true", "refl", "fedhist"],
        task,
        k=6,
        rounds=300,
        seeds=1,
        local=fh.LocalSGD(lr=0.1),
        speeds=fh.SlowGroup(SLOW, speed=0.5),
        eval_every=100,
    )
    print(f"{'method':18}{'all':>8}{f'class {RARE}':>10}{'worst':>8}{'weight of the slow':>20}")
    for method in runs.methods:
        per_class = np.mean([history.per_class[-1] for history in runs[method]], axis=0)
        everything = np.mean([history.final_accuracy for history in runs[method]])
        shares = [history.weights[np.isin(history.clients, SLOW)].sum() / history.rounds for history in runs[method]]
        figures = f"{100 * everything:7.1f}%{100 * per_class[RARE]:9.1f}%{100 * per_class.min():7.1f}%"
        print(f"{method:18}{figures}{100 * np.mean(shares):19.1f}%")


if __name__ == "__main__":
    main()

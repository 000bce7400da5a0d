"""A sweep over skew (β) and staleness (N/K): all runs in one call, a table at the end.

On a GPU the 12 runs train as one batch, although they differ in method, split, N and K.

python examples/sweep.py
"""

from __future__ import annotations

import warnings
from itertools import product

import fedhist as fh

METHODS = ("fedavg", "fedhist")
BETAS = (0.1, 1.0, None)  # None: every client holds the same mixture
SIZES = ((40, 8), (100, 4))  # N, K


def main() -> None:
    warnings.simplefilter("ignore", fh.SplitNotice)  # small β leaves some clients with a single example
    settings = list(product(METHODS, SIZES, BETAS))
    trials = [
        fh.Trial(
            method,
            fh.load_task("digits", clients=clients, beta=beta),
            k=k,
            rounds=150,
            local=fh.LocalSGD(lr=0.1),
            eval_every=50,
        )
        for method, (clients, k), beta in settings
    ]
    histories = dict(zip(settings, fh.simulate_many(trials), strict=True))

    print(f"{'final accuracy in %':24}" + "".join(f"{'IID' if b is None else f'β = {b:g}':>10}" for b in BETAS))
    for method, (clients, k) in product(METHODS, SIZES):
        row = [100 * histories[method, (clients, k), beta].final_accuracy for beta in BETAS]
        print(f"{f'{method}, N/K = {clients / k:g}':24}" + "".join(f"{accuracy:10.1f}" for accuracy in row))


if __name__ == "__main__":
    main()

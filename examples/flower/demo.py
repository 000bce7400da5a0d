"""Two minutes: Flower's FedAvg and then KAsync on the same six SuperNodes, two of them slow, over loopback alone.

Both methods have the same data, the same first model, the same local work and the same time. While KAsync is at work a
node is killed and comes back.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from local import Deployment
from numpy.typing import NDArray

import fedhist as fh
from fedhist.data.held_back import held_back as hold_back
from fedhist.flower import KAsync
from fedhist.looks import looks

HERE = Path(__file__).parent
NODES, SLOW, DELAY = 6, (4, 5), 10.0
"""Nodes, those that are slow, and by how many seconds."""
BETA, STEPS = 0.3, 10
"""How skewed the labels are (Dirichlet), and the steps of SGD for an upload."""
METHOD, K = "fedbuff", 2
RATES = {"flower": 0.5, "kasync": 0.3}
"""Learning rates, method and K are the best on held-back data (`python benchmarks/flower/race.py`)."""
ROUNDS = 3
"""Of Flower's FedAvg; KAsync has as many seconds as they take."""
DIES, RETURNS = 0.35, 0.55
"""When a node is killed and when it is started again, as shares of that time."""
MORTAL = 1

Line = dict[str, Any]
"""What the ServerApp writes about a round."""
Examples = tuple[NDArray[np.float32], NDArray[np.int64]]


def deal(seed: int, held_back: float = 0.0) -> tuple[list[Examples], Examples]:
    """Return each node's part of scikit-learn's digits, and those to test with."""
    digits = fh.load_task("digits", NODES, BETA, seed)
    if held_back:
        digits = hold_back(digits, held_back)
    x, y = digits.x.flatten(1).numpy(), digits.y.numpy()
    parts = [np.asarray(digits.client(node)) for node in range(NODES)]
    return [(x[part], y[part]) for part in parts], (digits.x_test.flatten(1).numpy(), digits.y_test.numpy())


def start_network(net: Deployment, parts: Sequence[Examples], test: Examples) -> None:
    """Give each node its data, start it, and wait until all are connected."""
    np.savez(net.folder / "test.npz", x=test[0], y=test[1])
    for node, (x, y) in enumerate(parts):
        np.savez(net.folder / f"node{node}.npz", x=x, y=y)
        start_node(net, node)
    deadline = time.monotonic() + 120
    while not all("SuperNode ID" in net.log(f"node{node}") for node in range(NODES)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all nodes have connected; their logs are in {net.folder}")
        time.sleep(0.2)


def start_node(net: Deployment, node: int) -> None:
    """Start a SuperNode that finds its data in a file of its own."""
    data, delay = net.folder / f"node{node}.npz", DELAY if node in SLOW else 0.0
    net.start_node(f"node{node}", partition_id=node, delay=delay, data=data)


def lines(net: Deployment, file: Path) -> Iterator[Line | None]:
    """Yield what the ServerApp writes as it writes it, and None in between, until the run ends."""
    seen = 0
    while True:
        ended = net.processes["run"].poll() is not None
        written = file.read_text().splitlines() if file.exists() else []
        yield from (json.loads(line) for line in written[seen:])
        seen = len(written)
        if ended:
            return
        yield None
        time.sleep(0.1)


def show(line: Line) -> None:
    """Print what happened in a round."""
    uploads = zip(line["clients"], line["stale"], strict=True)
    who = "  ".join(f"{node}" if stale == 1 else f"{node} (τ {stale})" for node, stale in uploads)
    print(f"{line['round']:>5} {line['seconds']:>8.1f} {line['accuracy']:>9.1%}  {who}", flush=True)


def follow(net: Deployment, file: Path, rounds: int = 0, seconds: float = 0.0) -> list[Line]:
    """Show a run's rounds as they close; let a node die and return if the run has `seconds`."""
    print("round  seconds  accuracy  uploads of nodes (τ: rounds since the node was sent the model, where not 1)")
    taken, begun, dead, back = [], 0.0, not seconds, not seconds
    for line in lines(net, file):
        if line is not None:
            begun = begun or time.monotonic()
            taken.append(line)
            show(line)
            if rounds and line["round"] == rounds:
                break
        elif begun and not dead and time.monotonic() - begun > DIES * seconds:
            net.kill(f"node{MORTAL}")
            dead = True
            print(f"      node {MORTAL} is killed", flush=True)
        elif begun and dead and not back and time.monotonic() - begun > RETURNS * seconds:
            start_node(net, MORTAL)
            back = True
            print(f"      node {MORTAL} is started again; to Flower it is a new node", flush=True)
    if not taken or taken[-1]["round"] < (rounds or 1):
        raise RuntimeError(f"the run has failed:\n{net.log('run')[-3000:]}")
    return taken


def reached(taken: Sequence[Line], level: float) -> float | None:
    """Return when an accuracy was first reached, in seconds."""
    return next((line["seconds"] for line in taken if line["accuracy"] >= level), None)


def summary(runs: dict[str, list[Line]]) -> str:
    """Return a table of the methods, and who is ahead."""
    levels = (0.6, 0.7, 0.8)
    head = ["", "rounds", "uploads", "from slow nodes", "accuracy", *(f"s to {level:.0%}" for level in levels)]
    rows = [head]
    for name, taken in runs.items():
        uploads = [node for line in taken for node in line["clients"]]
        times = [f"{at:.1f}" if (at := reached(taken, level)) is not None else "–" for level in levels]
        slow = sum(node in SLOW for node in uploads)
        rows.append([name, taken[-1]["round"], len(uploads), slow, f"{taken[-1]['accuracy']:.1%}", *times])
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(head))]
    text = "\n".join(
        "  ".join(
            str(cell).ljust(widths[0]) if not column else str(cell).rjust(widths[column])
            for column, cell in enumerate(row)
        )
        for row in rows
    )
    flower, kasync = runs.values()
    lead = 100 * (kasync[-1]["accuracy"] - flower[-1]["accuracy"])
    where = f"{abs(lead):.1f} points {'ahead' if lead >= 0 else 'behind'}"
    text += f"\n\nAfter {flower[-1]['seconds']:.0f} s KAsync is {where}."
    if (first := reached(kasync, flower[-1]["accuracy"])) is not None:
        text += f" FedAvg's last accuracy it had reached after {first:.0f} s."
    return text


def draw(runs: dict[str, list[Line]], seconds: float, file: Path) -> None:
    """Draw accuracy against seconds."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, taken), look in zip(runs.items(), looks(("FedAvg", "FedHist")).values(), strict=True):
        times, accuracies = [line["seconds"] for line in taken], [100 * line["accuracy"] for line in taken]
        axes.step([*times, seconds], [*accuracies, accuracies[-1]], where="post", color=look.colour, label=name)
        axes.plot(times, accuracies, "o", markersize=4, color=look.colour)
    axes.axvspan(
        DIES * seconds, RETURNS * seconds, color="tab:red", alpha=0.1, lw=0, label=f"node {MORTAL} is dead (KAsync)"
    )
    axes.set(xlabel="seconds", ylabel="accuracy on test data, %", xlim=(0, 1.02 * seconds), ylim=(0, 100))
    axes.set_title(f"{NODES} nodes, {len(SLOW)} of them {DELAY:.0f} s slower; a dot is a round")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def race(net: Deployment, args: argparse.Namespace) -> tuple[dict[str, list[Line]], float]:
    """Run both methods, one after the other; return their rounds and the time that each had."""
    start_network(net, *args.data)
    common = {"local_steps": STEPS, "seed": args.seed, "nodes": NODES, "test": net.folder / "test.npz"}
    print(f"\nFlower's FedAvg: {ROUNDS} rounds, each waits for all {NODES} nodes", flush=True)
    out = args.out / "flower.jsonl"
    net.run(method="flower", rounds=ROUNDS, lr=RATES["flower"], out=out, **common)
    flower = follow(net, out, rounds=ROUNDS)
    seconds = flower[-1]["seconds"]
    print(
        f"\nKAsync with {args.strategy}, on the same nodes, for {seconds:.1f} s: {args.k} uploads close a round",
        flush=True,
    )
    out = args.out / "kasync.jsonl"
    net.run(method=args.strategy, k=args.k, seconds=seconds, lr=args.lr, out=out, **common)
    kasync = follow(net, out, seconds=seconds)
    return {"Flower's FedAvg": flower, f"KAsync, {args.strategy}, K = {args.k}": kasync}, seconds


def arguments() -> argparse.Namespace:
    """Return the arguments; wrong ones are refused before anything is started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default=METHOD, help="any method of fedhist (default: %(default)s)")
    parser.add_argument("--k", type=int, default=K, help="uploads that close a round (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=RATES["kasync"], help="its learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data, model and batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a new folder (default: demo/flower-, date and time)")
    args = parser.parse_args()
    try:
        KAsync(args.strategy, args.k, num_clients=NODES)
        fh.LocalSGD(lr=args.lr)
        args.data = deal(args.seed)
    except fh.InvalidInput as error:
        parser.error(str(error))
    args.out = (args.out or Path("demo") / datetime.now().strftime("flower-%Y%m%d-%H%M%S")).resolve()
    if args.out.exists():
        parser.error(f"--out {args.out} exists already; name a new folder")
    return args


def stop(signum: int, _: object) -> NoReturn:
    """End the program, so that what was started is stopped."""
    print("\nStopping everything that was started.", flush=True)
    sys.exit(128 + signum)


def main() -> None:
    """Run the demonstration."""
    args = arguments()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, stop)
    began = time.monotonic()
    slow = " and ".join(map(str, SLOW))
    print(
        f"{NODES} SuperNodes on this machine, over loopback; nodes {slow} take {DELAY:.0f} s longer for the same work."
    )
    print("A small network learns digits, of which each node has other ones. It takes about two minutes.", flush=True)
    try:
        net = Deployment(args.out / "network", HERE / "race")
        net.env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.3"  # a second by default; for both methods alike
        with net:
            runs, seconds = race(net, args)
    except RuntimeError as error:
        sys.exit(str(error))
    draw(runs, seconds, args.out / "race.png")
    print(f"\n{summary(runs)}\n\nThe picture is {args.out / 'race.png'}, and what the processes wrote lies beside it.")
    print(f"{time.monotonic() - began:.0f} s in all. Everything that was started has been stopped.")


if __name__ == "__main__":
    main()

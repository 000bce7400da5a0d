"""Six SuperNodes, K = 3: one is slow, one dies half-way and comes back. Runs over loopback alone."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from local import Deployment, wait_for

import fedhist as fh


def main() -> None:
    """Run the demonstration and show what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--strategy", default="fedhist")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory(prefix="fedhist-demo-") as place:
        folder = Path(place)
        with Deployment(folder) as net:
            print(f"SuperLink on 127.0.0.1:{net.port}; node 4 is slow, node 5 will die and come back", flush=True)
            for part in range(6):
                net.start_node(f"node{part}", partition_id=part, delay=8 if part == 4 else 0)
            net.run(strategy=args.strategy, rounds=args.rounds, out=folder / "history")
            killed = back = False
            started = time.monotonic()
            while not (folder / "history" / "summary.json").exists():
                at = time.monotonic() - started
                if not killed and at > 15:
                    net.kill("node5")
                    killed = True
                    print("node 5 was killed", flush=True)
                if not back and at > 25:
                    net.start_node("node5 again", partition_id=5)
                    back = True
                    print("node 5 is back, under another node id", flush=True)
                if at > 600:
                    wait_for(folder / "history" / "summary.json", net, 0)
                time.sleep(0.5)
            history = fh.History.load(folder / "history")
    print(f"\n{'round':>5} {'seconds':>8} {'accuracy':>9}  clients (staleness, weight)")
    accuracy = dict(zip(history.round, history.accuracy, strict=True))
    for row in range(history.rounds):
        who = "  ".join(
            f"{client} (τ {stale}, {weight:.2f})"
            for client, stale, weight in zip(
                history.clients[row], history.staleness[row], history.weights[row], strict=True
            )
        )
        print(f"{row + 1:>5} {history.arrived[row, -1]:>8.1f} {accuracy.get(row + 1, float('nan')):>9.1%}  {who}")
    print("\nEvents:")
    for event in history.events:
        print("  " + json.dumps(event))
    rounds, k = history.clients.shape
    print(f"\n{rounds} rounds of exactly {k} uploads; everything that was started has been stopped.")


if __name__ == "__main__":
    main()

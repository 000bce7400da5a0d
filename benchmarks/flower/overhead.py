"""How much of a round is the server's own work, and how much is Flower's messages?

    python benchmarks/flower/overhead.py

Clients return the model unchanged, over loopback. Times are for one round of K = 2 uploads: in our code (checks,
FedHist, the books), in Flower's push, pull and membership calls, and waiting for the clients' processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "flower"))

from local import Deployment, wait_for

LENET = "450 6 2400 16 48000 120 10080 84 840 10"
LARGE = " ".join(["62500"] * 200)
MODELS = {
    "LeNet, 248 kB, 10 tensors": (LENET, False),
    "the same, packed": (LENET, True),
    "50 MB, 1 tensor": ("12500000", False),
    "50 MB, 200 tensors": (LARGE, False),
    "the same, packed ": (LARGE, True),
}


def main() -> None:
    print("| model | ours, ms | Flower's messages, ms | ours / Flower's | round, s |")
    print("| --- | --- | --- | --- | --- |")
    for name, (tensors, packed) in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="fedhist-bench-") as place:
            folder = Path(place)
            with Deployment(folder, HERE) as net:
                for part in range(3):
                    net.start_node(f"node{part}", partition_id=part)
                net.run(tensors=tensors, packed=packed, out=folder / "out.json")
                wait_for(folder / "out.json", net, 400)
            spent = json.loads((folder / "out.json").read_text())
        ours, flower, whole = (spent[each] / spent["rounds"] for each in ("ours", "flower", "seconds"))
        print(f"| {name} | {1000 * ours:.0f} | {1000 * flower:.0f} | {ours / flower:.2f} | {whole:.1f} |", flush=True)


if __name__ == "__main__":
    main()

"""Seconds from the start of a process to its end, and its peak memory.

python benchmarks/startup.py [--repeats 3] [--device auto]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from fedhist.errors import exit_with_sentence

CODE = {
    "python": "",
    "fedhist --help": "from fedhist.command.cli import app; app(['--help'], standalone_mode=False)",
    "fedhist run --help": "from fedhist.command.cli import app; app(['run', '--help'], standalone_mode=False)",
    "import torch": "import torch",
    "a run of 10 rounds on digits": "import fedhist as fh; fh.simulate('fedhist', "
    "fh.load_task('digits', 100, 0.3), k=10, rounds=10, device='{device}')",
}
# getrusage would count what the parent held when it forked.
PEAK = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for name, code in CODE.items():
        command = [sys.executable, "-c", code.format(device=args.device) + PEAK]
        seconds, peak = float("inf"), 0
        for _ in range(args.repeats):
            started = time.perf_counter()
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds = min(seconds, time.perf_counter() - started)
            peak = int(output.split()[-1])
        print(f"  {name:30s} {seconds:8.2f} s {peak / 1024:8.0f} MiB", flush=True)


if __name__ == "__main__":
    with exit_with_sentence():
        main()

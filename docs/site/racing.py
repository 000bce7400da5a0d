"""Draw docs/race.svg: the same clients waiting for each other and not, with the accuracy that follows.

``python docs/site/racing.py`` runs both, each with the learning rate that held-back data choose, and writes the file.
"""

from __future__ import annotations

from pathlib import Path

import fedhist as fh

FILE = Path(__file__).parents[1] / "race.svg"
CLIENTS, K, UNTIL, SEED = 10, 3, 60.0, 1

WIDTH, LEFT, RIGHT, TOP, ROW, GAP, CURVES = 800, 62, 150, 58, 9, 44, 150

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #263238 }
  .paper { fill: #ffffff } .frame { fill: none; stroke: #b0bec5 } .quiet { fill: #607d8b } .bold { font-weight: 600 }
  .works { fill: #26a69a } .stale { fill: #ef8a5a } .waits { fill: #e3e8eb } .grid { stroke: #cfd8dc }
  .sync { stroke: #78909c; fill: none; stroke-width: 2.5 } .async { stroke: #00897b; fill: none; stroke-width: 2.5 }
  .cover { transform: translateX(100%) }
  @media (prefers-reduced-motion: no-preference) {
    .cover { animation: pass 14s linear infinite }
    @keyframes pass { 0% { transform: none } 70%, 100% { transform: translateX(100%) } }
  }
  @media (prefers-color-scheme: dark) {
    text { fill: #eceff1 } .paper { fill: #20242c } .frame { stroke: #455a64 } .quiet { fill: #b0bec5 }
    .works { fill: #26a69a } .stale { fill: #c8663a } .waits { fill: #313842 } .grid { stroke: #3a444c }
    .sync { stroke: #b0bec5 } .async { stroke: #4db6ac }
  }
"""


def both() -> tuple[fh.History, fh.History]:
    """Run the two on the same clients and return their histories."""
    task = fh.load_task("digits", clients=CLIENTS, beta=0.3, seed=0)
    arms = [fh.Arm("fedavg", closing=f"synchronous:k={CLIENTS}"), fh.Arm("fedbuff", k=K)]
    same = {"speeds": "lognormal:sigma=0.6,jitter=0.2", "until": UNTIL, "eval_every": 1, "local_steps": 5}
    rates = {"lr": [0.03, 0.1, 0.3, 1.0]}
    tuned = fh.tune(arms, task, grid=rates, seeds=[0], search="grid", **same)
    waiting, going_on = fh.compare(tuned.arms, task, seeds=[SEED], **same)
    return waiting, going_on


def x(time: float) -> float:
    """Return where a moment is drawn."""
    return round(LEFT + (WIDTH - LEFT - RIGHT) * time / UNTIL, 1)


def lanes(history: fh.History, top: float) -> list[str]:
    """Return who works when: one lane for each client."""
    closed = history.closed.tolist()
    wide = x(closed[-1]) - LEFT
    parts = [f'<rect class="waits" x="{LEFT}" y="{top}" width="{wide:.1f}" height="{ROW * CLIENTS}"/>']
    for round_, (clients, staleness, arrived) in enumerate(
        zip(history.clients.tolist(), history.staleness.tolist(), history.arrived.tolist(), strict=True)
    ):
        for client, tau, stop in zip(clients, staleness, arrived, strict=True):
            start = closed[round_ - tau] if round_ >= tau else 0.0
            kind = "works" if tau == 1 else "stale"
            y, wide = top + ROW * client + 1, max(x(stop) - x(start) - 0.8, 0.6)
            parts.append(f'<rect class="{kind}" x="{x(start)}" y="{y}" width="{wide:.1f}" height="{ROW - 2}"/>')
    return parts


def curve(history: fh.History, kind: str, label: str, top: float) -> list[str]:
    """Return the accuracy over time, with its last value beside it."""

    def y(accuracy: float) -> float:
        return round(top + CURVES * (1 - accuracy), 1)

    seen = [(x(0), y(0.1)), *((x(each.time), y(each.accuracy)) for each in history.evaluations)]
    path = " ".join(f"{a},{b}" for a, b in seen)
    last = y(history.final_accuracy)
    return [
        f'<polyline class="{kind}" points="{path}"/>',
        f'<text class="bold" x="{x(UNTIL) + 8}" y="{last + 5}">{100 * history.final_accuracy:.0f} %, {label}</text>',
    ]


def picture() -> str:
    """Return the drawing as SVG."""
    waiting, going_on = both()
    second = TOP + ROW * CLIENTS + GAP
    third = second + ROW * CLIENTS + GAP
    bottom = third + CURVES
    moving = lanes(waiting, TOP) + lanes(going_on, second)
    moving += curve(waiting, "sync", "waiting", third) + curve(going_on, "async", f"first {K}", third)
    still = [
        f'<text x="{LEFT}" y="24" class="bold">{CLIENTS} clients of unequal speed in the same time</text>',
        f'<text class="quiet" x="{LEFT}" y="{TOP - 10}">Wait for all: {waiting.rounds} rounds</text>',
        f'<text class="quiet" x="{LEFT}" y="{second - 10}">First {K} close a round: {going_on.rounds} rounds</text>',
        f'<text class="quiet" x="{LEFT}" y="{third - 10}">Test accuracy</text>',
    ]
    for share in (0, 0.5, 1):
        at = third + CURVES * (1 - share)
        still.append(f'<line class="grid" x1="{LEFT}" x2="{x(UNTIL)}" y1="{at:g}" y2="{at:g}"/>')
        still.append(f'<text class="quiet" x="{LEFT - 6}" y="{at + 5:g}" text-anchor="end">{100 * share:.0f} %</text>')
    for i, (kind, label) in enumerate([("works", "newest model"), ("stale", "older model"), ("waits", "idle")]):
        at = TOP + 24 * i + 8
        still.append(f'<rect class="{kind}" x="{x(UNTIL) + 12}" y="{at}" width="18" height="12" rx="3"/>')
        still.append(f'<text class="quiet" x="{x(UNTIL) + 38}" y="{at + 11}">{label}</text>')
    below, above, height = "\n".join(moving), "\n".join(still), bottom + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        "<title>The same clients, waiting for each other and not, and the accuracy over time</title>\n"
        f'<style>{STYLE}</style>\n<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n{below}\n'
        f'<rect class="paper cover" x="{LEFT}" y="{TOP - 4}" width="{WIDTH - LEFT}" height="{height - TOP - 4}"/>\n'
        f'{above}\n<rect class="frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")

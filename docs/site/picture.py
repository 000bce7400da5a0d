"""Draw docs/kasync.svg: who works when, on which version of the model, in a small schedule.

``python docs/site/picture.py`` writes the file anew; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

import fedhist as fh
from fedhist.looks import STALENESS

FILE = Path(__file__).parents[1] / "kasync.svg"
CLIENTS, K, ROUNDS, SEED = 6, 2, 6, 5

# Bars carry dark words by day, so that the pale shades are those of the day here.
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 800, 92, 24, 62, 40, 24

FRESH, BETWEEN, STALE = STALENESS
STYLE = f"""
  text {{ font: 14px system-ui, sans-serif; fill: #263238 }}
  .paper {{ fill: #ffffff; stroke: #b0bec5 }} .quiet {{ fill: #607d8b }} .bold {{ font-weight: 600 }}
  .round {{ stroke: #78909c; stroke-width: 1.5 }} .waits {{ stroke: #90a4ae; stroke-width: 2; stroke-dasharray: 2 4 }}
  .one {{ fill: {FRESH.night} }} .two {{ fill: {BETWEEN.night} }} .more {{ fill: {STALE.night} }}
  .under-way {{ fill: #cfd8dc }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #eceff1 }} .paper {{ fill: #20242c; stroke: #455a64 }} .quiet {{ fill: #b0bec5 }}
    .one {{ fill: {FRESH.day} }} .two {{ fill: {BETWEEN.day} }} .more {{ fill: {STALE.day} }}
    .under-way {{ fill: #455a64 }}
  }}
"""


def picture() -> str:
    """Return the drawing as SVG."""
    schedule = fh.make_schedule(CLIENTS, K, ROUNDS, fh.LogNormal(sigma=0.6, jitter=0.25), seed=SEED)
    end = schedule.time[-1]
    bottom = TOP + ROW * CLIENTS

    def x(time: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * time / end, 1)

    def bar(client: int, start: float, stop: float, kind: str, label: str) -> str:
        y = TOP + ROW * client + (ROW - BAR) / 2
        return (
            f'<rect class="{kind}" x="{x(start)}" y="{y:g}" width="{x(stop) - x(start):.1f}" height="{BAR}" rx="4"/>'
            f'<text x="{(x(start) + x(stop)) / 2:.1f}" y="{y + 17:g}" text-anchor="middle">{label}</text>'
        )

    parts: list[str] = []
    for round_, closes in enumerate(schedule.time, 1):
        left, right = x(schedule.time[round_ - 2]) if round_ > 1 else LEFT, x(closes)
        parts.append(f'<line class="round" x1="{right}" x2="{right}" y1="{TOP - 14}" y2="{bottom}"/>')
        middle = f'x="{(left + right) / 2:.1f}" text-anchor="middle"'
        parts.append(f'<text class="quiet" {middle} y="{TOP - 38}">round {round_}</text>')
        parts.append(f'<text class="bold" {middle} y="{TOP - 19}">w{round_}</text>')
    received = dict.fromkeys(range(CLIENTS), (0.0, 1))
    for round_, (clients, staleness, arrived) in enumerate(
        zip(schedule.clients.tolist(), schedule.staleness.tolist(), schedule.arrived.tolist(), strict=True), 1
    ):
        for client, tau, time in zip(clients, staleness, arrived, strict=True):
            start, version = received[client]
            kind = {1: "one", 2: "two"}.get(tau, "more")
            parts.append(bar(client, start, time, kind, f"w{version}, τ = {tau}"))
            y = TOP + ROW * client + ROW / 2
            closes = float(schedule.time[round_ - 1])
            if x(closes) - x(time) > 1:
                parts.append(f'<line class="waits" x1="{x(time)}" x2="{x(closes)}" y1="{y:g}" y2="{y:g}"/>')
            received[client] = (closes, round_ + 1)
    for client, (start, version) in received.items():
        if start < end:
            parts.append(bar(client, start, end, "under-way", f"w{version}, at work"))
        parts.append(f'<text x="14" y="{TOP + ROW * client + 25}">client {client}</text>')
    parts.append(f'<text class="quiet" x="14" y="{TOP - 38}">time →</text>')
    legend = [("one", "τ = 1: fresh"), ("two", "τ = 2"), ("more", "τ ≥ 3: stale"), ("under-way", "still at work")]
    for i, (kind, label) in enumerate(legend):
        at = LEFT + 150 * i
        parts.append(f'<rect class="{kind}" x="{at}" y="{bottom + 20}" width="18" height="14" rx="3"/>')
        parts.append(f'<text class="quiet" x="{at + 25}" y="{bottom + 32}">{label}</text>')
    drawn = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}" role="img">\n'
        f"<title>Six clients, a round closes with every second upload</title>\n<style>{STYLE}</style>\n"
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom + 49}" rx="8"/>\n{drawn}\n</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(picture())

"""The paper's tables as Markdown, with our numbers beside the published ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from fedhist.paper.cells import ABLATION, BETAS, COMPARED, FAIRNESS, LAST, RARE_CLASS, SENSITIVITY, TUNED, Cell
from fedhist.report.statistics import difference

Results = Mapping[Cell, Mapping[str, Any]]


@cache
def published() -> dict[str, Any]:
    """Return the numbers printed in the paper."""
    table: dict[str, Any] = json.loads(files("fedhist.paper").joinpath("published.json").read_text())
    return table


def changed(method: str) -> str:
    """Return what a method has other than its default options."""
    return method.partition(":")[2] or "defaults"


def beta_name(beta: float | None) -> str:
    """Return what a split is called."""
    return "IID" if beta is None else f"β = {beta:g}"


def final(result: Mapping[str, Any], rounds: float = float("inf")) -> float:
    """Return a run's final test accuracy in percent, or what it would be after fewer rounds."""
    until = sum(r <= rounds for r in result["round"])
    return 100 * statistics.fmean(result["accuracy"][max(until - LAST, 0) : until])


def rounds_to(result: Mapping[str, Any], target: float) -> float:
    """Return the first evaluated round with that accuracy; infinity if there is none."""
    reached = (r for r, accuracy in zip(result["round"], result["accuracy"], strict=True) if accuracy >= target)
    return float(next(reached, float("inf")))


def rare_accuracy(result: Mapping[str, Any]) -> float:
    """Return the final accuracy on the rare class in percent."""
    return 100 * float(result["per_class"][RARE_CLASS])


def tier(place: int) -> Callable[[Mapping[str, Any]], float]:
    """Return a measure: the accuracy on data like a third of the clients', 0 the fastest, 2 the slowest."""
    return lambda result: 100 * float(result["per_tier"][place])


def by_seed(results: Results, measure: Callable[[Mapping[str, Any]], float], **wanted: object) -> dict[int, float]:
    """Return a measure of all runs whose cells have the wanted values, by seed."""
    chosen = {c: r for c, r in results.items() if all(getattr(c, name) == value for name, value in wanted.items())}
    return {cell.seed: measure(result) for cell, result in sorted(chosen.items(), key=lambda item: item[0].seed)}


def shown(values: Iterable[float], digits: int = 1) -> str:
    """Return mean ± standard deviation over seeds; a dash where nothing was run."""
    listed = list(values)
    if not listed:
        return "–"
    spread = f" ± {statistics.stdev(listed):.{digits}f}" if len(listed) > 1 else ""
    return f"{statistics.fmean(listed):.{digits}f}{spread}"


def _gap(a: Mapping[int, float], b: Mapping[int, float]) -> str:
    gap = difference(a, b)
    return "–" if gap is None else f"{gap[0]:+z.1f} ± {gap[1]:.1f}"


def _several(results: Results) -> bool:
    return len({cell.seed for cell in results}) > 1


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def _settings(results: Results) -> list[tuple[str, int]]:
    return list(dict.fromkeys((c.dataset, c.ratio) for c in results))


def _betas(results: Results) -> list[float | None]:
    present = {cell.beta for cell in results}
    return [beta for beta in BETAS if beta in present]


def _paper_accuracy(dataset: str, ratio: int, beta: float | None, method: str) -> float | None:
    column = published()["table1"].get(dataset, {}).get(str(ratio), {})
    value: float | None = column.get("iid" if beta is None else f"{beta:.1f}", {}).get(method)
    return value


def calibration(results: Results) -> str:
    """Return FedAvg's accuracy after more and more rounds, and how far it is from the paper's on average."""
    lines: list[str] = []
    for dataset in dict.fromkeys(cell.dataset for cell in results):
        runs = {cell: result for cell, result in results.items() if cell.dataset == dataset}
        paper = [_paper_accuracy(dataset, c.ratio, c.beta, "FedAvg") for c in runs]
        known = [value for value in paper if value is not None]
        rows = [["paper", *(f"{value:.1f}" for value in known), ""]] if known else []
        longest = next(iter(runs)).rounds
        for tenth in range(1, 11):
            rounds = longest * tenth // 10
            ours = [final(result, rounds) for result in runs.values()]
            off = [statistics.fmean(abs(own - value) for own, value in zip(ours, known, strict=True))] if known else []
            rows.append([f"{rounds:,}", *(f"{value:.1f}" for value in (*ours, *off))])
        header = ["rounds", *(f"N/K = {c.ratio}, {beta_name(c.beta)}" for c in runs)]
        header += ["mean distance"] if known else []
        lines += [f"**{dataset}**", "", *markdown(header, rows), ""]
    return "\n".join(lines)


def table1(results: Results) -> str:
    """Return Table 1: ours, the paper's in brackets; the best of a column bold, the second best in italics.

    With two seeds and more a column follows: FedHist minus the method with a 95 % interval, split by split.
    """
    lines: list[str] = []
    several = _several(results)
    for dataset, ratio in _settings(results):
        betas = _betas(results)
        values = {
            (method, beta): by_seed(results, final, dataset=dataset, ratio=ratio, method=method, beta=beta)
            for method in COMPARED.values()
            for beta in betas
        }
        ranks = {}
        for beta in betas:
            found = [values[method, beta].values() for method in COMPARED.values() if values[method, beta]]
            ranks[beta] = sorted(map(statistics.fmean, found), reverse=True)[:2]
        rows = []
        for name, method in COMPARED.items():
            row = [name]
            for beta in betas:
                seeds = values[method, beta]
                text = shown(seeds.values())
                if seeds:
                    mean = statistics.fmean(seeds.values())
                    mark = "**" if mean == ranks[beta][0] else "*" if mean == ranks[beta][-1] else ""
                    text = f"{mark}{text}{mark}"
                paper = _paper_accuracy(dataset, ratio, beta, name)
                row.append(text + (f" ({paper:.1f})" if paper is not None else ""))
            if several:
                gaps = ", ".join(_gap(values["fedhist", beta], values[method, beta]) for beta in betas)
                row.append("" if method == "fedhist" else gaps)
            rows.append(row)
        header = ["method", *map(beta_name, betas), *(["FedHist minus it"] if several else [])]
        lines += [f"**{dataset}, N/K = {ratio}**", "", *markdown(header, rows), ""]
    return "\n".join(lines)


def table2(results: Results, target: float = 0.4) -> str:
    """Return Table 2: rounds to 40 % and the speed-up over FedAvg, the paper's in brackets."""
    betas = _betas(results)
    as_published = {cell.dataset for cell in results} == {"cifar10"}
    rows = []
    for name, method in COMPARED.items():
        row = [name]
        for beta in betas:
            own, base = (
                by_seed(results, lambda r: rounds_to(r, target), method=m, beta=beta) for m in (method, "fedavg")
            )
            known = published()["table2"]["iid" if beta is None else f"{beta:.1f}"]
            paper = f" ({known[name]}, {known['FedAvg'] / known[name]:.2f}×)" if as_published else ""
            ratios = [base[seed] / own[seed] for seed in own if seed in base and own[seed] < float("inf")]
            reached = [value for value in own.values() if value < float("inf")]
            missed = f", {len(own) - len(reached)} never" if len(reached) < len(own) else ""
            row.append(f"{shown(reached, 0)}{missed}, {shown(ratios, 2)}×{paper}")
        rows.append(row)
    return "\n".join(markdown(["method", *map(beta_name, betas)], rows))


def _by_setting(results: Results, methods: Mapping[str, str], measure: Callable[[Mapping[str, Any]], float]) -> str:
    columns = [(ratio, beta) for _, ratio in _settings(results) for beta in _betas(results)]
    rows = [
        [name, *(shown(by_seed(results, measure, method=m, ratio=r, beta=b).values()) for r, b in columns)]
        for name, m in methods.items()
    ]
    return "\n".join(markdown(["method", *(f"N/K = {r}, {beta_name(b)}" for r, b in columns)], rows))


def figure4(results: Results) -> str:
    """Return the ablation of Figure 4."""
    return _by_setting(results, ABLATION, final)


def figure5(results: Results) -> str:
    """Return Figure 5: accuracy on the rare class, then on the worst class, on all, and for the slowest clients."""
    worst = _by_setting(results, FAIRNESS, lambda r: 100 * min(a for a in r["per_class"] if a is not None))
    return "\n\n".join(
        [
            f"Class {RARE_CLASS + 1}:\n\n{_by_setting(results, FAIRNESS, rare_accuracy)}",
            f"The worst class:\n\n{worst}",
            f"All classes:\n\n{_by_setting(results, FAIRNESS, final)}",
            *(
                f"What the {name} third of the clients see:\n\n{_by_setting(results, FAIRNESS, tier(place))}"
                for place, name in enumerate(("fastest", "middle", "slowest"))
            ),
        ]
    )


def best_rates(results: Results, rates: Iterable[float]) -> dict[tuple[str, int], float]:
    """Return the learning rate with the best mean validation accuracy, by method and N/K, where all were tried."""
    best = {}
    for method, ratio in dict.fromkeys((cell.method, cell.ratio) for cell in results):
        tried = {lr: list(by_seed(results, final, method=method, ratio=ratio, lr=lr).values()) for lr in rates}
        if all(tried.values()):
            best[method, ratio] = max(tried, key=lambda lr: statistics.fmean(tried[lr]))
    return best


def tuned_cells(results: Results, rates: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    """Return the runs on the test set that tuning asks for: each method with its best learning rate."""
    best = best_rates(results, rates)
    first = min((cell.seed for cell in results), default=0)
    chosen = [cell for cell in results if cell.seed == first and cell.lr == best.get((cell.method, cell.ratio))]
    return [replace(cell, validation=False, seed=seed) for seed in seeds for cell in chosen]


def tuned(results: Results) -> str:
    """Return the comparison with each method's own learning rate, then the accuracies these were chosen by, in bold."""
    ratios, rates = (sorted({getattr(cell, name) for cell in results}) for name in ("ratio", "lr"))
    chosen = {(cell.method, cell.ratio): cell.lr for cell in results if not cell.validation}
    several, rows = _several(results), []
    for name, method in TUNED.items():
        row = [name]
        for ratio in ratios:
            own, hist = (by_seed(results, final, method=m, ratio=ratio, validation=False) for m in (method, "fedhist"))
            row.append(f"{shown(own.values())} (lr {chosen[method, ratio]:g})" if own else "–")
            if several:
                row.append("" if method == "fedhist" else _gap(hist, own))
        rows.append(row)
    header = [text for r in ratios for text in (f"N/K = {r}", *(["FedHist minus it"] if several else []))]
    lines = ["Test accuracy:", "", *markdown(["method", *header], rows)]
    for ratio in ratios:
        rows = []
        for name, method in TUNED.items():
            tried = {
                lr: shown(by_seed(results, final, method=method, ratio=ratio, lr=lr, validation=True).values())
                for lr in rates
            }
            best = chosen.get((method, ratio))
            rows.append([name, *(f"**{text}**" if lr == best else text for lr, text in tried.items())])
        header = ["method", *(f"lr {lr:g}" for lr in rates)]
        lines += ["", f"Accuracy on held-back training data, N/K = {ratio}:", "", *markdown(header, rows)]
    return "\n".join(lines)


def sensitivity(results: Results) -> str:
    """Return what one changed option does, on held-back data; with several seeds, the difference to the defaults."""
    ratios = sorted({cell.ratio for cell in results})
    several, rows = _several(results), []
    for group, specs in {"": ("fedhist",), **SENSITIVITY}.items():
        for spec in specs:
            row = [group, changed(spec)]
            for ratio in ratios:
                own, default = (by_seed(results, final, method=m, ratio=ratio) for m in (spec, "fedhist"))
                row.append(shown(own.values()))
                if several:
                    row.append("" if spec == "fedhist" else _gap(own, default))
            rows.append(row)
    header = [text for r in ratios for text in (f"N/K = {r}", *(["minus defaults"] if several else []))]
    return "\n".join(markdown(["", "FedHist with", *header], rows))


TABLES: Mapping[str, Callable[[Results], str]] = {
    "calibration": calibration,
    "table1": table1,
    "table2": table2,
    "fig3": table2,
    "fig4": figure4,
    "fig5": figure5,
    "tuned": tuned,
    "sensitivity": sensitivity,
}

"""The paper's tables as Markdown, with our numbers beside the published ones."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from fedhist.paper.cells import ABLATION, BETAS, COMPARED, FAIRNESS, LAST, RARE_CLASS, SENSITIVITY, TUNED, Cell
from fedhist.store.statistics import paired

Results = Mapping[Cell, Mapping[str, Any]]


@cache
def published() -> dict[str, Any]:
    """Return the numbers printed in the paper."""
    table: dict[str, Any] = json.loads(files("fedhist.paper").joinpath("published.json").read_text())
    return table


def changed(method: str) -> str:
    """Return the options of a method that differ from their defaults."""
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


def by_seed(results: Results, measure: Callable[[Mapping[str, Any]], float], **wanted: object) -> dict[int, float]:
    """Return a measure of all runs whose cells have the wanted values, by seed."""
    chosen = {c: r for c, r in results.items() if all(getattr(c, name) == value for name, value in wanted.items())}
    return {cell.seed: measure(result) for cell, result in sorted(chosen.items(), key=lambda item: item[0].seed)}


def mean_and_spread(values: Iterable[float], digits: int = 1) -> str:
    """Return mean ± standard deviation over seeds; a dash where there is no run."""
    seeds = list(values)
    if not seeds:
        return "–"
    spread = f" ± {statistics.stdev(seeds):.{digits}f}" if len(seeds) > 1 else ""
    return f"{statistics.fmean(seeds):.{digits}f}{spread}"


def _gap(a: Mapping[int, float], b: Mapping[int, float]) -> str:
    """Return the mean of a - b with its 95 % interval; nothing for a method and itself, and for a single seed."""
    gap = None if a is b else paired(a, b)
    return "" if gap is None else f"{gap.mean:+z.1f} ± {gap.half:.1f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, without columns in which nothing stands."""
    listed = [[*row] for row in rows]
    used = [i for i in range(len(header)) if any(row[i] for row in listed)]
    lines = (header, ["---"] * len(header), *listed)
    return [f"| {' | '.join(line[i] for i in used)} |" for line in lines]


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
        for tenth in range(1, 11):
            rounds = next(iter(runs)).rounds * tenth // 10
            ours = [final(result, rounds) for result in runs.values()]
            gaps = [abs(own - value) for own, value in zip(ours, known, strict=True)] if known else []
            distance = f"{statistics.fmean(gaps):.1f}" if gaps else ""
            rows.append([f"{rounds:,}", *(f"{value:.1f}" for value in ours), distance])
        header = ["rounds", *(f"N/K = {c.ratio}, {beta_name(c.beta)}" for c in runs), "mean distance"]
        lines += [f"**{dataset}**", "", *markdown(header, rows), ""]
    return "\n".join(lines)


def _ranked(values: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Return each method's mean and spread over seeds; the best bold, the second best in italics."""
    means = {method: statistics.fmean(seeds.values()) for method, seeds in values.items() if seeds}
    best = sorted(means.values(), reverse=True)[:2]
    marks = {method: "**" if mean == best[0] else "*" if mean == best[-1] else "" for method, mean in means.items()}
    texts = {method: mean_and_spread(seeds.values()) for method, seeds in values.items()}
    return {method: f"{marks.get(method, '')}{text}{marks.get(method, '')}" for method, text in texts.items()}


def table1(results: Results) -> str:
    """Return Table 1: ours, the paper's in brackets; the best of a column bold, the second best in italics.

    With two seeds and more a column follows: FedHist minus the method with a 95 % interval, split by split.
    """
    lines: list[str] = []
    betas = _betas(results)
    for dataset, ratio in dict.fromkeys((cell.dataset, cell.ratio) for cell in results):
        runs = {cell: result for cell, result in results.items() if (cell.dataset, cell.ratio) == (dataset, ratio)}
        columns = {b: {m: by_seed(runs, final, method=m, beta=b) for m in COMPARED.values()} for b in betas}
        texts, rows = {beta: _ranked(column) for beta, column in columns.items()}, []
        for name, method in COMPARED.items():
            if not any(column[method] for column in columns.values()):
                continue
            paper = {beta: _paper_accuracy(dataset, ratio, beta, name) for beta in columns}
            row = [texts[b][method] + ("" if paper[b] is None else f" ({paper[b]:.1f})") for b in columns]
            gaps = [_gap(column["fedhist"], column[method]) for column in columns.values()]
            rows.append([name, *row, ", ".join(gaps) if any(gaps) else ""])
        header = ["method", *map(beta_name, columns), "FedHist minus it"]
        lines += [f"**{dataset}, N/K = {ratio}**", "", *markdown(header, rows), ""]
    return "\n".join(lines)


def table2(results: Results, target: float = 0.4) -> str:
    """Return Table 2: rounds to 40 % and the speed-up over FedAvg, the paper's in brackets."""
    betas, measure = _betas(results), partial(rounds_to, target=target)
    as_published = {cell.dataset for cell in results} == {"cifar10"}
    rows = []
    for name, method in COMPARED.items():
        row = [name]
        for beta in betas:
            own, base = (by_seed(results, measure, method=m, beta=beta) for m in (method, "fedavg"))
            known = published()["table2"]["iid" if beta is None else f"{beta:.1f}"]
            paper = f" ({known[name]}, {known['FedAvg'] / known[name]:.2f}×)" if as_published else ""
            ratios = [base[seed] / own[seed] for seed in own if seed in base and own[seed] < float("inf")]
            reached = [value for value in own.values() if value < float("inf")]
            missed = f", {len(own) - len(reached)} never" if len(reached) < len(own) else ""
            row.append(f"{mean_and_spread(reached, 0)}{missed}, {mean_and_spread(ratios, 2)}×{paper}")
        rows.append(row)
    return "\n".join(markdown(["method", *map(beta_name, betas)], rows))


def _by_setting(results: Results, methods: Mapping[str, str], measure: Callable[[Mapping[str, Any]], float]) -> str:
    columns = [(ratio, beta) for ratio in dict.fromkeys(c.ratio for c in results) for beta in _betas(results)]
    rows = [
        [name, *(mean_and_spread(by_seed(results, measure, method=m, ratio=r, beta=b).values()) for r, b in columns)]
        for name, m in methods.items()
    ]
    return "\n".join(markdown(["method", *(f"N/K = {r}, {beta_name(b)}" for r, b in columns)], rows))


def figure5(results: Results) -> str:
    """Return Figure 5: accuracy on the rare class, on the worst class, on all, and for each third of the clients."""
    measures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        f"Class {RARE_CLASS + 1}": rare_accuracy,
        "The worst class": lambda result: 100 * float(min(result["per_class"])),
        "All classes": final,
        "What the fastest third of the clients see": lambda result: 100 * float(result["per_tier"][0]),
        "What the middle third of the clients see": lambda result: 100 * float(result["per_tier"][1]),
        "What the slowest third of the clients see": lambda result: 100 * float(result["per_tier"][2]),
    }
    return "\n\n".join(f"{title}:\n\n{_by_setting(results, FAIRNESS, each)}" for title, each in measures.items())


def tuned_cells(results: Results, rates: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    """Return the runs on the test set with each method's best learning rate, where all rates were tried."""
    tested: list[Cell] = []
    for method, ratio in dict.fromkeys((cell.method, cell.ratio) for cell in results):
        tried = {lr: by_seed(results, final, method=method, ratio=ratio, lr=lr) for lr in rates}
        if all(tried.values()):
            best = max(tried, key=lambda lr: statistics.fmean(tried[lr].values()))
            cell = next(cell for cell in results if (cell.method, cell.ratio, cell.lr) == (method, ratio, best))
            tested += [replace(cell, validation=False, seed=seed) for seed in seeds]
    return tested


def tuned(results: Results) -> str:
    """Return the comparison with each method's own learning rate, then the accuracies these were chosen by, in bold."""
    ratios, rates = (sorted({getattr(cell, name) for cell in results}) for name in ("ratio", "lr"))
    chosen = {(cell.method, cell.ratio): cell.lr for cell in results if not cell.validation}
    fedhist = {ratio: by_seed(results, final, method="fedhist", ratio=ratio, validation=False) for ratio in ratios}
    rows = []
    for name, method in TUNED.items():
        row = [name]
        for ratio in ratios:
            own = by_seed(results, final, method=method, ratio=ratio, validation=False)
            row.append(f"{mean_and_spread(own.values())} (lr {chosen[method, ratio]:g})" if own else "–")
            row.append("" if method == "fedhist" else _gap(fedhist[ratio], own))
        rows.append(row)
    header = [text for ratio in ratios for text in (f"N/K = {ratio}", "FedHist minus it")]
    lines = ["Test accuracy:", "", *markdown(["method", *header], rows)]
    for ratio in ratios:
        rows = []
        for name, method in TUNED.items():
            row = [name]
            for lr in rates:
                tried = by_seed(results, final, method=method, ratio=ratio, lr=lr, validation=True)
                mark = "**" if lr == chosen.get((method, ratio)) else ""
                row.append(f"{mark}{mean_and_spread(tried.values())}{mark}")
            rows.append(row)
        header = ["method", *(f"lr {lr:g}" for lr in rates)]
        lines += ["", f"Accuracy on held-back training data, N/K = {ratio}:", "", *markdown(header, rows)]
    return "\n".join(lines)


def sensitivity(results: Results) -> str:
    """Return what one changed option does, on held-back data; with several seeds, the difference to the defaults."""
    ratios, rows = sorted({cell.ratio for cell in results}), []
    defaults = {ratio: by_seed(results, final, method="fedhist", ratio=ratio) for ratio in ratios}
    for group, specs in {"": ("fedhist",), **SENSITIVITY}.items():
        for spec in specs:
            row = [group, changed(spec)]
            for ratio, default in defaults.items():
                own = default if spec == "fedhist" else by_seed(results, final, method=spec, ratio=ratio)
                row += [mean_and_spread(own.values()), _gap(own, default)]
            rows.append(row)
    header = [text for ratio in ratios for text in (f"N/K = {ratio}", "minus defaults")]
    return "\n".join(markdown(["", "FedHist with", *header], rows))


TABLES: Mapping[str, Callable[[Results], str]] = {
    "calibration": calibration,
    "table1": table1,
    "longer": table1,
    "table2": table2,
    "fig3": table2,
    "fig4": lambda results: _by_setting(results, ABLATION, final),
    "fig5": figure5,
    "tuned": tuned,
    "sensitivity": sensitivity,
}

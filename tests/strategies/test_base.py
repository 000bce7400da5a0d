from __future__ import annotations

import fedhist as fh


def test_is_printed_with_its_options() -> None:
    assert repr(fh.FedAvg()) == "FedAvg(by_examples=True, ina=False)"
    assert repr(fh.FedAdam(fh.REFL(beta=0.2))) == "FedAdam(REFL(beta=0.2), eta=0.01, beta1=0.9, beta2=0.99, tau=0.001)"
    assert repr(fh.CoordinateMedian(fh.Scaffold())) == "CoordinateMedian(Scaffold())"


def test_the_seed_of_noise_is_not_printed() -> None:
    private = fh.Private(fh.FedAvg(), clip=1.0, noise_multiplier=0.5, seed=1234)
    assert repr(private).startswith("Private(FedAvg(by_examples=True, ina=False), clip=1.0, noise_multiplier=0.5")
    assert "1234" not in repr(private) + private._repr_html_()


class Own(fh.Strategy):
    def __init__(self, a: float, *others: float, b: str = "b", **more: float) -> None:
        super().__init__()
        self.b = b


def test_options_that_a_strategy_does_not_keep_are_left_out() -> None:
    assert repr(Own(1.0)) == "Own(b='b')"
    assert repr(Own(1.0, b=f"{'x' * 300}\n")).endswith("…)") and "\n" not in repr(Own(1.0, b="x\n"))


def test_a_table_of_options_in_a_notebook() -> None:
    html = fh.FedAdam(fh.REFL())._repr_html_()
    assert "REFL in FedAdam" in html and "<td>REFL</td><td>beta</td><td>0.35</td>" in html
    assert "<th>option</th><th>value</th>" in fh.REFL()._repr_html_() and "part" not in fh.REFL()._repr_html_()
    assert "Scaffold" in fh.Scaffold()._repr_html_()

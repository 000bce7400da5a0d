from __future__ import annotations

import sys
from typing import Any, Literal, cast

import pytest
from torch import Tensor

import fedhist as fh
from fedhist.simulation.methods import DEFENCES, METHODS, OPTIMIZERS, SHORT, as_method


def test_names_and_labels() -> None:
    labels = {name: as_method(name).name for name in METHODS}
    assert labels == {
        "fedavg": "FedAvg",
        "fedprox": "FedProx",
        "moon": "MOON",
        "scaffold": "SCAFFOLD",
        "fedasync": "FedAsync",
        "fedbuff": "FedBuff",
        "delayadaptive": "DelayAdaptive",
        "dynsgd": "DynSGD",
        "twafl": "TWAFL",
        "wkafl": "WKAFL",
        "refl": "REFL",
        "port": "Port",
        "asyncfeded": "AsyncFedED",
        "momentumapproximation": "MA-Light",
        "fadas": "FADAS",
        "fedfa": "FedFa",
        "ca2fl": "CA2FL",
        "fedstale": "FedStale",
        "mifa": "MIFA",
        "aced": "ACED",
        "area": "AREA",
        "nowcast": "Nowcast",
        "fedhist": "FedHist",
    }


def test_names_of_papers_stand_for_what_they_say() -> None:
    labels = {name: as_method(name).name for name in SHORT}
    assert labels == {
        "ace": "ACED(tau_algo=None)",
        "fedvarp": "CA2FL",
        "ma": "MA-Light",
        "malight": "MA-Light",
        "fedadagrad": "FedAvg + adagrad",
        "fedadam": "FedAvg + adam",
        "fedavgm": "FedAvg + momentum",
        "fedyogi": "FedAvg + yogi",
    }
    assert as_method("MA-Light:beta=0.5").name == "MA-Light(beta=0.5)"
    assert as_method("ace:bits=8").name == "ACED(tau_algo=None, bits=8)"
    assert as_method("FedAdam : eta=0.1").name == "FedAvg + adam(eta=0.1)"
    assert as_method("FedAdam:eta=0.1 + median").name == "FedAvg + adam(eta=0.1) + median"
    assert as_method("delay-adaptive:tau_c=3").name == "DelayAdaptive(tau_c=3.0)"


def test_optimizers_and_objectives_go_around_any_rule() -> None:
    method = as_method("refl + adam:eta=0.1 + fedprox:mu=0.2")
    assert method.name == "REFL + adam(eta=0.1) + FedProx(mu=0.2)"
    assert isinstance(method.strategy, fh.FedAdam) and isinstance(method.strategy.inner, fh.REFL)
    assert method.objective == fh.Proximal(mu=0.2)
    same = as_method(fh.FedAdam(fh.REFL(), eta=0.1))
    assert same.name == "REFL + adam(eta=0.1)"
    assert set(OPTIMIZERS) == {"momentum", "adam", "yogi", "adagrad"}


class Own(fh.Strategy):
    """Somebody's own rule."""

    def __init__(self, power: float = 2.0) -> None:
        super().__init__()
        self.power = power

    def weights(self, arrivals: fh.Arrivals) -> Tensor:
        return arrivals.staleness.double() ** -self.power


def test_a_strategy_of_ones_own_is_named_by_its_place() -> None:
    method = as_method(f"{__name__}:Own:power=3 + momentum")
    assert method.name == "Own(power=3) + momentum"
    assert type(method.strategy) is fh.ServerMomentum and isinstance(method.strategy.inner, Own)


def test_fedprox_and_moon_are_fedavg_with_another_objective() -> None:
    assert isinstance(as_method("fedprox").strategy, fh.FedAvg)
    assert as_method("fedprox:mu=0.3").objective == fh.Proximal(mu=0.3)
    assert as_method("moon:temperature=0.1").objective == fh.Contrastive(temperature=0.1)


def test_options_are_read_like_toml_and_shown_in_the_label() -> None:
    method = as_method('FedHist: h=3, ina=false, memory_dtype=bfloat16, ina_direction="sum"')
    assert isinstance(method.strategy, fh.FedHist)
    assert (method.strategy.h, method.strategy.ina, method.strategy.memory_dtype) == (3, False, "bfloat16")
    assert method.name == "FedHist(h=3, ina=False, ina_direction='sum', memory_dtype='bfloat16')"


def test_words_are_understood_in_any_case() -> None:
    strategy = as_method("fedhist:ina=False,egs=FALSE,sketch=None").strategy
    assert isinstance(strategy, fh.FedHist)
    assert (strategy.ina, strategy.egs, strategy.sketch) == (False, False, None)


def test_renamed_options_name_their_new_names() -> None:
    with pytest.raises(fh.InvalidInput, match="fedhist has no option 'history' any more; it is called 'h'."):
        as_method("fedhist:history=3")
    with pytest.raises(
        fh.InvalidInput, match="FedHist has no option 'history_dtype' any more; it is called 'memory_dty"
    ):
        fh.FedHist(history_dtype="bfloat16")  # type: ignore[call-arg]


def test_a_strategy_with_an_objective_of_its_own() -> None:
    method = as_method(fh.FedHist(lam=2.0), fh.Proximal(mu=0.1))
    assert method.name == "FedHist(lam=2.0) + Proximal(mu=0.1)"
    assert method.objective == fh.Proximal(mu=0.1)


def test_defences_are_named_as_they_are_shown() -> None:
    method = as_method("fedhist:lam=2 + trimmed:share=0.1 + norm-clip")
    assert method.name == "FedHist(lam=2.0) + trimmed(share=0.1) + norm-clip"
    outer = method.strategy
    assert isinstance(outer, fh.NormClip) and isinstance(outer.inner, fh.TrimmedMean)
    assert isinstance(outer.inner.inner, fh.FedHist) and outer.inner.share == 0.1
    same = fh.NormClip(fh.TrimmedMean(fh.FedHist(lam=2.0), share=0.1))
    assert as_method(same).name == method.name
    assert as_method("fedprox + median").name == "FedProx + median"
    assert as_method("fedprox + median").objective == fh.Proximal()
    assert as_method("fedavg + krum:attackers=3,keep=5").name == "FedAvg + krum(attackers=3, keep=5)"
    assert set(DEFENCES) == {"norm-clip", "median", "trimmed", "krum"}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("fedhits", "unknown strategy 'fedhits': did you mean 'fedhist'?"),
        ("zzz", "unknown strategy 'zzz': choose from aced, area"),
        ("fedhist:alhpa=1", "unknown option of fedhist 'alhpa': did you mean 'alpha'?"),
        ("fedhist:alpha", "strategy 'fedhist:alpha' cannot be read; write name:key=value"),
        ("fedhist:gamma=7", r"gamma must lie in \[0, 1\], got 7."),
        ("fedhist:gamma=high", "gamma must be a number, got 'high'."),
        ("fedhist:ina=maybe", "ina must be True or False, got 'maybe'."),
        ("fedhist:h=2.5", "h must be a whole number, got 2.5."),
        ("fedhist + medien", "unknown defence, server optimizer or objective 'medien': did you mean 'median'?"),
        ("fedhist + trimmed:share=1", r"share must lie in \[0, 0.5\], got 1."),
        ("fedhist + median:inner=1", "unknown option of median 'inner': there are none."),
        ("refl+adam", r"'refl\+adam' needs spaces around the plus, as in 'refl \+ adam'\."),
        ("adam", r"'adam' goes around a method: write 'fedavg \+ adam'\."),
        ("fedasync + fedbuff", "'fedbuff' is a method by itself; a plus is followed by one of norm-clip, median"),
        ("ace:tau_algo=3", "ace is short for 'aced:tau_algo=none'; write that with options of your own."),
        ("fedavg + momentum:beta=1", "beta must be at least 0 and below 1, got 1."),
        ("port:alpha=0,beta=0", "alpha and beta must not both be 0."),
        ("mifa + median", "MIFA averages what it remembers of clients and not the round's uploads; CoordinateMedian"),
        ("scaffold + fedprox", "SCAFFOLD has clients of its own, which 'fedprox' would replace."),
        ("nowhere:Rule", "cannot be imported: No module named 'nowhere'; run this where it lies, or put its folder on"),
        ("some/rules.py:Rule", "must name a module, as in an import: write some.rules:Rule."),
        ("math:pi", "strategy='math:pi' must name a function or a class, got float."),
        ("os:system:command=ls", "os:system must be a class of its own, derived from fedhist.Strategy."),
        ("pip", "strategy 'pip' is a module; name a class in it, as in pip:Class."),
        ("pip:Rule+adam", r"'pip:Rule\+adam' needs spaces around the plus"),
        ("xml.etree.nowhere:Rule", "No module named 'xml.etree.nowhere'; run this where it lies"),
        ("tests.simulation.broken:Rule", r"cannot be imported: division by zero \(.*broken.py, line 3\)."),
        ("collections:OrderedDict", "collections:OrderedDict must be a class of its own, derived from fedhist.Str"),
        ("ca2fl + median", "CA2FL averages what it remembers of clients and not the round's uploads"),
        ("fedbuff:a=-1", "a must not be negative, got -1."),
        ("fedasync:s=sometimes", "s must be 'polynomial', 'hinge' or 'constant', got 'sometimes'."),
        ("aced:tau_algo=1.5", "tau_algo must be a whole number, got 1.5."),
        ("ca2fl:bits=3", "bits must be 32, 16, 8 or 4, got 3."),
        ("refl + adam:eta=0", "eta must be positive, got 0."),
        ("wkafl:stage_two=a", "stage_two must be a whole number, got 'a'."),
    ],
)
def test_refuses(spec: str, sentence: str) -> None:
    with pytest.raises(fh.InvalidInput, match=sentence):
        as_method(spec)


def test_options_of_ones_own_class_are_checked_by_its_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rule(fh.Strategy):
        def __init__(  # type: ignore[no-untyped-def]
            self, tau: int, share: float = 0.5, name: str | None = None, free=1, some: list[int] | None = None,
            kind: Literal["a", "b"] = "a",
        ) -> None:  # fmt: skip
            super().__init__()
            if tau < 0:
                raise {-1: ValueError, -2: RuntimeError, -3: SystemExit}[tau]("tau must not be negative.")
            self.options = tau, share, name, free, some

        def weights(self, arrivals: fh.Arrivals) -> Tensor:
            return arrivals.staleness

    monkeypatch.setattr(sys.modules[__name__], "Rule", Rule, raising=False)

    def made(options: str) -> Rule:
        return cast(Rule, as_method(f"{__name__}:Rule:{options}").strategy)

    assert made("tau=3,share=1,name=none,free=x,some=[1, 2]").options == (3, 1, None, "x", [1, 2])
    hidden = f"{__name__}:Rule:tau=3,free=4"
    assert as_method(hidden).name == "Rule(tau=3, free=4)"  # none of which it keeps
    for options, sentence in {
        "tau=-1": rf"'{__name__}:Rule:tau=-1': tau must not be negative \(.*test_methods.py, line \d+\)\.",
        "tau=-2": r"tau must not be negative \(.*test_methods.py, line",
        "tau=-3": r"tau must not be negative \(.*test_methods.py, line",
        "tau=-4": r"tau=-4': -4 \(.*test_methods.py, line",
        "tau=3,kind=c": "kind must be 'a' or 'b', got 'c'.",
        "tau=2.5": "tau of Rule must be a whole number, got 2.5.",
        "tau=3,share=high": "share of Rule must be a number, got 'high'.",
        "tau=true": "tau of Rule must be a whole number, got True.",
        "tau=3,name=2": "name of Rule must be a string or none, got 2.",
    }.items():
        with pytest.raises(fh.InvalidInput, match=sentence):
            made(options)


def test_a_setup_that_fails_is_one_sentence(task: fh.Task) -> None:
    class Broken(fh.FedAvg):
        def setup(self, *given: Any, **more: Any) -> Any:
            raise OSError("no table of mine")

    with pytest.raises(
        fh.InvalidInput, match=r"^setup\(\) of Broken failed: no table of mine \(.*test_methods.py, line"
    ):
        fh.simulate(Broken(), task, k=2, rounds=2)


def test_a_class_without_a_rule_is_refused() -> None:
    class Empty(fh.Strategy):
        pass

    with pytest.raises(fh.InvalidInput, match=r"Empty must define weights\(\) or forward\(\)\."):
        as_method(Empty())

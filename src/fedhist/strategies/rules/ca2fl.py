"""CA2FL: cached update calibration (Wang et al., ICLR 2024)."""

from fedhist.strategies.cache import Bits
from fedhist.strategies.rules.fedstale import FedStale


class CA2FL(FedStale):
    """Calibrate uploads by what clients last sent: `u = h̄ + 1/K·Σ (g_i - h_i)`, then `h_i ← g_i`.

    The rule is FedVARP's (Jhunjhunwala et al., UAI 2022), whose rounds are synchronous.

    Parameters
    ----------
    bits
        Bits of a cached value: 32, 16, 8 or 4.
    """

    branch_free = True

    def __init__(self, bits: Bits = 32) -> None:
        super().__init__(beta=1.0, bits=bits)

"""How often a draft stands, from the two distributions that draft and token are drawn from.

    classical   sum_x min(p(x), q(x)) = 1 - TV          a draft drawn from q is kept with probability min(1, p/q)
                                                        (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5;
                                                        Chen et al. 2023, arXiv:2302.01318)
    coupled     sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x))
                                                        both are drawn with the same Gumbel noise, and have to be equal
                                                        (Daliri, Musco and Suresh 2024, arXiv:2408.07978)

No way of drawing makes two tokens equal more often than the classical share. The coupled one is at least
(1 - TV) / (1 + TV), which is classical / (2 - classical), and nobody whose drafts do not change the tokens can promise
more (the same paper).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float64]


class Overlap(NamedTuple):
    """Of one position, how probable it is that its draft stands."""

    classical: float
    """If drafts were accepted with probability min(1, p/q)."""
    coupled: float
    """As they are here: draft and token are drawn with the same noise, and equal."""

    @property
    def at_least(self) -> float:
        """What `coupled` cannot be below, whatever the distributions."""
        return self.classical / (2 - self.classical)


def probabilities(logits: npt.NDArray[np.floating], temperature: float) -> Probabilities:
    """Of each token, as the sampler draws without filters.

    Args:
        logits: [vocab_size]; -inf is a token that is never drawn.
        temperature: 0 gives all to the largest logit, of equal ones the first.

    Returns:
        [vocab_size], which sum to 1.
    """
    wide = logits.astype(np.float64)
    if temperature == 0:
        found = np.zeros_like(wide)
        found[wide.argmax()] = 1.0
        return found
    weights = np.exp((wide - wide.max()) / temperature)
    return weights / weights.sum()


def overlap(p: Probabilities, q: Probabilities) -> Overlap:
    """Both shares; the same whichever of the two is the target's.

    With tokens in the falling order of p/q, the inner sum over y takes p up to x and q behind it, so that sorting is
    all that it costs. That sum: of exponential times E(x)/p(x) and E(x)/q(x), x comes first on both sides if every
    other E(y) is at least E(x) max(p(y)/p(x), q(y)/q(x)).

    Args:
        p: [vocab_size], which sum to 1.
        q: of the same tokens.

    >>> overlap(np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.0, 0.5]))
    Overlap(classical=0.5, coupled=0.3333333333333333)
    """
    both = (p > 0) & (q > 0)
    shared_p, shared_q = p[both], q[both]
    order = np.argsort(np.log(shared_q) - np.log(shared_p))  # the ratio itself may be beyond a float
    shared_p, shared_q = shared_p[order], shared_q[order]
    up_to = np.cumsum(shared_p) + p[q == 0].sum()  # p/q is infinite there: before all others
    behind = np.cumsum(shared_q[::-1])[::-1] - shared_q + q[p == 0].sum()
    with np.errstate(over="ignore"):  # a token that hardly ever comes: 1 / infinity is what it adds
        coupled = 1 / (up_to / shared_p + behind / shared_q)
    return Overlap(float(np.minimum(p, q).sum()), float(coupled.sum()))

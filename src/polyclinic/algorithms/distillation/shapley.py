"""The value of each teacher in an ensemble. L. S. Shapley: A value for n-person games, 1953.

    (1)  φ_i = Σ_{S ∌ i} |S|!·(n − |S| − 1)!/n! · (v(S ∪ {i}) − v(S))
    (2)  v(S) = log C + max_{β ≥ 0} mean_classes mean_images log softmax(β·z̄_S)_y     z̄_S: the mean logits of S
    (3)  w_i = max(φ_i, 0) / Σ_j max(φ_j, 0)                                            if all are 0: 1/n
    (4)  2·m·v(all) > 3.84                             else no teacher is used; m = 1/Σ shares²

(2) is the information of a coalition's mean logits about the label, in nats above a guess among C classes. It uses the
likelihood rather than the accuracy, which has steps of one image while public sets are small; the mean logits, since
these are distilled; the best scale β, since distillation has a temperature of its own and an uninformative teacher
would otherwise gain by softening overconfident ones; and equal weights of classes, so that a constant prediction of the
most frequent class is worth nothing. v(∅) = 0, and a teacher with equal logits for all classes has the value 0.

(4) is the likelihood-ratio test of β = 0 at 5 %, with m the effective number of images. By (3) alone a teacher that is
right by chance, on a few images more than the others, would get the weight 1.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from polyclinic.core import RecipeError

MOST_PLAYERS = 12
"""4,096 coalitions."""
CHANCE = 3.84
"""The 95 % point of χ² with one degree of freedom."""
LARGEST_SCALE = 1e3
"""The largest β in units of 1 / (standard deviation of the logits), beyond which predictions are certain."""


def shapley_values(value: Callable[[frozenset[str]], float], players: Sequence[str]) -> dict[str, float]:
    """Return φ of every player, exactly; `value` is called once for every coalition."""
    if len(players) > MOST_PLAYERS:
        raise RecipeError(
            f"Exact Shapley values of {len(players)} teachers would need {2 ** len(players):,} coalitions; "
            f"take at most {MOST_PLAYERS} teachers, or set finish.shapley: false."
        )
    worth = {coalition: value(coalition) for coalition in _list_coalitions(players)}
    return {player: _player_value(player, players, worth) for player in players}


def shapley_weights(values: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of (3)."""
    positive = {name: max(value, 0.0) for name, value in values.items()}
    total = math.fsum(positive.values())
    return {name: value / total if total > 0 else 1 / len(values) for name, value in positive.items()}


def beats_chance(together: float, labels: Tensor) -> bool:
    """Return (4): whether teachers of joint value `together` predict these labels better than chance."""
    return 2 * together / float(_class_weights(labels).square().sum()) > CHANCE


def coalition_value(logits: Mapping[str, Tensor], labels: Tensor) -> Callable[[frozenset[str]], float]:
    """Return v of (2) as a function of a coalition, for teachers with these logits on the same labelled images."""
    exact = {name: found.detach().double().cpu() for name, found in logits.items()}
    here, shares = labels.cpu(), _class_weights(labels.cpu())

    def value(coalition: frozenset[str]) -> float:
        if not coalition:
            return 0.0
        return likelihood_gain(torch.stack([exact[name] for name in sorted(coalition)]).mean(0), here, shares)

    return value


def likelihood_gain(logits: Tensor, labels: Tensor, shares: Tensor) -> float:
    """Return (2) with images weighted by `shares`. The likelihood is concave in β: its slope has at most one root."""
    from scipy.optimize import brentq  # takes a moment to load

    centred = logits - logits.mean(-1, keepdim=True)
    spread = float(centred.std(correction=0))
    if spread < 1e-12 * max(1.0, float(logits.abs().max())):
        return 0.0  # only rounding errors differ
    scaled = centred / spread
    right = scaled.gather(1, labels[:, None]).squeeze(1)

    def slope(beta: float) -> float:
        return float(shares @ (right - (torch.softmax(beta * scaled, -1) * scaled).sum(-1)))

    if slope(0.0) <= 0:
        return 0.0
    best = LARGEST_SCALE if slope(LARGEST_SCALE) > 0 else brentq(slope, 0.0, LARGEST_SCALE)
    found = torch.log_softmax(best * scaled, -1).gather(1, labels[:, None]).squeeze(1)
    return math.log(logits.shape[1]) + float(shares @ found)  # (2)


def _class_weights(labels: Tensor) -> Tensor:
    """Return the weight of every image in (2), which is equal for all classes together."""
    each = 1 / labels.bincount().double()[labels]
    return each / each.sum()


def _list_coalitions(players: Sequence[str]) -> Iterator[frozenset[str]]:
    return (frozenset(some) for size in range(len(players) + 1) for some in combinations(players, size))


def _player_value(player: str, players: Sequence[str], worth: Mapping[frozenset[str], float]) -> float:
    others = [other for other in players if other != player]
    return math.fsum(
        (worth[coalition | {player}] - worth[coalition]) / (len(players) * math.comb(len(others), len(coalition)))
        for coalition in _list_coalitions(others)
    )  # (1)

"""Tests of what a run was overheard to release: the noised sums of its training jobs, or whole updates."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from polyclinic.analysis.audit.listening import OverheardSum, OverheardUpdate, Recorder, SumName
from polyclinic.analysis.audit.play import CanaryRun
from polyclinic.analysis.audit.result import UPDATES, job_kind
from polyclinic.core import SiteId, Tensors
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.gaussian_tests import (
    GaussianTest,
    Samples,
    check_deviation,
    check_independence,
    check_normality,
    check_rate,
    check_sensitivity,
)
from polyclinic.privacy.one_run_bound import CanaryBound, best_bound, canary_scores
from polyclinic.privacy.plan import PrivacyPlan

MOST_VECTORS, MOST_VALUES = 512, 1_000_000
CANCELLED = 1e-3
"""The noise of a round that is played twice cancels to this many clips."""


def job_spends(plan: PrivacyPlan, site: SiteId) -> list[Spend]:
    """Return what each training job of a round is charged."""
    return list(plan.round_spends(site))[: len(plan.jobs[site])]


def check_weights(run: CanaryRun, heard: Recorder) -> list[GaussianTest]:
    """Test the noise and the sensitivity of every training job that was overheard."""
    found = []
    for number in sorted({name.job for name in heard.blank_sums}):
        blank = {name: each for name, each in heard.blank_sums.items() if name.job == number}
        found += list(_check_noise(run.plan, job_kind(number), blank))
        found += list(_check_movements(run, heard, number))
    vectors = [_to_unit(each.noise) for each in _thin_out(list(heard.blank_sums.values()), MOST_VECTORS)]
    return [*found, check_independence("weights", "noise shared between sums", vectors)]


def _check_noise(plan: PrivacyPlan, kind: str, blank: Mapping[SumName, OverheardSum]) -> Iterator[GaussianTest]:
    """Test the noise of sums without a single image, which is all that they consist of: of all values, and by layer."""
    squares: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, each in blank.items():
        for parameter, (count, total) in each.squares.items():
            squares[parameter] += total / plan.noise_of(name.site) ** 2
            counts[parameter] += count
    yield check_deviation(kind, "noise", sum(squares.values()), sum(counts.values()))
    for parameter in sorted(squares):
        yield check_deviation(kind, f"noise of {parameter}", squares[parameter], counts[parameter])
    values = np.concatenate([_to_unit(each.noise) for each in _thin_out(list(blank.values()), MOST_VECTORS)])
    yield check_normality(kind, values[:MOST_VALUES])


def _check_movements(run: CanaryRun, heard: Recorder, number: int) -> Iterator[GaussianTest]:
    """Test how far members moved sums: a round with images less the same one without, whose noise is the same."""
    spends = {site: job_spends(run.plan, site)[number] for site in run.members}
    moved: dict[Spend, list[Tensor]] = defaultdict(list)
    for name, blank in heard.blank_sums.items():
        if name.job != number or not len(blank.seats):
            continue
        difference = _cancel_noise(heard.sums[name].seats, blank.seats, run.members[name.site])
        if difference is None:
            return
        moved[spends[name.site]].append(difference)
    kind = job_kind(number)
    if moved:
        longest = {spend: torch.cat(parts).numpy() for spend, parts in moved.items()}
        units = np.concatenate([values / spend.group for spend, values in longest.items()])
        yield check_sensitivity(kind, units)
        for spend, values in longest.items():
            yield check_rate(kind, values, spend.group, spend.rate)


def _cancel_noise(noised: Tensor, noise: Tensor, members: Tensor) -> Tensor | None:
    """Return how far members moved a sum, given the noise of the same sum without images; None if it does not cancel.

    If the noise is scaled by what images release (adaptive noise), so are the seats of those who do not take part.
    """
    ours, blank = noised[: len(members)], noise[: len(members)]
    empty = blank[~members]
    scale = (ours[~members] @ empty) / (empty @ empty).clamp(min=1e-30)
    difference = ours - scale * blank
    return difference[members] if float(difference[~members].abs().max()) < CANCELLED else None


def guess_members(run: CanaryRun, heard: Recorder, rounds: int, confidence: float) -> CanaryBound | None:
    """Guess which canaries took part, by all sums of all rounds; None where no canary could be overheard."""
    plan, by_site = run.plan, []
    for site, members in run.members.items():
        scores = _site_scores(plan, site, members, heard)
        if scores:
            by_site.append((scores, members))
    if not by_site:
        return None
    names = [name for name in by_site[0][0] if all(name in scores for scores, _ in by_site)]
    return best_bound(
        {name: torch.cat([scores[name] for scores, _ in by_site]) for name in names},
        torch.cat([members for _, members in by_site]),
        claimed=max(training_epsilon(plan, site, rounds) for site in run.members),
        delta=plan.config.delta,
        confidence=confidence,
    )


def _site_scores(plan: PrivacyPlan, site: SiteId, members: Tensor, heard: Recorder) -> dict[str, Tensor]:
    """Return the scores of one site's canaries, added up over its jobs."""
    total: dict[str, Tensor] = {}
    for number, spend in enumerate(job_spends(plan, site)):
        names = sorted(n for n in heard.sums if n.site == site and n.job == number and len(heard.sums[n].seats))
        if not names:
            continue
        released = torch.stack([heard.sums[name].seats[: len(members)] for name in names])
        per_round = len(names) // len({name.round for name in names})
        for score, values in canary_scores(released, spend.rate, per_round).items():
            total[score] = total[score] + values if score in total else values
    return total


def training_epsilon(plan: PrivacyPlan, site: SiteId, rounds: int) -> float:
    """Return ε of a site's training jobs in the first rounds, for one unit."""
    played = sum(site in cohort for cohort in plan.rounds[:rounds])
    return plan.epsilon_of([spend.repeated(played) for spend in job_spends(plan, site)])


def check_updates(
    plan: PrivacyPlan, updates: Mapping[SiteId, Sequence[OverheardUpdate]], summands: int = 1
) -> list[GaussianTest]:
    """Test the noise on whole updates, less the updates as they should have been clipped (unit site).

    `summands`: the number of sites whose updates must have the noise of the plan together, where they are masked.
    """
    kind, std = UPDATES, plan.noise * plan.config.clip_norm
    by_round = [
        [_residual(each, plan.config.clip_norm) for each in heard if each is not None]
        for heard in zip_longest(*updates.values())
    ]
    sums = [each for number, parts in enumerate(by_round) for each in _add_residuals(parts, summands, number)]
    noises = [_flatten(each) / std for each in sums]
    squares, count = sum(float(np.square(noise).sum()) for noise in noises), sum(map(len, noises))
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for each in sums:
        for name, tensor in each.items():
            by_name[name].append(tensor.flatten())
    layers = [
        check_deviation(kind, f"noise of {name}", float(torch.cat(t).square().sum()) / std**2, sum(map(len, t)))
        for name, t in sorted(by_name.items())
    ]
    kept = [noise[:8192] for noise in _thin_out(noises, MOST_VECTORS)]
    parts = _thin_out([part for parts in by_round for part in parts], MOST_VECTORS)
    alone = [_flatten(part)[:8192] / std for part in parts]
    return [
        check_deviation(kind, "noise", squares, count),
        *layers,
        check_normality(
            kind, np.concatenate([noise / max(float(np.sqrt(np.mean(noise**2))), 1e-30) for noise in kept])
        ),
        check_independence(kind, "noise shared between sites or rounds", alone),
    ]


def _residual(update: OverheardUpdate, clip: float) -> Tensors:
    """Return what left less the update clipped to this length, by (12) of `privacy.transforms.clip`."""
    moved = {name: tensor.double() - update.received[name].double() for name, tensor in update.before.items()}
    length = float(torch.cat([t.flatten() for t in moved.values()]).norm())
    share = update.weight * min(1.0, clip / max(length, 1e-30))
    return {n: update.after[n].double() - update.received[n].double() - t * share for n, t in moved.items()}


def _add_residuals(parts: Sequence[Tensors], summands: int, turn: int) -> Iterator[Tensors]:
    """Yield sums of so many sites' parts of a round, each part in one of them at most; `turn`: where to begin."""
    turned = [parts[(place + turn) % len(parts)] for place in range(len(parts))]
    for first in range(0, len(parts) - summands + 1, summands):
        together = turned[first : first + summands]
        yield {name: torch.stack([part[name] for part in together]).sum(0) for name in together[0]}


def _flatten(tensors: Tensors) -> Samples:
    return np.asarray(torch.cat([tensors[name].flatten() for name in sorted(tensors)]).numpy())


def _to_unit(values: Tensor) -> Samples:
    """Return values divided by their root mean square."""
    return np.asarray((values / values.square().mean().sqrt().clamp(min=1e-30)).numpy())


def _thin_out(items: Sequence, most: int) -> list:  # type: ignore[type-arg]
    """Return up to `most` of the items, evenly spread."""
    return list(items)[:: -(-len(items) // most)] if items else []

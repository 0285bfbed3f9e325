"""Attacks on what leaves besides trained weights: features, means, counts and variances, metrics, whole updates.

The site's own code releases, from data of the attacker's choice: a round that was overheard is run again with the
results of its training jobs as they were, and with others in place of what its `Score` jobs computed of images. With
fresh secrets that shows the noise; with the same secret, and one member elsewhere, how far a member moves what leaves.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyclinic.algorithms.base import WEIGHT_KINDS
from polyclinic.analysis.audit.listening import ListeningRunner
from polyclinic.analysis.audit.result import METRICS, OF_MEMBER, UPDATES
from polyclinic.core import Bundle, Fit, Part, Refused, Score, Stream, Tensors, Update
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.site_runner import SiteRunner, drive_jobs
from polyclinic.privacy.gaussian_tests import (
    GaussianTest,
    check_deviation,
    check_release,
    check_sensitivity,
)
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.privacy.releases import LARGEST_LOSS
from polyclinic.privacy.transforms.noise import largest_weight

REPLAYS, FEW = 200, 24
"""Replays of a release with fresh secrets, which show its noise; fewer of large features, which have many values."""
LARGE = 1 << 20
"""Values of crafted features beyond which they are large."""
TRIALS, ENOUGH, IDLE = 64, 4, 12
"""The most members that are moved, for each tensor; how many of them must have mattered; and after how many that did
not there are no more."""
FAR = 1e4
"""A feature that is longer than any clip."""
ROUNDING = 100.0
"""A movement below so many units in the last place of a release is rounding."""
USUAL_LOSS = 2.0
"""The middle of the losses that adaptive noise lets through."""
BAD = math.exp(-LARGEST_LOSS)
"""The probability of the true class in a bad prediction."""


@dataclass(frozen=True)
class CraftedData:
    """Data of the attacker's choice."""

    quiet: Tensors
    """In which all members are alike, so that what leaves differs by its noise only."""
    mixed: Tensors
    """In which members of one class differ as much as they can."""
    move: Callable[[Tensors, Tensor], Tensors]
    """Takes the members in these rows out of the first class, or out of the data."""
    rows: Tensor
    """The members that may be moved."""
    replays: int = REPLAYS


def check_releases(runner: ListeningRunner, plan: PrivacyPlan) -> list[GaussianTest]:
    """Test every release of a round besides its weights that the plan charges, at one site."""
    if not plan.other_releases:
        return []
    crafted = _craft_data(runner, max(plan.other_releases.values()))
    if crafted is None:
        return []
    replays = [_first_class(_replay(runner, crafted.quiet, _fresh_secret(runner, n))) for n in range(crafted.replays)]
    found = []
    for name in replays[0]:
        charge = next((c for c in plan.other_releases if name.partition("/")[0] == c), next(iter(plan.other_releases)))
        drawn = torch.stack([replay[name].double().flatten() for replay in replays])
        squares, count = float((drawn - drawn.mean(0)).square().sum()), (len(drawn) - 1) * drawn.shape[1]
        reach = _usual_movement(runner, name, crafted, True) or _usual_movement(runner, name, crafted, False)
        if reach > 0:
            what = f"noise of {name}, {OF_MEMBER}"
            found.append(check_release(charge, what, reach, squares, count, plan.other_releases[charge]))
    return found


def _craft_data(runner: ListeningRunner, noise: float) -> CraftedData | None:
    """Return crafted results for the `Score` jobs of the runner's last round; None for jobs that are not known here.

    There are enough members that classes are released although `noise` hides how many they are.
    """
    scores = [result for job, result in runner.visit.results if isinstance(job, Score) and isinstance(result, Mapping)]
    least = 2 * max(256, math.ceil(32 * noise))
    if len(scores) == 1 and scores[0].keys() == {"features", "labels"}:
        features = scores[0]["features"]
        large = 2 * least * features[0].numel() > LARGE
        count = least if large else 2 * least
        labels = torch.arange(count, device=features.device) % 2
        zeros = features.new_zeros(count, *features.shape[1:])
        far = zeros.clone().flatten(1)
        far[:, 0] = torch.where(torch.arange(count, device=features.device) % 4 < 2, FAR, -FAR)
        mixed = {"features": far.view_as(zeros), "labels": labels}
        rows = torch.arange(0, count, 2)
        return CraftedData({"features": zeros, "labels": labels}, mixed, _relabel, rows, FEW if large else REPLAYS)
    if len(scores) == 1 and scores[0].keys() == {"losses"}:
        losses = scores[0]["losses"].new_full((2 * least,), USUAL_LOSS)
        losses[4:] += 0.7 * (1 - 2.0 * (torch.arange(2 * least - 4, device=losses.device) % 2))
        return CraftedData({"losses": losses}, {"losses": losses}, _drop_losses, torch.arange(4))
    return None


def _relabel(data: Tensors, rows: Tensor) -> Tensors:
    labels = data["labels"].clone()
    labels[rows] = 1
    return {**data, "labels": labels}


def _drop_losses(data: Tensors, rows: Tensor) -> Tensors:
    losses = data["losses"].clone()
    losses[rows] = math.nan
    return {**data, "losses": losses}


def _replay(runner: ListeningRunner, scores: Tensors, secret: Stream) -> Tensors:
    """Run the algorithm's last round again, without training; return what leaves besides weights."""
    visit, settings = runner.visit, list[float]()
    fitted = iter([result for job, result in visit.results if isinstance(job, Fit)])

    def answer(job: object, _: int) -> object:
        if not isinstance(job, Fit):
            return scores
        if job.training.private is not None:
            settings.append(job.training.private.noise)
        return next(fitted)

    around = visit.site_round
    work = runner.algorithm.local(around.order.tensors, around.memory, replace(around.site, secret=secret), around.rng)
    update, _ = drive_jobs(work, answer)  # type: ignore[arg-type]
    sent = {
        f"{kind}/{name}": t
        for kind, group in update.tensors.items()
        if kind not in WEIGHT_KINDS
        for name, t in group.items()
    }
    return sent | {
        f"noise of job {number + 1}": torch.tensor([noise], dtype=torch.float64)
        for number, noise in enumerate(settings)
    }


def _first_class(released: Tensors) -> Tensors:
    """Return what belongs to the first class: the first row of a tensor with one row for each."""
    return {name: t[0] if t.ndim and len(t) > 1 else t for name, t in released.items()}


def _fresh_secret(runner: ListeningRunner, attempt: int) -> Stream:
    """Return the secret of the round at a site whose own secret is another."""
    assert runner.limits is not None
    around = runner.visit.site_round
    limits = replace(runner.limits, secret=runner.limits.secret.child("audit", attempt))
    return limits.noise_stream(around.order, around.memory, runner.network.device.type)


def _usual_movement(runner: ListeningRunner, name: str, crafted: CraftedData, paired: bool) -> float:
    """Return how far a member that matters moves what leaves under this name: the root mean square of several.

    `paired`: apart from what the same move does to the quiet data, which is how a noised count scales the noise of a
    mean. A count itself moves there as well, so that it must be measured without.
    """
    order, found = torch.Generator().manual_seed(0), list[float]()

    def content(move: Callable[[Tensors], Tensors], secret: Stream) -> Tensor:
        quiet = move(crafted.quiet) if paired else crafted.quiet
        mixed, noise = (_first_class(_replay(runner, data, secret))[name] for data in (move(crafted.mixed), quiet))
        return mixed - noise

    for trial in range(TRIALS):
        secret = _fresh_secret(runner, -1 - trial)
        noise = _first_class(_replay(runner, crafted.quiet, secret))[name]
        still = content(lambda data: data, secret)
        rounding = ROUNDING * torch.finfo(noise.dtype).eps * float(noise.norm() + still.norm())

        def movement(rows: Tensor, secret: Stream = secret, still: Tensor = still, least: float = rounding) -> float:
            return _distance_of_rows(content(lambda data: crafted.move(data, rows), secret), still, least)

        rows = crafted.rows[torch.randperm(len(crafted.rows), generator=order)]
        found.append(movement(rows[:1]) or _find_movement(movement, rows[: len(rows) // 4]))
        moved = [each for each in found if each > max(found) / 2]
        # Rows that match are moved by whole clips, so that one is enough.
        if len(moved) == (1 if noise.ndim > 1 else ENOUGH) or (not moved and trial >= IDLE):
            break
    return math.sqrt(sum(each**2 for each in moved) / len(moved)) if moved else 0.0


def _find_movement(movement: Callable[[Tensor], float], rows: Tensor) -> float:
    """Return how far one of the members moves what leaves, looking for one that does; 0 if they do not together."""
    if not len(rows) or not movement(rows):
        return 0.0
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if movement(half) else rows[len(rows) // 2 :]
    return movement(rows)


def _distance_of_rows(ours: Tensor, theirs: Tensor, rounding: float) -> float:
    """Return the distance of two releases, 0 up to `rounding`. Of several rows, whose places are drawn by lot, it is
    that of the best match of rows."""
    from scipy.optimize import linear_sum_assignment

    found = float((ours - theirs).norm())
    if found > rounding and ours.ndim > 1:
        costs = torch.cdist(ours.flatten(1), theirs.flatten(1)).square().cpu().numpy()
        found = math.sqrt(costs[linear_sum_assignment(costs)].sum())
    return found if found > rounding else 0.0


def check_metrics(runner: ListeningRunner, plan: PrivacyPlan) -> list[GaussianTest]:
    """Test the counts behind the metrics that a site reports of its validation images."""
    if math.isinf(plan.metrics_noise):
        return []
    count, good, bad = 2 * max(128, math.ceil(32 * plan.metrics_noise)), 1 - BAD, BAD
    right = torch.arange(count) % 2 == 0
    parts: tuple[Part, ...] = ("validation",)

    def report(attempt: int, right: Tensor = right) -> Tensor:
        """Return accuracy and loss as sums that are measured from their middles, with noise of deviation σ in each."""
        table = torch.where(right[:, None], torch.tensor([[good, bad]]), torch.tensor([[bad, good]]))
        predictions = {"probabilities": table, "labels": torch.zeros(count, dtype=torch.int64)}
        around, secret = runner.visit.site_round, _fresh_secret(runner, attempt)
        received = around.order.tensors
        row = runner.report_metrics(received, around.memory, parts, lambda *_: predictions, secret)[0]
        accuracy, loss = (float(row[name] or 0.0) for name in ("accuracy", "loss"))
        sums = 2 * accuracy - 1, 2 * loss / LARGEST_LOSS - 1
        return torch.tensor(sums, dtype=torch.float64) * count * math.sqrt(0.5)

    drawn = torch.stack([report(attempt) for attempt in range(2 * REPLAYS)])
    squares = float((drawn - drawn.mean(0)).square().sum())
    # An image that is predicted badly in place of one that is predicted well: twice as far as one that is taken out.
    worse = right & (torch.arange(count) > 0)
    reach = max(float((report(attempt, worse) - report(attempt)).norm()) / 2 for attempt in range(ENOUGH))
    what, values = f"noise, {OF_MEMBER}", 2 * (len(drawn) - 1)
    return [check_release(METRICS, what, reach, squares, values, plan.metrics_noise)] if reach else []


def check_update_clip(runner: ListeningRunner, plan: PrivacyPlan) -> GaussianTest:
    """Test how far a whole update can move what leaves the site: planted ones, up to a thousand clips long."""
    around, movements = runner.visit.site_round, []
    start = around.order.tensors["model"]
    still = _send_update(runner, start)
    for number, length in enumerate((0.5, 1.0, 10.0, 1000.0)):
        generator = torch.Generator().manual_seed(number)
        steps = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in start.items()}
        norm = float(torch.cat([t.flatten() for t in steps.values()]).norm())
        planted = {n: (t + (steps[n] * (length * plan.config.clip_norm / norm)).to(t)) for n, t in start.items()}
        try:
            sent = _send_update(runner, planted)
        except Refused:
            continue  # more than masks carry
        moved = torch.cat([(sent[n].double() - still[n].double()).flatten() for n in sorted(sent)])
        movements.append(float(moved.norm()) / plan.config.clip_norm)
    return check_sensitivity(UPDATES, np.array(movements))


def _send_update(runner: ListeningRunner, model: Tensors) -> Tensors:
    """Return the model as it leaves the site."""
    around = runner.visit.site_round
    reply = SiteRunner.finish_round(runner, around, Update({"model": model}, around.site.examples), None)
    return runner.read_model(around, reply, model)


def check_server_noise(plan: PrivacyPlan, state: Bundle, secret: Stream) -> GaussianTest:
    """Test the noise that the server adds to the mean of updates (unit site, noise at the server)."""
    sizes = [float(size.examples) for size in plan.site_sizes.values()]
    budget, std = PrivacyBudget(plan, secret), plan.noise * plan.config.clip_norm * largest_weight(sizes)
    squares, count = 0.0, 0
    for round in range(1, REPLAYS + 1):
        after = budget.add_server_noise(round, state, state, sizes)
        for name, tensor in state["model"].items():
            if tensor.is_floating_point():
                squares += float((after["model"][name].double() - tensor.double()).square().sum()) / std**2
                count += tensor.numel()
    return check_deviation(UPDATES, "noise, at the server", squares, count)

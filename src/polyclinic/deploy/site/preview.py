"""What would leave a site in a run, for its people to review before they approve the recipe."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyclinic.deploy.site.participation import Participation, count_bytes
from polyclinic.deploy.site.policy import METRICS, PREDICTIONS, image_report_kinds
from polyclinic.federation.secure_aggregation.cohort import MASKS
from polyclinic.runs.final_evaluation import rounded_bytes
from polyclinic.runs.privacy_record import NOT_MASKED, list_releases

WITHHELD = "stays here"


@dataclass(frozen=True)
class ReleasePreview:
    """One kind of data that would leave the site, for people to review before a run."""

    kind: str
    when: str
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int
    """Each time; 0 if it depends on the request."""
    protection: str
    cluster: str = ""
    epsilon: float | None = None
    """Of the whole run; None without a guarantee."""


def preview_releases(part: Participation) -> list[ReleasePreview]:
    """List everything that would leave the site in rounds and after the last one."""
    setup = part.setup
    words = {
        row.kind: row.protection for row in list_releases(setup.plan, setup.algorithm.exchanges(), setup.transforms)
    }
    cost = setup.plan.epsilon if setup.plan is not None and setup.plan.has_guarantee else None
    optional = {e.kind for e in setup.algorithm.exchanges() if e.optional}
    rows = [
        ReleasePreview(
            kind,
            "in some rounds" if kind in optional else "every round",
            {name: tuple(tensor.shape) for name, tensor in group.items()},
            count_bytes(group),
            words.get(kind, "none"),
            cluster,
            cost,
        )
        for cluster, like in part.update_templates.items()
        for kind, group in like.items()
        if group
    ]
    if image_report_kinds(part.recipe):
        rows.append(ReleasePreview(METRICS, "every evaluated round", {}, 0, words[METRICS], epsilon=cost))
    if part.mask is not None:
        why = "keys and encrypted shares, in which nothing depends on images"
        rows.append(ReleasePreview(MASKS, "every round", {}, 0, why))
    rows += (
        ReleasePreview(name, "every round", {}, 0, "one number that the method needs") for name in sorted(part.scalars)
    )
    return [*rows, *_preview_evaluation(part, cost)]


def _preview_evaluation(part: Participation, cost: float | None) -> Iterator[ReleasePreview]:
    """List what would leave after the last round: scores of the final models, and predictions if they may."""
    tests, privacy, allow = len(part.setup.sites[part.site].test), part.recipe.privacy, part.config.allow
    bare = "" if part.mask is None else NOT_MASKED
    if METRICS not in allow.kinds:
        yield ReleasePreview("final scores", WITHHELD, {}, 0, "allow.kinds in site.yaml does not name metrics")
    elif privacy is not None and privacy.metrics == "suppress":
        why = "the recipe's privacy plan keeps them (privacy.metrics: suppress)"
        yield ReleasePreview("final scores", WITHHELD, {}, 0, why)
    else:
        noised = privacy is not None and privacy.metrics == "count"
        what = "accuracy and loss of test images, from noised counts" if noised else "metrics, intervals and counts"
        why = f"{what}, computed here{bare}"
        yield ReleasePreview("final scores", "after the last round", {}, 0, why, epsilon=cost if noised else None)
    if PREDICTIONS not in allow.kinds:
        yield ReleasePreview(PREDICTIONS, WITHHELD, {}, 0, "allow.kinds in site.yaml does not name predictions")
        return
    if part.config.budget is not None and not part.config.budget.predictions:
        why = "site.yaml has a budget, which predictions would evade"
        yield ReleasePreview(PREDICTIONS, WITHHELD, {}, 0, why)
        return
    classes = len(part.setup.dataset.classes)
    why = (
        f"of {tests} test images by one model, once, in thousandths, each with its label; no plan protects it, and "
        f"the server chooses the weights that they are made with{bare}"
    )
    yield ReleasePreview(PREDICTIONS, "after the last round", {}, rounded_bytes(tests, classes), why)

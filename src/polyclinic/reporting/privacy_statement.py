"""The privacy page of a run: what is claimed, for whom, against whom, and what is not, in words a lawyer can read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from polyclinic.core.contract import Exchange, SiteId
from polyclinic.core.errors import RecipeError
from polyclinic.evaluation.summary import pools_images
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.privacy.accounting import Accountant, Spend, epsilon
from polyclinic.privacy.plan import RELEASED, PrivacyPlan

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "prv")
LIBRARIES = {"pld": "PLD, dp-accounting", "rdp": "RDP, dp-accounting", "prv": "PRV, Opacus"}
UNITS = {
    "image": "one image at a site",
    "patient": "one patient at a site, with all training images of that patient",
    "site": "one site, with everything it holds",
}
CHARGED = ("prototypes", "counts", "features", "means")
"""Kinds that are not trained, but statistics of images."""
PAPER_METRIC = "paper metric, not a guarantee"


def list_releases(plan: PrivacyPlan | None, exchanges: Iterable[Exchange]) -> list[dict[str, str]]:
    """Everything that leaves a site, and what protects it."""
    if plan is None:
        return [
            *({"kind": e.kind, "protection": e.protection.why} for e in exchanges),
            {"kind": "metrics", "protection": "every evaluated round, of the site's validation images; no plan"},
            {"kind": "predictions", "protection": "after the last round, of every image, with its label; no plan"},
        ]
    sent = list(exchanges)
    return [
        *({"kind": e.kind, "protection": _describe_protection(plan, e.kind)} for e in sent),
        *(
            {"kind": k, "protection": _describe_charged(n)}
            for k, n in plan.other_releases.items()
            if k not in {e.kind for e in sent}
        ),
        {"kind": "metrics", "protection": _describe_metrics(plan)},
        {"kind": "predictions", "protection": "read by the simulation itself after the last round; outside the claim"},
        {"kind": "number of images", "protection": "public by assumption"},
    ]


def list_site_releases(
    rows: Iterable[Mapping[str, str]], parts: Iterable[str], sites: Iterable[SiteId], gave: Collection[SiteId]
) -> list[dict[str, str]]:
    """The same of real sites, each of which may keep its predictions of single images back."""
    kept = [site for site in sites if site not in gave]
    told = f"of each image for {', '.join(parts)}, with its label, from {', '.join(gave)}; no plan protects them"
    said = told if gave else "asked for after the last round; no site let them leave"
    said += f"; none came from {', '.join(kept)}" if gave and kept else ""
    return [{**row, **({"protection": said} if row["kind"] == "predictions" else {})} for row in rows]


def _describe_protection(plan: PrivacyPlan, kind: str) -> str:
    wish = plan.config
    if kind == "buffers":
        return "nothing is trained in them: empty, or frozen as they were sent"
    if not plan.has_guarantee:
        return f"noised, but without a guarantee: {plan.no_guarantee_reason}"
    if kind in plan.other_releases:
        return _describe_charged(plan.other_releases[kind])
    if kind in CHARGED:
        return "told with what is named before it, in one release"
    if wish.unit != "site":
        return f"trained by DP-SGD: gradients clipped to {wish.clip:g} each, noise {plan.noise:.4g} × that on their sum"
    if kind not in RELEASED:
        return "none"
    where = "before it leaves the site" if wish.at == "site" else "by the server, to the mean"
    return f"clipped to {wish.clip:g} as a whole, noise {plan.noise:.4g} × that added {where}"


def _describe_charged(noise: float) -> str:
    return f"of every image no more than a fixed length counts (algorithm.clip), noise {noise:g} × that; charged"


def _describe_metrics(plan: PrivacyPlan) -> str:
    if plan.config.metrics == "suppress":
        return "kept at the sites"
    if plan.config.metrics == "open":
        return "told as they are, every evaluated round: NOT protected"
    return f"noised counts (noise {plan.metrics_noise:.4g}), charged to the validation images"


def summarise_privacy(guard: PrivacyBudget, broke: bool, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run has cost, from its ledger."""
    plan, spent = guard.plan, guard.total_spends()
    by_site = {site: plan.epsilon_of(spends) for site, spends in spent.items()}
    return {
        **plan.as_json(),
        "planned": _finite_or_none(plan.epsilon),
        "epsilon": {name: _price_with(plan, spent, name) for name in ACCOUNTANTS},
        "worst_site": _finite_or_none(max(by_site.values(), default=0.0)),
        "sites": {site: _finite_or_none(value) for site, value in by_site.items()},
        "stopped_by_budget": broke,
        "earlier": _finite_or_none(plan.worst_epsilon({})) if plan.earlier else 0.0,
        "largest_group": max(h.largest for h in plan.site_sizes.values()),
        "paper_metric": _paper_metric(plan, rows),
    }


def _price_with(plan: PrivacyPlan, spent: Mapping[SiteId, Iterable[Spend]], accountant: Accountant) -> float | None:
    """None where that accountant cannot price such a run."""
    try:
        return _finite_or_none(plan.worst_epsilon(spent, accountant))
    except (RecipeError, ImportError):
        return None


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _paper_metric(plan: PrivacyPlan, rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Eq. 4 and 5 of the adaptive-noise paper: the mean over a round's sites of each one's ε, summed over rounds."""
    told: dict[int, list[float]] = {}
    for row in rows:
        noise = row.get("scalars", {}).get("noise")
        if noise and row["site"] in plan.jobs:
            spends = [Spend(round_noise_down(noise), s.rate, s.times) for s in plan.jobs[row["site"]]]
            told.setdefault(row["round"], []).append(epsilon(spends, plan.config.delta, "prv"))
    return sum(fmean(values) for values in told.values()) if told else None


def round_noise_down(noise: float) -> float:
    """Two digits behind the point, downwards: most sites then cost the same, none less than it should."""
    return math.floor(noise * 100) / 100


def write_privacy_page(summary: Mapping[str, Any]) -> str:
    """The page, as Markdown."""
    found, kinds = summary.get("privacy"), summary["released"]
    pooled = pools_images(summary)
    body = _statement_without_plan(pooled) if found is None else _statement_with_plan(found, summary, pooled)
    remarks = [f"Note: {remark}." for remark in summary.get("remarks", ())]
    table = ["| what leaves a site | what protects it |", "|---|---|"]
    table += [f"| {row['kind']} | {row['protection']} |" for row in kinds]
    blocks = [f"# Privacy of {summary['name']}", *body, *remarks, "## What is released", "\n".join(table)]
    return "\n\n".join(blocks) + "\n"


def _statement_without_plan(pooled: bool) -> Iterator[str]:
    where = "All images were pooled in one place." if pooled else "Images themselves did not leave their site."
    yield (
        "**Nothing is claimed.** The recipe has no `privacy`, so what is released below may tell about single images, "
        f"and no figure bounds how much. {where}"
    )


def _statement_with_plan(found: Mapping[str, Any], summary: Mapping[str, Any], pooled: bool) -> Iterator[str]:
    yield _describe_claim(found)
    if pooled:
        yield "All images were pooled in one place, which saw them as they are: a yardstick, not a federation."
    yield "\n".join(_plan_table(found, pooled))
    if found["paper_metric"] is not None:
        yield f"Averaged over sites and summed over rounds the cost is {found['paper_metric']:.2f} ({PAPER_METRIC})."
    if found["earlier"]:
        yield f"Earlier runs that share its ledger had cost ε = {round_up(found['earlier'])} by then, which is counted in."
    if found["stopped_by_budget"]:
        yield f"The run stopped after round {summary['rounds']}: the next one would have cost more than was allowed."
    yield "## What it means"
    yield _explain_epsilon(found)
    yield "## What is NOT protected"
    yield "\n".join(f"- {line}" for line in _list_unprotected(found))
    yield "## Audit"
    yield _describe_audit(found)


def round_up(value: float, digits: int = 3) -> str:
    """Rounded up: a cost is never told smaller than it is."""
    if value == 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}"


def _is_guarantee(found: Mapping[str, Any]) -> bool:
    """Whether ε is a guarantee at all."""
    return not found["caveat"] and found["epsilon"][found["accountant"]] is not None


def _describe_claim(found: Mapping[str, Any]) -> str:
    value, audit = found["epsilon"][found["accountant"]], found.get("audit") or {}
    if found["caveat"]:
        why = found["caveat"][0].upper() + found["caveat"][1:]
        return f"**No guarantee.** {why}. The figures below describe the noise, not a protection."
    if value is None:
        return "**No protection.** Without noise ε is infinite."
    if audit.get("refuted"):
        return f"**Do not rely on this run: an audit has refuted its claim** of ε = {round_up(value)}; see below."
    return (
        f"**ε = {round_up(value)} at δ = {round_up(found['delta'], 2)}** for {UNITS[found['unit']]}, over the whole run"
        + (f", for a record that may be at {found['holders']} sites" if found["holders"] > 1 else "")
        + (", against anyone who does not know the run's seed" if found["randomness"] == "seed" else "")
        + "."
    )


def _plan_table(found: Mapping[str, Any], pooled: bool) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    if _is_guarantee(found):
        yield f"| whom it protects | {UNITS[found['unit']]} |"
        yield f"| neighbouring data sets | {_describe_neighbours(found)} |"
        yield f"| who need not be trusted | {_describe_observers(found, pooled)} |"
    if found["unit"] == "patient":
        yield f"| training images of one patient at a site | at most {found['largest_group']}, which is public |"
    yield f"| sampling | {_describe_sampling(found)} |"
    yield f"| clip, noise | {found['clip']:g}, {found['noise']:.4g} × the clip |"
    yield f"| δ | {round_up(found['delta'])} |"
    yield f"| ε of the worst-placed {found['unit']} | {_format_bounds(found)} |"
    if found["worst_site"] is not None and found["unit"] != "site":
        yield f"| ε if it is at one site only | at most {round_up(found['worst_site'])} |"
    wanted = "not limited" if found["wanted"] is None else f"{found['wanted']:g}"
    yield f"| ε that was allowed | {wanted} |"


def _format_bounds(found: Mapping[str, Any]) -> str:
    """That which counts first: each is an upper bound by itself."""
    first = found["accountant"]
    rest = [name for name in found["epsilon"] if name != first and found["epsilon"][name] is not None]
    told = [f"{LIBRARIES[name]}: {round_up(found['epsilon'][name], 4)}" for name in rest]
    best = found["epsilon"][first]
    head = f"{'∞' if best is None else round_up(best, 4)} ({LIBRARIES[first]}), which is what was limited"
    return head + (f"; other bounds on the same: {', '.join(told)}" if told else "")


def _describe_neighbours(found: Mapping[str, Any]) -> str:
    unit = found["unit"]
    if found["neighbours"] == "replace":
        return f"the same but for one {unit} that another takes the place of"
    if unit == "site":
        return (
            "the same, but one site sends back what it received, as if it had no images; that it takes part is public"
        )
    return f"the same with and without one {unit}; how many images a site registered is public"


def _describe_observers(found: Mapping[str, Any], pooled: bool) -> str:
    if pooled:
        return "whoever gets the model; NOT the place where all images lie"
    if found["unit"] == "site" and found["at"] == "server":
        return "whoever gets the models; the SERVER is trusted: it sees every site's clipped update before noise"
    seed = (
        " (not against who knows the seed, from which this simulation drew it)" if found["randomness"] == "seed" else ""
    )
    return (
        "the other sites, whoever gets the models, and the server as long as it follows the plan: noise is added "
        f"before anything leaves the site{seed}"
    )


def _describe_sampling(found: Mapping[str, Any]) -> str:
    if found["unit"] == "site":
        return "sites take part in rounds that anyone may know; no credit is taken for not taking part at random"
    if found["sampling"] == "poisson":
        return "every image joins every step by itself, at random and in secret (Poisson sampling)"
    return "shuffled: every image is seen once an epoch; no credit is taken for chance"


def _explain_epsilon(found: Mapping[str, Any]) -> str:
    if not _is_guarantee(found):
        return "No statement about single people follows from these figures."
    odds = math.exp(min(found["epsilon"][found["accountant"]], 50.0))
    sure = odds / (1 + odds)
    told = f"{math.ceil(sure * 1000) / 10:.1f} % sure" if sure < 0.999 else "practically certain"
    unit = found["unit"]
    question = (
        f"whether one {unit} was in it" if found["neighbours"] != "replace" else f"which of two {unit}s was in it"
    )
    return (
        f"Suppose someone knows everything about the data except {question}, sees all that is released, and thought "
        f"either as likely as the other. Whatever they see, they may be {told} afterwards, never surer (odds of "
        f"{round_up(odds)} to 1), but for rare accidents, whose chance δ = {round_up(found['delta'], 2)} keeps small."
    )


def _list_unprotected(found: Mapping[str, Any]) -> Iterator[str]:
    if not _is_guarantee(found):
        yield "Anything."
    if found["unit"] == "image":
        yield "A patient with several images at a site: each image is protected by itself, not all together."
        yield "A picture that is stored twice: each copy counts as an image (`polyclinic data check` finds copies)."
    if found["unit"] == "site":
        yield (
            "Personal models, where the method has them: what a site keeps for itself is neither clipped nor noised; "
            "whoever is given such a model may find traces of the site's images in it."
        )
    if found["unit"] != "site":
        yield "What is true of many patients alike: that is what the model learns."
    yield "That a site took part, how many training images it has, which classes there are, when it answered."
    if found["metrics"] == "open":
        yield "Metrics of validation images, which sites told as they are (privacy.metrics: open)."
    if found["metrics"] == "count":
        yield "Validation images cost at most the same ε as training images; test images are outside the claim."
    yield (
        "The final evaluation: this simulation reads all validation and test images itself. Accuracy tables are not "
        "noised, and choosing among runs by them is not charged. Each run of a comparison has its own ε, and they add "
        "up for whoever sees all."
    )
    if found["randomness"] == "seed":
        yield (
            "Noise was drawn from the run's seed, so that it can be repeated: whoever knows the seed can remove it. "
            "Publish the model without the seed, or set privacy.randomness: secret."
        )
    yield "Numbers are floating-point and noise is pseudo-random, not cryptographic; a site that lies is not caught."


def _describe_audit(found: Mapping[str, Any]) -> str:
    audit = found.get("audit")
    if not audit:
        if found["unit"] == "site":
            return "This run was not audited: there is no audit of whole sites yet."
        return (
            "This run was not audited. `polyclinic audit DIR`, with this folder, attacks the claim and tells it here."
        )
    return " ".join([f"At {audit['site']}: {audit['verdict']}", audit.get("membership", "")]).strip()


def privacy_line(found: Mapping[str, Any]) -> str:
    """What a finished run has cost in privacy, in a line."""
    if found["caveat"]:
        return "privacy: no guarantee; privacy.md says why"
    value = found["epsilon"][found["accountant"]]
    told = "∞" if value is None else f"{value:.3g}"
    early = "; stopped before it cost more" if found["stopped_by_budget"] else ""
    return f"privacy: ε = {told} per {found['unit']} at δ = {found['delta']:.2g}; see privacy.md{early}"

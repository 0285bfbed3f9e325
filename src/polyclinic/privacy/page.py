"""The privacy page of a run: what is claimed, for whom, against whom, and what is not, in words a lawyer can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from polyclinic.core import Exchange, SiteId
from polyclinic.errors import RecipeError
from polyclinic.privacy.account import Accountant, Spend, epsilon
from polyclinic.privacy.guard import Guard
from polyclinic.privacy.plan import RELEASED, Plan

ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "prv")
LIBRARIES = {"pld": "PLD, dp-accounting", "rdp": "RDP, dp-accounting", "prv": "PRV, Opacus"}
UNITS = {
    "image": "one image at a site",
    "patient": "one patient at a site, with all training images of that patient",
    "site": "one site, with everything it holds",
}
PAPER_METRIC = "paper metric, not a guarantee"


def released(plan: Plan | None, exchanges: Iterable[Exchange]) -> list[dict[str, str]]:
    """Everything that leaves a site, and what protects it."""
    if plan is None:
        return [
            *({"kind": e.kind, "protection": e.protection.why} for e in exchanges),
            {"kind": "metrics", "protection": "every evaluated round, of the site's validation images; no plan"},
            {"kind": "predictions", "protection": "after the last round, of every image, with its label; no plan"},
        ]
    return [
        *({"kind": e.kind, "protection": _protection(plan, e.kind)} for e in exchanges),
        *({"kind": "statistic", "protection": f"clipped, noise {c:g} × its reach, charged"} for c in plan.charges),
        {"kind": "metrics", "protection": _metrics(plan)},
        {"kind": "predictions", "protection": "read by the simulation itself after the last round; outside the claim"},
        {"kind": "number of images", "protection": "public by assumption"},
    ]


def _protection(plan: Plan, kind: str) -> str:
    wish = plan.wish
    if not plan.claims:
        return f"noised, but without a guarantee: {plan.caveat}"
    if wish.unit != "site":
        return f"trained by DP-SGD: gradients clipped to {wish.clip:g} each, noise {plan.noise:.4g} × that on their sum"
    if kind not in RELEASED:
        return "none: empty for networks that this plan allows"
    where = "before it leaves the site" if wish.at == "site" else "by the server, to the mean"
    return f"clipped to {wish.clip:g} as a whole, noise {plan.noise:.4g} × that added {where}"


def _metrics(plan: Plan) -> str:
    if plan.wish.metrics == "suppress":
        return "kept at the sites"
    if plan.wish.metrics == "open":
        return "told as they are, every evaluated round: NOT protected"
    return f"noised counts (noise {plan.metrics_noise:.4g}), charged to the validation images"


def privacy_of(guard: Guard, broke: bool, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run has cost, from its ledger."""
    plan, spent = guard.plan, guard.spent()
    by_site = {site: plan.of_one(spends) for site, spends in spent.items()}
    return {
        **plan.as_json(),
        "planned": _number(plan.epsilon),
        "epsilon": {name: _by(plan, spent, name) for name in ACCOUNTANTS},
        "worst_site": _number(max(by_site.values(), default=0.0)),
        "sites": {site: _number(value) for site, value in by_site.items()},
        "stopped_by_budget": broke,
        "earlier": _number(plan.price(plan.earlier)) if plan.earlier else 0.0,
        "paper_metric": _paper_metric(plan, rows),
    }


def _by(plan: Plan, spent: Mapping[SiteId, Iterable[Spend]], accountant: Accountant) -> float | None:
    """None where that accountant cannot price such a run."""
    try:
        return _number(plan.price(spent, accountant))
    except (RecipeError, ImportError):
        return None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _paper_metric(plan: Plan, rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Eq. 4 and 5 of the adaptive-noise paper: the mean over a round's sites of each one's ε, summed over rounds."""
    told: dict[int, list[float]] = {}
    for row in rows:
        noise = row.get("scalars", {}).get("noise")
        if noise and row["site"] in plan.jobs:
            spends = [Spend(round_to(noise), s.rate, s.times) for s in plan.jobs[row["site"]]]
            told.setdefault(row["round"], []).append(epsilon(spends, plan.wish.delta, "prv"))
    return sum(fmean(values) for values in told.values()) if told else None


def round_to(noise: float) -> float:
    """Two digits behind the point, downwards: most sites then cost the same, none less than it should."""
    return math.floor(noise * 100) / 100


def page(summary: Mapping[str, Any]) -> str:
    """The page, as Markdown."""
    found, kinds = summary.get("privacy"), summary["released"]
    body = _without() if found is None else _with(found, summary)
    table = ["| what leaves a site | what protects it |", "|---|---|"]
    table += [f"| {row['kind']} | {row['protection']} |" for row in kinds]
    return "\n\n".join([f"# Privacy of {summary['name']}", *body, "## What is released", "\n".join(table)]) + "\n"


def _without() -> Iterator[str]:
    yield (
        "**Nothing is claimed.** The recipe has no `privacy`, so what is released below may tell about single images, "
        "and no figure bounds how much. Images themselves did not leave their site."
    )


def _with(found: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[str]:
    if found["caveat"]:
        why = found["caveat"][0].upper() + found["caveat"][1:]
        yield f"**No guarantee.** {why}. The figures below describe the noise, not a protection."
    else:
        yield _claim(found)
    yield "\n".join(_table(found))
    if found["paper_metric"] is not None:
        yield f"Averaged over sites and summed over rounds the cost is {found['paper_metric']:.2f} ({PAPER_METRIC})."
    if found["earlier"]:
        yield f"Earlier runs that share its ledger had cost ε = {found['earlier']:.3g} by then, which is counted in."
    if found["stopped_by_budget"]:
        yield f"The run stopped after round {summary['rounds']}: the next one would have cost more than was allowed."
    yield "## What it means"
    yield _meaning(found)
    yield "## What is NOT protected"
    yield "\n".join(f"- {line}" for line in _not_protected(found))
    yield "## Audit"
    yield _audited(found)


def _claim(found: Mapping[str, Any]) -> str:
    value = found["epsilon"][found["accountant"]]
    if value is None:
        return "**No protection.** Without noise ε is infinite."
    return (
        f"**ε = {value:.3g} at δ = {found['delta']:.2g}** for {UNITS[found['unit']]}, over the whole run"
        + (f", for a record that may be at {found['holders']} sites" if found["holders"] > 1 else "")
        + "."
    )


def _table(found: Mapping[str, Any]) -> Iterator[str]:
    figures = ", ".join(f"{LIBRARIES[k]}: {'–' if v is None else f'{v:.3f}'}" for k, v in found["epsilon"].items())
    yield "| | |"
    yield "|---|---|"
    yield f"| whom it protects | {UNITS[found['unit']]} |"
    yield f"| neighbouring data sets | {_neighbours(found)} |"
    yield f"| who need not be trusted | {_observers(found)} |"
    yield f"| sampling | {_sampling(found)} |"
    yield f"| clip, noise | {found['clip']:g}, {found['noise']:.4g} × the clip |"
    yield f"| δ | {found['delta']:.3g} |"
    yield f"| ε of the worst-placed {found['unit']} | {figures} |"
    if found["worst_site"] is not None and found["unit"] != "site":
        yield f"| ε if it is at one site only | at most {found['worst_site']:.3f} |"
    wanted = "not limited" if found["wanted"] is None else f"{found['wanted']:g}"
    yield f"| ε that was allowed | {wanted} |"


def _neighbours(found: Mapping[str, Any]) -> str:
    if found["neighbours"] == "replace":
        return f"the same but for one {found['unit']}, which is another"
    return f"the same but for one {found['unit']}, which is there or not; how many images a site registered is public"


def _observers(found: Mapping[str, Any]) -> str:
    if found["unit"] == "site" and found["at"] == "server":
        return "whoever gets the models; the SERVER is trusted: it sees every site's clipped update before noise"
    return "the server, the other sites and whoever gets the models: noise is added before anything leaves the site"


def _sampling(found: Mapping[str, Any]) -> str:
    if found["unit"] == "site":
        return "sites take part in rounds that anyone may know; no credit is taken for not taking part at random"
    if found["sampling"] == "poisson":
        return "every image joins every step by itself, at random and in secret (Poisson sampling)"
    return "shuffled: every image is seen once an epoch; no credit is taken for chance"


def _meaning(found: Mapping[str, Any]) -> str:
    value = found["epsilon"][found["accountant"]]
    if found["caveat"] or value is None:
        return "No statement about single people follows from these figures."
    odds = math.exp(min(value, 50.0))
    return (
        f"Suppose someone knows everything about the data except whether one {found['unit']} was in it, sees all that "
        f"is released, and thought it as likely as not. Whatever they see, they may be {odds / (1 + odds):.1%} sure "
        f"afterwards at most (odds of {odds:.3g} to 1), but for a failure of a chance of {found['delta']:.2g} at most."
    )


def _not_protected(found: Mapping[str, Any]) -> Iterator[str]:
    if found["unit"] == "image":
        yield "A patient with several images at a site: each image is protected by itself, not all together."
    if found["unit"] != "site":
        yield "What is true of many patients alike: that is what the model learns. And that a site took part at all."
    yield "How many training images each site has, which classes there are, when it answered and how long it took."
    if found["metrics"] == "open":
        yield "Metrics of validation images, which sites told as they are (privacy.metrics: open)."
    if found["metrics"] == "count":
        yield "Validation images cost at most the same ε as training images; test images are outside the claim."
    yield (
        "The final evaluation: this simulation reads all validation and test images itself. Accuracy tables are not "
        "noised, and choosing among several runs by them is not charged; each run of a comparison has its own ε, and "
        "they add up for whoever sees all."
    )
    if found["randomness"] == "seed":
        yield (
            "Noise was drawn from the run's seed, so that it can be repeated: whoever knows the seed can remove it. "
            "Publish the model without the seed, or set privacy.randomness: secret."
        )
    yield "Numbers are floating-point and noise is pseudo-random, not cryptographic; a site that lies is not caught."


def _audited(found: Mapping[str, Any]) -> str:
    audit = found.get("audit")
    if not audit:
        return "This run was not audited. `polyclinic audit RECIPE` attacks the claim and writes its result here."
    return " ".join([f"At {audit['site']}: {audit['verdict']}", audit.get("membership", "")]).strip()

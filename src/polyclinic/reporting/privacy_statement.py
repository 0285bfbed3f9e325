"""The privacy statement of a run: the claim, its unit, the observers it holds against, and its limits."""

import math
from collections.abc import Iterator

from polyclinic.evaluation.summary import PUBLIC_SEED, PrivacySpent, RunSummary
from polyclinic.privacy.plan import describe_clip, describe_noise
from polyclinic.reporting.blocks import Block, Bullets, Code, Inline, Paragraph, Report, Section, Strong, Table
from polyclinic.reporting.formatting import round_up
from polyclinic.reporting.render_markdown import to_markdown

LIBRARIES = {"pld": "PLD, dp-accounting", "rdp": "RDP, dp-accounting", "prv": "PRV, Opacus"}
UNITS = {
    "image": "one image at a site",
    "patient": "one patient at a site, with all training images of that patient",
    "site": "one site, with everything it holds",
}
PAPER_METRIC = "paper metric, not a guarantee"


def write_privacy_page(summary: RunSummary) -> str:
    """The content of privacy.md."""
    rows = [[row.kind, row.protection] for row in summary.released]
    released = Section("released", "What is released", [Table("", ["what leaves a site", "what protects it"], rows)])
    return to_markdown(Report(f"Privacy of {summary.name}", "", "", [*privacy_sections(summary), released]))


def privacy_sections(summary: RunSummary) -> list[Section]:
    """The statement without the table of what is released."""
    warnings = [Paragraph(f"Note: {warning}.") for warning in summary.warnings]
    privacy = summary.privacy
    if privacy is None:
        where = (
            "All images were pooled in one place." if summary.pooled else "Images themselves did not leave their site."
        )
        words = (
            Strong("Nothing is claimed."),
            " The recipe has no ",
            Code("privacy"),
            f", so what is released below may reveal single images, and no figure bounds how much. {where}",
        )
        return [Section("claim", "", [Paragraph(words), *warnings])]
    return [
        Section("claim", "", list(_claim_blocks(privacy, summary))),
        Section("meaning", "What it means", [Paragraph(_explain_epsilon(privacy))]),
        Section("unprotected", "What is NOT protected", [Bullets(tuple(_list_unprotected(privacy, summary)))]),
        Section("audit", "Audit", [Paragraph(_describe_audit(privacy)), *warnings]),
    ]


def _claim_blocks(privacy: PrivacySpent, summary: RunSummary) -> Iterator[Block]:
    yield Paragraph(_describe_claim(privacy))
    if summary.pooled:
        yield Paragraph(
            "All images were pooled in one place, which saw them as they are: a baseline, not a federation."
        )
    yield Table(f"Privacy of {summary.name}", ["what", "figure"], list(_plan_rows(privacy, summary.pooled)))
    if privacy.paper_metric is not None:
        yield Paragraph(
            f"Averaged over sites and summed over rounds the cost is {privacy.paper_metric:.2f} ({PAPER_METRIC})."
        )
    if privacy.earlier_epsilon:
        yield Paragraph(
            f"Earlier runs on the same ledger had cost ε = {round_up(privacy.earlier_epsilon)} before it, which is "
            "included."
        )
    if privacy.stopped_by_budget:
        yield Paragraph(
            f"The run stopped after round {summary.rounds}: the next one would have cost more than was allowed."
        )


def _describe_claim(privacy: PrivacySpent) -> tuple[Inline, ...]:
    value = privacy.epsilon
    sites, unit = privacy.max_sites_per_record, UNITS[privacy.unit]
    several = f", for a record that may be at {sites} sites" if sites > 1 else ""
    if (reason := privacy.no_guarantee_reason) == PUBLIC_SEED:
        would = "∞" if value is None else round_up(value)
        return (
            f"ε would be {would} at δ = {round_up(privacy.delta, 2)} for {unit}, over the whole run{several}; ",
            Strong(f"no guarantee: {reason}"),
            ", so whoever has the recipe can remove it. Set ",
            Code("privacy.randomness: secret"),
            " for a guarantee.",
        )
    if reason:
        why = f" {reason[0].upper()}{reason[1:]}. The figures below describe the noise, not a protection."
        return Strong("No guarantee."), why
    if value is None:
        return Strong("No protection."), " Without noise ε is infinite."
    if privacy.audit is not None and privacy.audit.refuted:
        refuted = "Do not rely on this run: an audit has refuted its claim"
        return Strong(refuted), f" of ε = {round_up(value)}; see below."
    claim = Strong(f"ε = {round_up(value)} at δ = {round_up(privacy.delta, 2)}")
    declared = (
        f", if nobody has more than {privacy.group} images at a site" if privacy.group and privacy.unnamed else ""
    )
    return claim, f" for {unit}, over the whole run{several}{declared}."


def _plan_rows(privacy: PrivacySpent, pooled: bool) -> Iterator[list[str]]:
    if privacy.has_guarantee:
        yield ["whom it protects", UNITS[privacy.unit]]
        yield ["neighbouring data sets", _describe_neighbours(privacy)]
        yield ["who need not be trusted", _describe_observers(privacy, pooled)]
        if not pooled and not (privacy.unit == "site" and privacy.noise_at == "server"):
            yield ["against a hostile server", _describe_hostile_server(privacy)]
    if privacy.unit == "patient":
        yield ["training images of one patient at a site", _describe_group(privacy)]
    yield ["sampling", _describe_sampling(privacy)]
    noise = describe_noise(privacy.noise, privacy.site_noise)
    yield ["clip, noise", f"{describe_clip(privacy.clip)}; {noise} × that"]
    yield ["δ", round_up(privacy.delta)]
    would = "would-be ε" if privacy.no_guarantee_reason else "ε"
    yield [f"{would} of the worst-placed {privacy.unit}", _format_bounds(privacy)]
    if privacy.worst_site_epsilon is not None and privacy.unit != "site":
        yield [f"{would} if it is at one site only", f"at most {round_up(privacy.worst_site_epsilon)}"]
    yield ["ε that was allowed", "not limited" if privacy.max_epsilon is None else f"{privacy.max_epsilon:g}"]


def _format_bounds(privacy: PrivacySpent) -> str:
    """The bound that was limited first; each is an upper bound by itself."""
    first, best = privacy.accountant, privacy.epsilon
    others = {
        name: value for name, value in privacy.epsilon_by_accountant.items() if name != first and value is not None
    }
    shown = [f"{LIBRARIES[name]}: {round_up(value, 4)}" for name, value in others.items()]
    limited = "" if privacy.max_epsilon is None else ", which is what was limited"
    head = f"{'∞' if best is None else round_up(best, 4)} ({LIBRARIES[first]}){limited}"
    return head + (f"; other bounds on the same: {', '.join(shown)}" if shown else "")


def _describe_neighbours(privacy: PrivacySpent) -> str:
    unit = privacy.unit
    if privacy.neighbours == "replace":
        return f"the same but for one {unit} that is replaced by another"
    if unit == "site":
        return (
            "the same, but one site sends back what it received, as if it had no images; that it takes part is public"
        )
    people = " and patients" if privacy.sampled != "image" else ""
    return f"the same with and without one {unit}; how many images{people} a site registered is public"


def _describe_observers(privacy: PrivacySpent, pooled: bool) -> str:
    if pooled:
        return "whoever gets the model; NOT the place where all images lie"
    if privacy.unit == "site" and privacy.noise_at == "server":
        return "whoever gets the models; the SERVER is trusted: it sees every site's clipped update before noise"
    return (
        "the other sites, whoever gets the models, and a server that follows the plan: noise is added before anything "
        "leaves the site"
    )


def _describe_hostile_server(privacy: PrivacySpent) -> str:
    """Say what holds against a server that does not follow the plan: `deploy/site/privacy_account.py` enforces it."""
    most = "its rounds, once each" if privacy.max_epsilon is None else f"ε = {privacy.max_epsilon:g}"
    return (
        f"real sites add the noise and count the rounds themselves, so this run costs them no more than {most}; all "
        "runs together are bounded at the sites that set a budget in site.yaml, which they enforce themselves; "
        "elsewhere other runs, with other plans or none, add to it if people there approve them"
    )


def _describe_group(privacy: PrivacySpent) -> str:
    at_most = f"at most {privacy.largest_group}, which is public"
    if privacy.unnamed:
        at_most += (
            f"; {privacy.unnamed:,} training images name no patient, so privacy.group: {privacy.group} is declared for "
            "them and not checked, nor is the number of sites that one patient is at"
        )
    if privacy.left_out:
        at_most += f"; {privacy.left_out:,} images beyond privacy.group: {privacy.group} were left out"
    return at_most


def _describe_sampling(privacy: PrivacySpent) -> str:
    if privacy.unit == "site":
        return "sites take part in rounds that anyone may know; no credit is taken for not taking part at random"
    drawn = "by a public seed" if privacy.randomness == "seed" else "at random and in secret"
    if privacy.sampling == "poisson" and privacy.sampled != "image":
        elsewhere = " (where patients are not named, every image)" if privacy.sampled == "either" else ""
        return (
            f"every patient{elsewhere} joins every step by itself, {drawn} (Poisson sampling), with "
            "all training images, whose mean gradient is clipped"
        )
    if privacy.sampling == "poisson":
        return f"every image joins every step by itself, {drawn} (Poisson sampling)"
    return "shuffled: every image is seen once an epoch; no credit is taken for chance"


def _explain_epsilon(privacy: PrivacySpent) -> str:
    if not privacy.has_guarantee:
        return "No statement about single people follows from these figures."
    odds = math.exp(min(privacy.epsilon or 0.0, 50.0))
    sure = odds / (1 + odds)
    certainty = f"{math.ceil(sure * 1000) / 10:.1f} % sure" if sure < 0.999 else "practically certain"
    unit = privacy.unit
    question = f"whether one {unit} was in it" if privacy.neighbours != "replace" else f"which of two {unit}s was in it"
    return (
        f"Suppose someone knows everything about the data except {question}, sees all that is released, and thought "
        f"either as likely as the other. Whatever they see, they may be {certainty} afterwards, never surer (odds of "
        f"{round_up(odds)} to 1), but for rare accidents, whose chance δ = {round_up(privacy.delta, 2)} keeps small."
    )


def _list_unprotected(privacy: PrivacySpent, summary: RunSummary) -> Iterator[Inline | tuple[Inline, ...]]:
    if not privacy.has_guarantee:
        yield "Anything."
    if privacy.unit == "image":
        yield "A patient with several images at a site: each image is protected by itself, not all together."
        copies = "A picture that is stored twice: each copy counts as an image ("
        yield copies, Code("polyclinic data check"), " finds copies)."
    if privacy.unit == "site":
        yield (
            "Personal models, where the method has them: what a site keeps for itself is neither clipped nor noised; "
            "whoever is given such a model may find traces of the site's images in it."
        )
    if privacy.unit != "site":
        yield "What is true of many patients alike: that is what the model learns."
    people = " and patients" if privacy.sampled != "image" else ""
    yield f"That a site took part, how many training images{people} it has, which classes there are, when it answered."
    if privacy.metrics == "open":
        yield "Metrics of validation images, which sites reported without noise (privacy.metrics: open)."
    if privacy.metrics == "count":
        yield (
            "Validation images cost at most the same ε as training images by the metrics that are reported of them. "
            "Predictions of them, where a site lets them leave, are outside the claim, as test images are."
        )
    yield _describe_evaluation(privacy, summary)
    if privacy.randomness == "seed":
        yield (
            "Noise was drawn from the run's seed, so that the run can be repeated: whoever has the recipe can remove "
            "the noise."
        )
    yield (
        "The last bits: numbers are floating-point, and noise, although drawn by a cipher, is rounded as they are; a "
        "site that lies is not caught."
    )


def _describe_evaluation(privacy: PrivacySpent, summary: RunSummary) -> str:
    """What the final evaluation tells of validation and test images."""
    each = "Each run has its own ε, and they add up for whoever sees all."
    if summary.pooled_from == "predictions":
        return (
            "The final evaluation: this simulation reads all validation and test images itself. Accuracy tables are "
            f"not noised, and choosing among runs by them is not charged. {each.replace('run', 'run of a comparison')}"
        )
    if privacy.metrics == "open":
        return f"The final evaluation: sites scored the models at home, and their scores are not noised. {each}"
    beside = "Predictions, where a site let them leave, are not noised and outside the claim."
    if privacy.metrics == "suppress":
        return f"The final evaluation: sites scored the models at home, and no score left them. {beside} {each}"
    return (
        "The final evaluation: sites scored the models at home. Accuracy and loss of test images left them from noised "
        "counts, once, which costs a test image no more than the rounds' metrics cost a validation image, and so at "
        f"most the same ε. {beside} {each}"
    )


def _describe_audit(privacy: PrivacySpent) -> tuple[Inline, ...]:
    audit = privacy.audit
    if audit is not None:
        return (" ".join([audit.verdict, audit.membership or ""]).strip(),)
    return (
        "This run was not audited. ",
        Code("polyclinic audit DIR"),
        ", with this folder, attacks the claim and reports the result here.",
    )


def privacy_line(privacy: PrivacySpent) -> str:
    """The privacy cost of a finished run, in one line."""
    is_seeded = privacy.no_guarantee_reason == PUBLIC_SEED
    if privacy.no_guarantee_reason and not is_seeded:
        return "privacy: no guarantee; privacy.md says why"
    value = "∞" if privacy.epsilon is None else f"{privacy.epsilon:.3g}"
    claim = f"ε {'would be' if is_seeded else '='} {value} per {privacy.unit} at δ = {privacy.delta:.2g}"
    early = "; stopped before it cost more" if privacy.stopped_by_budget else ""
    early += f"; no guarantee: {PUBLIC_SEED}" if is_seeded else ""
    return f"privacy: {claim}; see privacy.md{early}"

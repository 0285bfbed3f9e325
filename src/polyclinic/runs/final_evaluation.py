"""The final evaluation of a run between real sites: what a site tells of the final models, and what the server makes
of it.

A site predicts its own images and scores the predictions at home (`deploy/site/scores.py`). Its answer holds the
scores, or a sentence why they stay; and, only where the site allows it expressly, rounded predictions of its test
images by the one model that the run is judged by. In a simulation predictions never leave the process, and all figures
are computed of them directly.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from polyclinic.core import HELD_OUT, PUBLIC, Bundle, Part, Refused, SiteId, Stream, Tensors
from polyclinic.data.examples import SiteData
from polyclinic.evaluation.assessment import (
    TRANSFER,
    Assessment,
    assess_part,
    assess_site,
    choose_headline,
    choose_model,
    summarise_reports,
)
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rows import MetricRow
from polyclinic.evaluation.site_scores import (
    FinalScores,
    ScoredSite,
    build_final_scores,
    merge_final_scores,
    read_final_scores,
)
from polyclinic.evaluation.summary import MODEL_DESCRIPTIONS, Headline, Metric, PartScores, PooledFrom
from polyclinic.evaluation.task import CLASSIFICATION
from polyclinic.federation.rounds import ReadAnswer
from polyclinic.storage import messages

SCORES, WITHHELD, PREDICTIONS = "scores", "withheld", "predictions"
"""The fields of a site's answer, and the kind of its tensors."""
ROUNDED = 1000
"""Predictions leave as whole thousandths."""
TABLE_BYTES = 1 << 12
LONGEST_REASON = 500


@dataclass(frozen=True)
class SiteAnswer:
    """What one site told of the final models."""

    scores: FinalScores | None
    predictions: Bundle = field(default_factory=dict)
    """Probabilities, labels and patients by `model|test`, of one model; {}: they stayed at the site."""
    withheld: str = ""
    """Why the scores stayed at the site."""


@dataclass(frozen=True)
class CollectedAnswers:
    """What all sites told of the final models."""

    predictions: Mapping[SiteId, Bundle]
    """By site and `model|part`: all in a simulation; between real sites those that were sent, which are rounded."""
    answers: Mapping[SiteId, SiteAnswer] = field(default_factory=dict)
    withheld: Mapping[SiteId, str] = field(default_factory=dict)
    """Real sites that told no scores, and why."""


@dataclass(frozen=True)
class FinalFigures:
    """What the server knows of the final models."""

    assessment: Assessment
    pooled_from: PooledFrom
    """Whence the figures of all sites together come."""
    left_out: int = 0
    """How many sites' scores are not among them, since nobody believes their numbers of images."""

    def choose_headline(self, public: Mapping[str, PartScores], wanted: str | None, sites: int) -> Headline:
        """Return the figures that the run is judged by; without values where all of them stayed at the `sites`."""
        found = self.assessment
        if self.pooled_from == "nothing" and not (wanted == PUBLIC and public):
            return Headline(model="global", part="test", scores=PartScores(n=0, metrics={}))
        headline = choose_headline(found.merged, public, wanted)
        counted = len(found.sites) - self.left_out
        if self.pooled_from in ("scores", "reports") and 0 < counted < sites:
            return headline.model_copy(update={"whose": f"{counted} of {sites} sites"})
        return headline


def round_predictions(found: Tensors) -> Tensors:
    """Return predictions as they may leave a site: of each image the probability of every class but the last, in whole
    thousandths, with its label and a number for its patient."""
    return {
        "thousandths": (found["probabilities"][:, :-1].double() * ROUNDED).round().to(torch.int16),
        "labels": found["labels"],
        "patients": found["patients"],
    }


def rounded_bytes(images: int, classes: int) -> int:
    """Return the bytes of rounded predictions."""
    return images * (2 * (classes - 1) + 16)


def expected_sites(sites: Mapping[SiteId, SiteData], parts: Sequence[Part], classes: int) -> dict[SiteId, ScoredSite]:
    """Return what the server knows of every site whose scores it will read."""
    sizes: dict[SiteId, dict[Part, int]] = {
        site: {"train": len(images.train), "validation": len(images.validation), "test": len(images.test)}
        for site, images in sites.items()
    }
    return {site: ScoredSite(site, sites.keys(), sizes[site], parts, classes) for site in sites}


def read_answer(reply: bytes | messages.Message, expected: ScoredSite) -> ReadAnswer[SiteAnswer]:
    """Decode and check a site's answer; raises `Refused` by name. Whatever was not asked for, or is more than the
    images that the site registered, is refused before it is read."""
    tests = expected.sizes.get("test", 0)
    most = messages.PREFIX.size + messages.MAX_HEADER + TABLE_BYTES + rounded_bytes(tests, expected.classes)
    message = reply if isinstance(reply, messages.Message) else messages.decode(reply, most, TABLE_BYTES)
    if extra := message.tensors.keys() - {PREDICTIONS}:
        raise Refused("kind", f"{min(extra)[:60]!r} was not asked for after the last round")
    predictions = _read_predictions(message.tensors.get(PREDICTIONS, {}), expected)
    told, why = message.fields.get(SCORES), message.fields.get(WITHHELD)
    if told is not None:
        return ReadAnswer(message.fields, SiteAnswer(read_final_scores(told, expected), predictions))
    if not isinstance(why, str) or not why or len(why) > LONGEST_REASON or not why.isprintable():
        raise Refused(SCORES, "the answer holds neither scores nor a reason why they stay at the site")
    return ReadAnswer(message.fields, SiteAnswer(None, predictions, why), "" if predictions else why)


def _read_predictions(tensors: Tensors, expected: ScoredSite) -> Bundle:
    """Check rounded predictions, and return them as probabilities of all classes."""
    if not tensors:
        return {}
    keys = {path.rpartition("|")[0] for path in tensors}
    key = min(keys)
    model, _, part = key.partition("|")
    names = {f"{key}|{column}" for column in ("thousandths", "labels", "patients")}
    if len(keys) > 1 or part != "test" or not model or tensors.keys() != names:
        raise Refused(PREDICTIONS, "these are not the predictions of test images by one model")
    if model not in MODEL_DESCRIPTIONS or model in (HELD_OUT, TRANSFER):
        raise Refused(PREDICTIONS, f"{model[:60]!r} is no model that a run is judged by")
    images = expected.sizes.get("test", 0)
    if not images:
        raise Refused(PREDICTIONS, f"{expected.site} registered no test images")
    rows, labels, patients = (tensors[f"{key}|{column}"] for column in ("thousandths", "labels", "patients"))
    if rows.dtype != torch.int16 or rows.shape != (images, expected.classes - 1):
        raise Refused(
            PREDICTIONS,
            f"{tuple(rows.shape)} numbers of {rows.dtype}, where {images} registered test images have "
            f"{expected.classes - 1} thousandths each",
        )
    if any(column.dtype != torch.int64 or column.shape != (images,) for column in (labels, patients)):
        raise Refused(PREDICTIONS, "there is not one label and one patient for each image")
    if not bool(((labels >= 0) & (labels < expected.classes)).all()):
        raise Refused(PREDICTIONS, f"a label is none of {expected.classes} classes")
    shares = rows.long()
    rest = ROUNDED - shares.sum(1, keepdim=True)
    if not bool((shares >= 0).all()) or not bool((rest >= -expected.classes).all()):
        raise Refused(PREDICTIONS, "the thousandths of an image are negative, or more than a thousand")
    whole = torch.cat([shares, rest.clamp(min=0)], 1).double()
    return {key: {"probabilities": whole / whole.sum(1, keepdim=True), "labels": labels, "patients": patients}}


def assess_answers(
    answers: Mapping[SiteId, SiteAnswer],
    sites: int,
    wanted: str | None,
    resamples: int,
    stream: Stream,
    doubted: Collection[SiteId] = (),
) -> FinalFigures | None:
    """Return the figures of the final models by site, and of all sites together; None if no site told any.

    `sites`: the number of sites that have test images. Only if all of them sent predictions, the figures of all test
    images together are computed of these, rounded as they are; counts still are the sites' own. The scores of a site
    that is `doubted` stand by themselves: nobody believes its number of images, by which they would be weighted.
    """
    told = {site: scores for site, answer in answers.items() if (scores := _known_scores(site, answer, stream))}
    left_out = told.keys() & set(doubted)
    if told.keys() == left_out:
        return None
    merged = merge_final_scores(CLASSIFICATION, told, left_out)
    model = choose_model(merged.merged, "test", wanted)
    sent = [
        CLASSIFICATION.read_predictions(answer.predictions[f"{model}|test"], site)
        for site, answer in answers.items()
        if f"{model}|test" in answer.predictions
    ]
    if model is None or not sent or left_out or len(sent) < sites:
        return FinalFigures(merged, "scores", len(left_out))
    own = merged.merged[model]["test"]
    pooled = assess_part(
        CLASSIFICATION, Predictions.merge(sent), "test", resamples, stream.child("merged").child(f"{model}|test")
    )
    counted = own.metrics if own.details else {}
    metrics = {name: _with_value(found, counted, name) for name, found in pooled.metrics.items()}
    details = own.details or pooled.details
    merged.merged[model]["test"] = pooled.model_copy(update={"metrics": metrics, "details": details})
    return FinalFigures(merged, "rounded predictions")


def assess_reports(rows: Sequence[MetricRow]) -> FinalFigures:
    """Return what the sites last reported on validation images, for runs in which no site tells final scores."""
    found = summarise_reports(CLASSIFICATION, rows)
    return FinalFigures(found, "reports" if found.merged else "nothing")


def find_odd_sites(answers: Mapping[SiteId, SiteAnswer]) -> dict[SiteId, str]:
    """Return the sites that tell of models which most sites do not have, with the reason: one such site would choose
    the model that the run is judged by."""
    told = {site: answer.scores.models.keys() for site, answer in answers.items() if answer.scores is not None}
    counts = Counter(model for models in told.values() for model in models)
    odd = {site: [model for model in models if 2 * counts[model] <= len(told)] for site, models in told.items()}
    return {
        site: f"refused: scores: it tells of the model {models[0]!r:.60}, which most sites do not have"
        for site, models in odd.items()
        if models and len(told) > 1
    }


def merge_predictions(answers: Mapping[SiteId, SiteAnswer]) -> dict[SiteId, Bundle]:
    """Return the rounded predictions of the sites that sent some."""
    return {site: answer.predictions for site, answer in answers.items() if answer.predictions}


def _known_scores(site: SiteId, answer: SiteAnswer, stream: Stream) -> FinalScores | None:
    """Return a site's own scores; of a site that sent predictions alone, what they give."""
    if answer.scores is not None or not answer.predictions:
        return answer.scores
    return build_final_scores(CLASSIFICATION, assess_site(CLASSIFICATION, answer.predictions, site, (), 0, stream))


def _with_value(found: Metric, counted: Mapping[str, Metric], name: str) -> Metric:
    """Return the metric of rounded predictions, with the exact value where counts or means give it."""
    exact = CLASSIFICATION.info(name).pooled_by != "sites" and name in counted
    return found.model_copy(update={"value": counted[name].value}) if exact else found

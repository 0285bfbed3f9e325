"""What a finished run says: metrics per site, merged and personal, with intervals; the gap; drift; cost."""

from __future__ import annotations

import platform
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from polyclinic.core.contract import Bundle, SiteId, Stream, Tensors
from polyclinic.core.errors import DataError
from polyclinic.core.names import HELD_OUT, POOLED, PUBLIC
from polyclinic.evaluation.metrics import METRICS, Predictions, confusion_matrix, finite_or_none, measure
from polyclinic.evaluation.statistics import bootstrap_intervals

CLOSE = 0.01
FEWEST_POINTS = 3
INTERVALS = ("accuracy", "balanced_accuracy", "f1", "auc", "pr_auc")
HEADLINES = ("personal", "student", "ensemble", "global", "transfer", "held-out")
WHOSE = {
    "personal": "each hospital's own model",
    "student": "the server's student",
    "ensemble": "all hospitals' models together",
    "global": "the global model",
    "transfer": "each hospital's model at all others",
    "held-out": "the global model",
}


def assess_predictions(
    predictions: Mapping[SiteId, Bundle], held_out: Predictions | None, resamples: int, stream: Stream
) -> dict[str, Any]:
    """By site and merged: model → part → metrics; test parts with bootstrap intervals and a confusion matrix."""
    found = {site: {k: _to_predictions(t, site) for k, t in groups.items()} for site, groups in predictions.items()}
    for site, groups in found.items():
        groups |= _transfer_predictions(groups, site, found)
    sites = {s: _assess_models(groups, resamples, stream.child(s)) for s, groups in found.items()}
    pools: dict[str, list[Predictions]] = {}
    for groups in found.values():
        for key, value in groups.items():
            pools.setdefault(key, []).append(value)
    merged_groups = {key: Predictions.merge(parts) for key, parts in pools.items()}
    merged = _assess_models(merged_groups, resamples, stream.child("merged"))
    if held_out is not None:
        merged["held-out"] = {"test": _assess_part(held_out, "test", resamples, stream.child("held-out"))}
    return {"sites": sites, "merged": merged}


def summarise_reports(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same where no site lets predictions leave: what sites last told of the model they had received. Over sites
    the figures are means weighted by images, not figures of all images together, and there are no intervals."""
    told = [row for row in rows if row["event"] == "evaluate" and row["site"] != HELD_OUT]
    sites: dict[SiteId, Any] = {}
    pools: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in told:
        if row["round"] == max(other["round"] for other in told):
            figures = {name: row.get(name) for name in METRICS} | {"n": row["n"]}
            sites.setdefault(row["site"], {}).setdefault(row["model"], {})[row["part"]] = figures
            pools.setdefault((row["model"], row["part"]), []).append(figures)
    merged: dict[str, Any] = {}
    for (model, part), each in pools.items():
        merged.setdefault(model, {})[part] = {name: _weighted_mean(name, each) for name in METRICS} | {
            "n": sum(row["n"] for row in each)
        }
    return {"sites": sites, "merged": merged}


def _weighted_mean(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    known = [row for row in rows if row[name] is not None]
    images = sum(row["n"] for row in known)
    return sum(row[name] * row["n"] for row in known) / images if images else None


def _transfer_predictions(
    groups: Mapping[str, Predictions], site: SiteId, sites: Container[SiteId]
) -> dict[str, Predictions]:
    """What models that were trained at other sites say here, together."""
    pools: dict[str, list[Predictions]] = {}
    for key, value in groups.items():
        model, _, part = key.partition("|")
        if model != site and model in sites:
            pools.setdefault(f"transfer|{part}", []).append(value)
    return {key: Predictions.merge(parts) for key, parts in pools.items()}


def _assess_models(groups: Mapping[str, Predictions], resamples: int, stream: Stream) -> dict[str, Any]:
    models: dict[str, Any] = {}
    for key, value in groups.items():
        model, _, part = key.partition("|")
        models.setdefault(model, {})[part] = _assess_part(value, part, resamples, stream.child(key))
    for parts in models.values():
        if "train" in parts and "validation" in parts:
            parts["gap"] = parts["train"]["accuracy"] - parts["validation"]["accuracy"]
    return models


def _assess_part(predictions: Predictions, part: str, resamples: int, stream: Stream) -> dict[str, Any]:
    row: dict[str, Any] = finite_or_none(measure(predictions.probabilities, predictions.labels))
    row["n"] = len(predictions)
    if part == "test":
        row["confusion"] = confusion_matrix(predictions.probabilities, predictions.labels)
        if resamples:
            bounds = bootstrap_intervals(predictions, INTERVALS, stream=stream, resamples=resamples)
            row["intervals"] = {
                name: list(finite_or_none({"low": low, "high": high}).values()) for name, (low, high) in bounds.items()
            }
    return row


def _to_predictions(tensors: Tensors, site: SiteId) -> Predictions:
    patients = tuple(f"{site}:{number}" for number in tensors["patients"].tolist())
    return Predictions(tensors["probabilities"].double().numpy(), tensors["labels"].numpy(), patients)


def choose_headline(
    merged: Mapping[str, Any], public: Mapping[str, Any] | None = None, wanted: str | None = None
) -> tuple[str, dict[str, Any]]:
    """The model a run is judged by, and its metrics on all test images together; without any, on validation images.

    `wanted`: that model, or `public`: the server's own, on the public test images.
    """
    if wanted == PUBLIC and public:
        best = next((name for name in ("student", "global") if name in public), next(iter(public)))
        return PUBLIC, {"part": "test", "of": best, **public[best]}
    for part in ("test", "validation"):
        for model in (wanted, *HEADLINES) if wanted else HEADLINES:
            if part in merged.get(model, {}):
                whose = next((name for name in ("student", "ensemble") if name in merged), "global")
                of = {"of": whose} if model == "held-out" else {}
                return model, {"part": part, **of, **merged[model][part]}
    raise DataError("no site has a test or validation image, so nothing can be reported; raise data.split.test")


def headline_at_site(summary: Mapping[str, Any], site: SiteId) -> dict[str, Any]:
    """A run's headline at one site; empty where the headline is about images of no site."""
    best = summary["headline"]
    found: dict[str, Any] = summary["sites"][site].get(best["model"], {}).get(best["part"], {})
    return found


def describe_test_images(best: Mapping[str, Any]) -> str:
    """What a headline's figures were measured on."""
    if best["model"] in ("held-out", PUBLIC):
        return f"{best['model']} test images"
    return f"{best['part']} images of all hospitals"


def describe_model(best: Mapping[str, Any]) -> str:
    """Whose figures a headline has."""
    model = best.get("of", best["model"])
    return WHOSE.get(model, f"cluster {model}'s model")


def sum_costs(ledger: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes both ways and seconds, over everything the ledger has seen, repeated rounds included."""
    total: dict[str, Any] = {
        "bytes_down": 0,
        "bytes_up": 0,
        "seconds": 0.0,
        "site_seconds": 0.0,
        "refused": 0,
        "failed": 0,
        "withheld": 0,
    }
    for row in ledger:
        total["seconds"] += row.get("seconds", 0.0)
        for note in row["sites"].values() if isinstance(row.get("sites"), dict) else ():
            total["bytes_down"] += note.get("down", 0)
            total["bytes_up"] += note.get("up", 0)
            total["site_seconds"] += note.get("seconds", 0.0)
            if row["event"] == "evaluation":  # no update is lost with a prediction that a site keeps to itself
                total["withheld"] += "outcome" in note
                continue
            total["refused"] += note.get("outcome") == "refused"
            total["failed"] += note.get("outcome") in ("dead", "late", "error")
    return total


def mean_drift(rows: Sequence[Mapping[str, Any]]) -> dict[SiteId, float]:
    """Mean distance ‖w_k − w‖₂ a site's model travelled per round, where it sent one."""
    moved: dict[SiteId, list[float]] = {}
    for row in rows:
        if row["event"] == "train" and row.get("drift") is not None and row["site"] != POOLED:
            moved.setdefault(row["site"], []).append(row["drift"])
    return {site: sum(values) / len(values) for site, values in moved.items()}


def metric_by_cluster(
    rows: Sequence[Mapping[str, Any]], metric: str = "accuracy"
) -> dict[str, list[tuple[int, float]]]:
    """How each cluster fared from round to round: the mean over its validation images, of personal models if any.
    Without clusters all sites are one, called "".

    What a site tells in a round is of the model that it has received, which is that of the round before.
    """
    home = {(row["site"], row["round"] - 1): row.get("cluster", "") for row in rows if row["event"] == "train"}
    told = [row for row in rows if row["event"] == "evaluate" and (row["site"], row["round"]) in home]
    model = "personal" if any(row["model"] == "personal" for row in told) else "global"
    sums: dict[tuple[str, int], list[float]] = {}
    for row in told:
        if row["model"] == model and row["part"] == "validation" and row.get(metric) is not None:
            total = sums.setdefault((home[row["site"], row["round"]], row["round"]), [0.0, 0.0])
            total[0] += row[metric] * row["n"]
            total[1] += row["n"]
    found: dict[str, list[tuple[int, float]]] = {}
    for (cluster, round), (right, count) in sorted(sums.items()):
        found.setdefault(cluster, []).append((round, right / count))
    return found


def forgetting_by_round(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The shares of all training images that each deployment lost ("forgotten") and gained, by the round whose model it
    was; {} where no site told."""
    told = [(row["round"] - 1, row["scalars"]) for row in rows if "forgotten" in row.get("scalars", {})]
    found: dict[str, list[tuple[int, float]]] = {}
    for round in sorted({round for round, _ in told}):
        here = [shares for at, shares in told if at == round]
        cases = sum(shares["cases"] for shares in here)
        for name in ("forgotten", "gained"):
            lost = sum(shares[name] * shares["cases"] for shares in here)
            found.setdefault(name, []).append((round, lost / max(cases, 1)))
    return found


def convergence_round(summary: Mapping[str, Any]) -> int | None:
    """The first round after which accuracy on validation images is within a point of the best there was.

    None where it was measured fewer than three times.
    """
    points = (summary.get("progress") or {}).get("", [])
    if len(points) < FEWEST_POINTS:
        return None
    best = max((accuracy for _, accuracy in points), default=0.0)
    return next((round for round, accuracy in points if accuracy >= best - CLOSE), None)


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("polyclinic", "torchvision", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def pools_images(summary: Mapping[str, Any]) -> bool:
    """Whether all images lay in one place. Runs that are older than the key do not say it of themselves."""
    return bool(summary.get("pooled", summary.get("algorithm") == "centralised"))

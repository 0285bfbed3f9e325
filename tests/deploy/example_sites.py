"""Three hospitals, each with a folder of its own images; and the same images in one table, as a simulation has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polyclinic import Recipe
from polyclinic.algorithms import ALGORITHMS
from polyclinic.config.identity import predicted_parts
from polyclinic.core import PROTOCOL, PolyclinicError, __version__
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.message_checks import read_recipe
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.deploy.site.policy import approve_recipe
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.rounds import Outcome, Rounds
from polyclinic.runs.assemble import round_options
from polyclinic.runs.experiment import Experiment
from polyclinic.runs.final_evaluation import SiteAnswer, expected_sites, read_answer
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.storage import messages
from polyclinic.storage.journal import RamJournal
from tests.federation.mock_engine import MockEngine
from tests.small import NEEDED

SITES = ("harbour", "hill", "lake")
PATIENTS, EACH = 6, 4
"""More than nine in all, so that a patient has another number, and sorts otherwise, in a site's table than in all."""
TABLE = "clinic.csv"
KINDS = {exchange.kind for kind in ALGORITHMS.values() for exchange in kind().exchanges()} | {"metrics", "predictions"}
KINDS |= {name for kind in ALGORITHMS.values() for name in kind.scalars}
EVERYTHING: dict[str, Any] = {
    "algorithms": "all",
    "kinds": sorted(KINDS),
    "seeded_noise": True,
    "least_images": 1,
    "least_sites": 1,
    "runs_per_day": 10_000,
}
"""A policy for tests of something else. Recipes are approved nevertheless, one by one."""
BASE: dict[str, Any] = {
    "name": "law",
    "rounds": 5,
    "data": {
        "name": "table",
        "path": TABLE,
        "size": 8,
        "channels": 1,
        "split": {"train": 0.34, "validation": 0.33, "test": 0.33},
    },
    "model": {"name": "mlp"},
    "algorithm": "fedavg",
    "training": {"batch": 4, "optimiser": {"lr": 0.05}},
    "evaluate": {"bootstrap": 0},
}

CLUSTERS: dict[str, Any] = {
    "clusters": {
        "high": {"min_score": 0.66, "model": "mlp"},
        "medium": {"min_score": 0.33, "model": "cnn_c"},
        "low": {"min_score": 0.0, "model": "linear"},
    },
    "capability": {
        "profiles": {
            site: dict.fromkeys(("cpu", "memory", "battery", "network"), share)
            for site, share in zip(SITES, (0.9, 0.5, 0.1), strict=True)
        }
    },
}
EVERY: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, **NEEDED.get(name, {})} for name, kind in ALGORITHMS.items() if not kind.pooled},
    "pfedcdp in three clusters": {**NEEDED["pfedcdp"], **CLUSTERS},
}
"""What every algorithm asks of a recipe that sites elsewhere can play."""


def recipe(**settings: Any) -> Recipe:
    return Recipe.from_values(BASE, {key.replace("__", "."): value for key, value in settings.items()})


def picture(path: Path, number: int, malignant: bool) -> None:
    pixels = np.random.default_rng(number).integers(0, 200 if malignant else 256, (12, 12), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_hospitals(folder: Path, sites: Sequence[SiteId] = SITES) -> None:
    """A folder and a table for each site, without a word of sites; and one table of all, in `simulation`."""
    everything = ["path,label,site,patient"]
    for place, site in enumerate(sites):
        home = folder / site
        home.mkdir(parents=True)
        rows = ["path,label,patient"]
        for number in range(PATIENTS * EACH):
            label = "malignant" if (number * 7 + place) % 3 else "benign"
            patient = f"{site} patient {number // EACH}"
            picture(home / f"{number}.png", 1000 * place + number, label == "malignant")
            rows.append(f"{number}.png,{label},{patient}")
            everything.append(f"{home / f'{number}.png'},{label},{site},{patient}")
        (home / TABLE).write_text("\n".join(rows) + "\n")
    (folder / "simulation").mkdir()
    (folder / "simulation" / TABLE).write_text("\n".join(everything) + "\n")


def config(folder: Path, site: SiteId, state: str = "state", **settings: Any) -> SiteConfig:
    values = {"allow": EVERYTHING, "data": {TABLE: folder / site / TABLE}, **settings}
    return SiteConfig.model_validate(
        {"federation": "north-sea", "site": site, "folder": folder / site / state, **values}
    )


class ApprovingHandler(SiteMessageHandler):
    """A site whose people approve every recipe as it comes, for tests of something else."""

    def answer_message(self, data: bytes) -> bytes:
        with suppress(PolyclinicError):
            approve(self.config.folder, read_recipe(messages.decode(data).fields, self.site))
        return super().answer_message(data)


def approve(folder: Path, found: Recipe) -> str:
    """Approve a recipe at the site with this folder, as its people do; return the digest."""
    return approve_recipe(folder, found, "a test", "2026-01-01")


def desks(home: Path, state: str, sites: Sequence[SiteId] = SITES, **settings: Any) -> dict[str, SiteMessageHandler]:
    return {site: ApprovingHandler(config(home, site, state, **settings)) for site in sites}


def asked(purpose: str, to: SiteId, found: Recipe, fields: Mapping[str, Any] | None = None) -> bytes:
    common = {"purpose": purpose, "run": "", "site": to, "version": __version__, "protocol": PROTOCOL}
    return messages.encode({**common, "recipe": found.to_yaml(), "seed": found.seed, **(fields or {})}, {})


def said(reply: bytes) -> dict[str, Any]:
    return dict(messages.decode(reply).fields)


def refusal(fields: dict[str, Any]) -> str:
    assert fields["failure"] in ("refused", "error"), fields
    return str(fields["why"])


def beginning(made: Experiment, to: SiteId, fields: Mapping[str, Any] | None = None) -> bytes:
    """The `begin` of an experiment to a site."""
    plan, consortium = made.setup.plan, made.setup.dataset
    priced = plan and {
        "noise": plan.noise,
        "site_noise": dict(plan.site_noise),
        "metrics_noise": plan.as_json()["metrics_noise"],
        "holders": plan.max_sites_per_record,
    }
    shape = {"classes": list(consortium.classes), "channels": consortium.channels, "size": consortium.size}
    shape |= {"sites": list(consortium.sites)}
    return asked("begin", to, made.recipe, {"run": made.run_id(), "plan": priced, **shape, **(fields or {})})


@dataclass
class Crossing:
    """An engine's other end: desks that answer, and all that was said."""

    desks: Mapping[SiteId, SiteMessageHandler]
    sent: list[tuple[SiteId, bytes]] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)

    def answer(self, site: SiteId, data: bytes) -> bytes | Failure:
        reply = self.desks[site].answer_message(data)
        self.sent.append((site, data))
        self.replies.append(reply)
        fields = said(reply)
        return Failure(fields["failure"], fields["why"]) if "failure" in fields else reply


def loop(made: Experiment, crossing: Crossing) -> Rounds:
    """The server's rounds, with desks for sites."""
    plan = made.setup.plan
    guard = PrivacyBudget(plan, made.secret.child("server")) if plan else None
    rules, engine = round_options(made.recipe, made.run_id()), MockEngine(crossing.answer)
    return Rounds(
        made.setup.federation,
        made.setup.algorithm,
        engine,
        rules,
        RamJournal(),
        transforms=list(made.setup.transforms),
        budget=guard,
        server_trainer=made.server_trainer,
    )


def simulation(found: Recipe, folder: Path) -> Experiment:
    """The recipe with all images in one place, which are loaded once for all recipes that mean the same."""
    return Experiment(found, dataset=_gathered(found.data.model_dump_json(), found.seed, folder))


@cache
def _gathered(data: str, seed: int, folder: Path) -> FederatedDataset:
    return load_sites(Recipe.from_values({**BASE, "data": json.loads(data), "seed": seed}), folder / "simulation")


def answers_of(found: Recipe, folder: Path, rounds: Rounds, outcome: Outcome) -> dict[SiteId, SiteAnswer]:
    """What every site tells of the final models."""
    parts = predicted_parts(found)
    expected = expected_sites(simulation(found, folder).setup.sites, parts, len(rounds.federation.classes))
    return rounds.evaluate_sites(outcome, parts, lambda site, reply: read_answer(reply, expected[site]))


def deployed(found: Recipe, folder: Path, crossing: Crossing) -> tuple[Rounds, Outcome]:
    """The recipe played between desks."""
    made = simulation(found, folder)
    for site in made.setup.dataset.sites:
        begun = said(crossing.desks[site].answer_message(beginning(made, site)))
        assert begun.get("ready") is True, begun
    rounds = loop(made, crossing)
    return rounds, rounds.play_all()

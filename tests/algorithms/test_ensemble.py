"""All hospitals' models together: the mean of what they say, beside training that does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.algorithms.wrappers.ensemble import models_by_site, without_ensemble
from polyclinic.core.errors import RecipeError
from polyclinic.core.types import Bundle
from polyclinic.evaluation.rows import TrainRow
from polyclinic.runs.experiment import Experiment, run
from polyclinic.runs.result import RunResult
from polyclinic.storage.run_folder import RunFolder
from polyclinic.training.network import LiveNetwork
from tests.small import SITES, WEIGHTS, tiny


def together(**settings: Any) -> RunResult:
    return run(tiny(ensemble=True, **settings))


@pytest.mark.parametrize("engine", ["local", "stacked"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedmp"])
def test_training_is_that_of_the_algorithm_bit_for_bit(algorithm: str, engine: str) -> None:
    plain, found = (run(tiny(algorithm=algorithm, ensemble=on, engine__name=engine)) for on in (False, True))
    assert without_ensemble(found.state).keys() == plain.state.keys()
    for kind, group in plain.state.items():
        assert all(torch.equal(tensor, found.state[kind][name]) for name, tensor in group.items())


def test_the_mean_of_the_members_is_the_global_model_of_a_linear_network() -> None:
    """Of their weights; and each is its site's own."""
    found = together(training__weights="uniform")
    members = models_by_site(found.state)
    assert set(members) == set(SITES)
    for name, tensor in found.state["model"].items():
        torch.testing.assert_close(torch.stack([m["model"][name] for m in members.values()]).mean(0), tensor)
    one, other, _ = members.values()
    assert not torch.equal(one["model"]["head.weight"], other["model"]["head.weight"])


def test_it_predicts_with_the_mean_of_probabilities() -> None:
    experiment = Experiment(tiny(ensemble=True), None)
    found = experiment.run()
    network = experiment.setup.networks.first

    def said(model: Bundle, live: LiveNetwork = network) -> torch.Tensor:
        return torch.cat([torch.softmax(live(model, images), -1) for images, _ in seen])

    seen = [site.test.batch(torch.arange(len(site.test))) for site in experiment.setup.sites.values()]
    labels = torch.cat([labels for _, labels in seen])
    with torch.no_grad():
        mean = torch.stack([said(model) for model in models_by_site(found.state).values()]).mean(0)
    assert found.summary.headline.model == "ensemble"
    right = (mean.argmax(1) == labels).double().mean()
    assert found.summary.headline.scores.value("accuracy") == pytest.approx(float(right))
    loss = -mean.gather(1, labels[:, None]).log().mean()
    assert found.summary.headline.scores.value("loss") == pytest.approx(float(loss), rel=1e-5)


def test_that_every_site_is_sent_every_model_is_counted() -> None:
    plain, found = (run(tiny(ensemble=on)).summary.cost for on in (False, True))
    extra = found.bytes_down - plain.bytes_down
    models = len(SITES) ** 2 * WEIGHTS * 4
    assert models < extra < 1.1 * models + 4096


@pytest.mark.parametrize("algorithm", ["local", "fedper", "centralised"])
def test_without_whole_models_there_is_no_ensemble(algorithm: str) -> None:
    with pytest.raises(RecipeError, match=r"no site hands in a whole model .*ensemble: false"):
        together(algorithm=algorithm)


def test_what_cannot_be_is_said_before_anything_trains() -> None:
    with pytest.raises(RecipeError, match=r"headline is ensemble, but the run has no ensemble; add `ensemble: true`"):
        tiny(evaluate__headline="ensemble")
    clusters = {"all": {"min_score": 0, "model": "linear"}}
    with pytest.raises(RecipeError, match=r"one network for all sites' models; set clusters: \{\}"):
        tiny(ensemble=True, clusters=clusters)


@pytest.mark.parametrize("cohort", [None, 2])
def test_members_survive_a_snapshot_and_do_not_travel_before_the_end(tmp_path: Path, cohort: int | None) -> None:
    """Ended again from the last snapshot, and gone on with from one in the middle."""
    recipe = tiny(ensemble=True, rounds=4, cohort=cohort)
    whole = run(recipe, tmp_path / "run").summary
    (tmp_path / "run" / "result.json").unlink()
    again = run(recipe, tmp_path / "run").summary
    assert again.headline == whole.headline
    run(tiny(ensemble=True, rounds=4, cohort=cohort), tmp_path / "other")
    (tmp_path / "other" / "result.json").unlink()
    newest = max((tmp_path / "other" / "snapshots").iterdir())
    newest.unlink()  # as if killed in the last round
    resumed = run(recipe, tmp_path / "other").summary
    assert resumed.headline == whole.headline
    sizes = {row.down for row in RunFolder(tmp_path / "other").metrics() if isinstance(row, TrainRow)}
    assert max(sizes) < 2 * min(sizes)

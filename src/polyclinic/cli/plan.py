"""What privacy costs, before anything is trained: `polyclinic plan`."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.cli.common import Data, Json, Seed, Settings, find_recipe, out, parse_settings, print_json
from polyclinic.cli.display import plan_line
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import RecipeError
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.reporting.privacy_statement import UNITS
from polyclinic.runs.experiment import Experiment, FederatedDataset, load_sites


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one of ours.")],
    settings: Settings = None,
    data: Data = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """What a recipe's privacy will cost, site by site, before anything is trained."""
    whole = Recipe.load(find_recipe(recipe), parse_settings(settings, seed=seed))
    methods = {name: whole.method_recipe(name) for name in whole.methods} or {whole.name: whole}
    gathered: dict[str, FederatedDataset] = {}
    plans = {}
    for name, one in methods.items():
        data_of = one.data.model_dump_json()
        gathered[data_of] = gathered.get(data_of) or load_sites(one, data)
        plans[name] = Experiment(one, None, data, dataset=gathered[data_of]).plan
    known = {name: found for name, found in plans.items() if found is not None}
    if not known:
        raise RecipeError(f"{whole.name} has no privacy plan; add for example `privacy: {{epsilon: 3}}`")
    if as_json:
        print_json({name: plan_lines(found) for name, found in known.items()})
        return
    for name, found in known.items():
        out.print(Text(f"{name}\n  {plan_line({'epsilon': found.epsilon, **found.as_json()})}"))
        out.print(_plan_table(found))


def plan_lines(plan: PrivacyPlan) -> dict[str, Any]:
    by_site = {site: plan.epsilon_of(spends) for site, spends in plan.run_spends().items()}
    sites = {site: value if math.isfinite(value) else None for site, value in by_site.items()}
    return {**plan.as_json(), "epsilon": plan.epsilon if math.isfinite(plan.epsilon) else None, "sites": sites}


def _plan_table(plan: PrivacyPlan) -> Table:
    """The dearest sites."""
    whole = plan.run_spends()
    cost = sorted((-plan.epsilon_of(spends), site) for site, spends in whole.items())
    table = Table(box=None, padding=(0, 1))
    for name in ("site", "rounds", "images", "releases", "ε of this site alone"):
        table.add_column(name, justify="left" if name == "site" else "right")
    for negative, site in cost[:10]:
        rounds, steps = sum(site in cohort for cohort in plan.rounds), sum(spend.times for spend in whole[site])
        cells = [site, str(rounds), f"{plan.site_sizes[site].examples:,}", f"{steps:,}", f"{-negative:.3f}"]
        table.add_row(*map(Text, cells))
    more = f"; {len(cost) - 10} more sites cost less" if len(cost) > 10 else ""
    where = (
        ""
        if plan.config.unit == "site"
        else f"; it may be at {plan.max_sites_per_record} site{'s' * (plan.max_sites_per_record > 1)}"
    )
    charges = "".join(f"; {kind} each round, noise {noise:g}" for kind, noise in plan.other_releases.items())
    counts = "" if math.isinf(plan.metrics_noise) else f"; validation counts, noise {plan.metrics_noise:.3g}"
    table.caption = Text(f"protects {UNITS[plan.config.unit]}{where}{charges}{counts}{more}")
    return table

"""What privacy costs, before anything is trained: `polyclinic plan`."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.cli.common import Data, Json, Seed, Settings, find_recipe, out, parse_settings, print_json
from polyclinic.cli.display import promise
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import RecipeError
from polyclinic.privacy.plan import Plan
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
    methods = {name: whole.method(name) for name in whole.methods} or {whole.name: whole}
    gathered: dict[str, FederatedDataset] = {}
    plans = {}
    for name, one in methods.items():
        data_of = one.data.model_dump_json()
        gathered[data_of] = gathered.get(data_of) or load_sites(one, data)
        plans[name] = Experiment(one, None, data, consortium=gathered[data_of]).plan
    known = {name: found for name, found in plans.items() if found is not None}
    if not known:
        raise RecipeError(f"{whole.name} has no privacy plan; add for example `privacy: {{epsilon: 3}}`")
    if as_json:
        print_json({name: priced(found) for name, found in known.items()})
        return
    for name, found in known.items():
        out.print(Text(f"{name}\n  {promise({'epsilon': found.epsilon, **found.as_json()})}"))
        out.print(_table(found))


def priced(plan: Plan) -> dict[str, Any]:
    by_site = {site: plan.of_one(spends) for site, spends in plan.whole().items()}
    sites = {site: value if math.isfinite(value) else None for site, value in by_site.items()}
    return {**plan.as_json(), "epsilon": plan.epsilon if math.isfinite(plan.epsilon) else None, "sites": sites}


def _table(plan: Plan) -> Table:
    """The dearest sites."""
    whole = plan.whole()
    cost = sorted((-plan.of_one(spends), site) for site, spends in whole.items())
    table = Table(box=None, padding=(0, 1))
    for name in ("site", "rounds", "images", "releases", "ε of this site alone"):
        table.add_column(name, justify="left" if name == "site" else "right")
    for negative, site in cost[:10]:
        rounds, steps = sum(site in cohort for cohort in plan.rounds), sum(spend.times for spend in whole[site])
        cells = [site, str(rounds), f"{plan.holdings[site].examples:,}", f"{steps:,}", f"{-negative:.3f}"]
        table.add_row(*map(Text, cells))
    more = f"; {len(cost) - 10} more sites cost less" if len(cost) > 10 else ""
    where = "" if plan.wish.unit == "site" else f"; it may be at {plan.holders} site{'s' * (plan.holders > 1)}"
    charges = "".join(f"; {kind} each round, noise {noise:g}" for kind, noise in plan.charges.items())
    counts = "" if math.isinf(plan.metrics_noise) else f"; validation counts, noise {plan.metrics_noise:.3g}"
    table.caption = Text(f"protects {UNITS[plan.wish.unit]}{where}{charges}{counts}{more}")
    return table

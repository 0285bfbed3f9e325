"""The registry of algorithms. To add one, write its file and add its line to the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyclinic.core import Registry

if TYPE_CHECKING:
    from polyclinic.algorithms.base import Algorithm

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "polyclinic.algorithms",
    {
        "fedavg": "optimisation.fedavg:FedAvg",
        "fedsgd": "optimisation.fedsgd:FedSGD",
        "fedprox": "optimisation.fedprox:FedProx",
        "scaffold": "optimisation.scaffold:Scaffold",
        "fednova": "optimisation.fednova:FedNova",
        "fedcycle": "optimisation.fedcycle:FedCycle",
        "adaptive-noise": "optimisation.adaptive_noise:AdaptiveNoise",
        "fedper": "personalisation.fedper:FedPer",
        "fedbn": "personalisation.fedbn:FedBN",
        "moon": "representation.moon:Moon",
        "elastic": "optimisation.elastic:Elastic",
        "fedmp": "representation.fedmp:FedMP",
        "fedmr": "representation.fedmr:FedMR",
        "fraug": "representation.fraug:FRAug",
        "fed-align": "representation.fed_align:FedAlign",
        "pfedcdp": "personalisation.pfedcdp:PFedCDP",
        "local": "baselines.local:Local",
        "single": "baselines.one_shot:OneShot",
        "centralised": "baselines.centralised:Centralised",
        "cross-site": "baselines.cross_site:CrossSite",
    },
)
register_algorithm = ALGORITHMS.register
describe_algorithms = ALGORITHMS.describe

__all__ = ["ALGORITHMS", "describe_algorithms", "register_algorithm"]

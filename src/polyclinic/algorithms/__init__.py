"""The methods, one file each. Adding one: write its file, add its line here."""

from __future__ import annotations

from polyclinic.algorithms.base import Averaging, RunningMean
from polyclinic.algorithms.baselines.centralised import Centralised
from polyclinic.algorithms.baselines.cross_site import CrossSite
from polyclinic.algorithms.baselines.local import Local
from polyclinic.algorithms.baselines.one_shot import OneShot
from polyclinic.algorithms.optimisation.adaptive_noise import AdaptiveNoise
from polyclinic.algorithms.optimisation.elastic import Elastic
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fedcycle import FedCycle
from polyclinic.algorithms.optimisation.fednova import FedNova
from polyclinic.algorithms.optimisation.fedprox import FedProx
from polyclinic.algorithms.optimisation.fedsgd import FedSGD
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.algorithms.personalisation.fedbn import FedBN
from polyclinic.algorithms.personalisation.fedper import FedPer
from polyclinic.algorithms.personalisation.pfedcdp import PFedCDP
from polyclinic.algorithms.representation.fed_align import FedAlign
from polyclinic.algorithms.representation.fedmp import FedMP
from polyclinic.algorithms.representation.fedmr import FedMR
from polyclinic.algorithms.representation.fraug import FRAug
from polyclinic.algorithms.representation.moon import Moon

ALGORITHMS: dict[str, type[Averaging]] = {
    "fedavg": FedAvg,
    "fedsgd": FedSGD,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "fedcycle": FedCycle,
    "adaptive-noise": AdaptiveNoise,
    "fedper": FedPer,
    "fedbn": FedBN,
    "moon": Moon,
    "elastic": Elastic,
    "fedmp": FedMP,
    "fedmr": FedMR,
    "fraug": FRAug,
    "fed-align": FedAlign,
    "pfedcdp": PFedCDP,
    "local": Local,
    "single": OneShot,
    "centralised": Centralised,
    "cross-site": CrossSite,
}

__all__ = ["ALGORITHMS", "Averaging", "RunningMean"]

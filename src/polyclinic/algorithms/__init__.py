"""The methods, one file each. Adding one: write its file, add its line here."""

from __future__ import annotations

from polyclinic.algorithms.adaptive_noise import AdaptiveNoise
from polyclinic.algorithms.averaging import Averaging, RunningMean
from polyclinic.algorithms.centralised import Centralised
from polyclinic.algorithms.crosssite import CrossSite
from polyclinic.algorithms.elastic import Elastic
from polyclinic.algorithms.fed_align import FedAlign
from polyclinic.algorithms.fedavg import FedAvg
from polyclinic.algorithms.fedbn import FedBN
from polyclinic.algorithms.fedcycle import FedCycle
from polyclinic.algorithms.fedmp import FedMP
from polyclinic.algorithms.fedmr import FedMR
from polyclinic.algorithms.fednova import FedNova
from polyclinic.algorithms.fedper import FedPer
from polyclinic.algorithms.fedprox import FedProx
from polyclinic.algorithms.fedsgd import FedSGD
from polyclinic.algorithms.fraug import FRAug
from polyclinic.algorithms.local import Local
from polyclinic.algorithms.moon import Moon
from polyclinic.algorithms.pfedcdp import PFedCDP
from polyclinic.algorithms.scaffold import Scaffold
from polyclinic.algorithms.single import Single

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
    "single": Single,
    "centralised": Centralised,
    "cross-site": CrossSite,
}

__all__ = ["ALGORITHMS", "Averaging", "RunningMean"]

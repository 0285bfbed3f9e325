"""After the last round: what the server makes of the models it has, with a labelled public set of its own.

Knows nothing of rounds or sites; teachers may come from any algorithm.
"""

from polyclinic.algorithms.distillation.losses import Teacher, contrastive
from polyclinic.algorithms.distillation.refine import FEDDF, Refine, Refined, check_public, problems, refine

__all__ = [
    "FEDDF",
    "Refine",
    "Refined",
    "Teacher",
    "check_public",
    "contrastive",
    "problems",
    "refine",
]

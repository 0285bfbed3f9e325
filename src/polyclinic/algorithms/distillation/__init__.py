"""Distillation after the last round: the server trains a student from its models on a labelled public set.

Teachers may come from any algorithm.
"""

from polyclinic.algorithms.distillation.losses import Teacher, supcon_loss
from polyclinic.algorithms.distillation.refine import (
    FEDDF,
    RefinementOptions,
    RefinementResult,
    check_public,
    refine_student,
)

__all__ = [
    "FEDDF",
    "RefinementOptions",
    "RefinementResult",
    "Teacher",
    "check_public",
    "refine_student",
    "supcon_loss",
]

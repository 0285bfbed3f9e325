"""After the last round: what the server makes of the models it has, with a labelled public set of its own.

Knows nothing of rounds or sites; teachers may come from any algorithm.
"""

from polyclinic.algorithms.distillation.losses import Teacher, contrastive_loss
from polyclinic.algorithms.distillation.refine import (
    FEDDF,
    RefinementOptions,
    RefinementResult,
    check_public,
    find_option_problems,
    refine_student,
)

__all__ = [
    "FEDDF",
    "RefinementOptions",
    "RefinementResult",
    "Teacher",
    "check_public",
    "contrastive_loss",
    "find_option_problems",
    "refine_student",
]

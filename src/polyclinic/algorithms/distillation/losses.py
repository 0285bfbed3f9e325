"""Losses of a student: distillation from teachers, and contrast between images of different classes.

N. S. Shadin, X. Zhang, J. Wang, M. Pan: Heterogeneity-aware private personalized federated learning for medical
imaging via contrastive distillation (PFedCDP), section III; P. Khosla et al.: Supervised contrastive learning,
NeurIPS 2020.

     (7)  ỹ_student = softmax(z_student / T)
     (8)  ỹ_teacher = softmax(z_teacher / T)
    (10)  L_KD = KL(ỹ_teacher ‖ ỹ_student)          the mean over a batch, times T²: training.losses.softened_kl
    (17)  L_i = −1/|P(i)| · Σ_{j∈P(i)} log( exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ) )

P(i): the other embeddings of i's class among the 2N of a batch, of which there are 2N_y − 1; all z have length 1.

Departures: (17) is summed over the batch as printed and averaged here, as in the code of both papers: a sum would grow
with the batch, unlike (10), and change the balance of the two. Anchors without positives, which cannot occur with two
views of each image, are left out.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyclinic.core import Bundle
from polyclinic.training.network import LiveNetwork, move_bundle


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained network. Several teachers may share one `network`, even with a student, with different weights."""

    name: str
    network: LiveNetwork
    weights: Bundle

    def on_device(self) -> "Teacher":
        """Return the teacher with its weights on its network's device, so that calls do not copy them."""
        return replace(self, weights=move_bundle(self.weights, self.network.device))

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        self.network.set_eval_mode()
        return self.network(self.on_device().weights, images.to(self.network.device))


def supcon_loss(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean of (17) over all anchors that have positives; 0 if none has."""
    unit = nn.functional.normalize(embeddings, dim=-1)
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    similarity = (unit @ unit.T / temperature).masked_fill(itself, -torch.inf)
    log_share = similarity - torch.logsumexp(similarity, -1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    count = positive.sum(-1)
    each = -log_share.where(positive, 0.0).sum(-1) / count.clamp(min=1)  # (17)
    return each.sum() / (count > 0).sum().clamp(min=1)

"""What a student learns from: teachers' softened predictions, and images of its own class.

N. S. Shadin, X. Zhang, J. Wang, M. Pan: Heterogeneity-aware private personalized federated learning for medical
imaging via contrastive distillation (PFedCDP), section III; P. Khosla et al.: Supervised contrastive learning,
NeurIPS 2020.

     (7)  ỹ_student = softmax(z_student / T)
     (8)  ỹ_teacher = softmax(z_teacher / T)
    (10)  L_KD = KL(ỹ_teacher ‖ ỹ_student)          a batch's mean, times T²: objectives.distillation
    (17)  L_i = −1/|P(i)| · Σ_{j∈P(i)} log( exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ) )

P(i): the other embeddings of i's class among the 2N of a batch, of which there are 2N_y − 1; all z have length 1.

Departures: (17) is summed over the batch as printed, but here averaged, as in the code of both papers: a sum would grow
with the batch while (10) does not, and their balance with it. Anchors without positives, which two views of an image
never leave, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core.contract import Bundle
from polyclinic.training.network import LiveNetwork, move_bundle


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained network. Several teachers may share one `network`, with weights of their own, even with a student."""

    name: str
    network: LiveNetwork
    weights: Bundle

    def on_device(self) -> Teacher:
        """The same with its weights where its network is, so that they are not sent there with every call."""
        return replace(self, weights=move_bundle(self.weights, self.network.device))

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        self.network.set_eval_mode()
        return self.network(self.on_device().weights, images.to(self.network.device))


def contrastive_loss(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The mean of (17) over all anchors that have positives; 0 if none has."""
    unit = F.normalize(embeddings, dim=-1)
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    similarity = (unit @ unit.T / temperature).masked_fill(itself, -torch.inf)
    log_share = similarity - torch.logsumexp(similarity, -1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    count = positive.sum(-1)
    each = -log_share.where(positive, 0.0).sum(-1) / count.clamp(min=1)  # (17)
    return each.sum() / (count > 0).sum().clamp(min=1)

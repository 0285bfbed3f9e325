"""A network as a function of its weights, and the functions of it that jobs compute."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from polyclinic.core.types import Batch, Bundle, Tensors


class Network(Protocol):
    """A network as a function of its weights. All methods but the teachers' propagate gradients to the weights."""

    def __call__(self, weights: Bundle, images: Tensor) -> Tensor:
        """Return the logits of images."""
        ...

    def features(self, weights: Bundle, images: Tensor) -> Tensor:
        """Return the output of the extractor, which is the input of the head."""
        ...

    def head(self, weights: Bundle, features: Tensor, eval_mode: bool = False) -> Tensor:
        """Return the logits of `features`.

        Call `features()` and then `head()` to get both from one forward pass. `eval_mode`: dropout off and BatchNorm
        statistics frozen, gradients still flow. Use it for features received from other sites.
        """
        ...

    def loss(self, weights: Bundle, batch: Batch) -> Tensor:
        """Return the task's loss, the mean cross-entropy over the batch."""
        ...

    def output_loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the task's loss of `outputs`, which were computed before; "none" gives one value per example."""
        ...

    def predict(self, weights: Bundle, images: Tensor) -> Tensors:
        """Return the task's predictions by name, for classification "probabilities"."""
        ...

    def teacher_logits(self, weights: Bundle, images: Tensor) -> Tensor:
        """Return the logits of another model with these `weights`, in evaluation mode and without a gradient."""
        ...

    def teacher_features(self, weights: Bundle, images: Tensor) -> Tensor:
        """Return the extractor's features of another model, as `teacher_logits` returns its logits."""
        ...

    def auxiliary(self, weights: Bundle, name: str, *given: Tensor, eval_mode: bool = False) -> Tensor:
        """Return the output of the network `name` of `Algorithm.auxiliary`. `eval_mode` is that of `head`."""
        ...


Objective: TypeAlias = Callable[[Network, Bundle, Batch, Bundle], Tensor]
"""(network, weights, batch, reference) -> loss. It must be a pure function at module level, so that jobs can stack."""

Scorer: TypeAlias = Callable[[Network, Bundle, Batch, Bundle], Tensors]
"""(network, weights, batch, reference) -> tensors: one row per example (`cat`) or means over the batch (`mean`)."""

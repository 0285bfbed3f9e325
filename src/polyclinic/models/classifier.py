"""A network in two parts, `extractor` and `head`, and its layers in order from input to output."""

from typing import Protocol, cast

from torch import Tensor, nn

from polyclinic.core import RecipeError


class Classifier(nn.Module):
    """A network that computes logits = head(extractor(images)).

    The extractor returns flat feature vectors (n × d). Every weight's name starts with `extractor.` or `head.`.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.extractor(images)))

    def leaf_layers(self) -> list[str]:
        """Return the names of the modules that own weights or statistics themselves, from input to output.

        The order is that of definition. Every network of this package is written so that it agrees with the order of
        execution (parallel branches count in the order in which they are computed); the tests compare the two with
        forward hooks.
        """
        # Non-persistent buffers (fixed filters, dropout keys) do not count, as they are not saved with the model.
        return [
            n for n, m in self.named_modules() if m._parameters or m._buffers.keys() - m._non_persistent_buffers_set
        ]

    def tail_parameters(self, fraction: float) -> frozenset[str]:
        """Return the names of the parameters in the `fraction` of all leaf layers that is nearest the output.

        This is FedCycle's fine-tuning: "approximately the top 30% of the layers closest to the output". The number of
        layers is rounded to the nearest whole number, but is at least one unless `fraction` is 0.
        """
        if not 0 <= fraction <= 1:
            raise RecipeError(f"The fine-tuned share of layers is {fraction}; it must lie between 0 and 1.")
        layers = self.leaf_layers()
        count = max(1, round(fraction * len(layers))) if fraction > 0 else 0
        return frozenset(
            f"{layer}.{name}"
            for layer in layers[len(layers) - count :]
            for name, _ in self.get_submodule(layer).named_parameters(recurse=False)
        )


class ModelBuilder(Protocol):
    """Builds a network for square images of `size` pixels; its first weights come from torch's current random state."""

    def __call__(self, *, classes: int, channels: int, size: int, dropout: float) -> Classifier: ...

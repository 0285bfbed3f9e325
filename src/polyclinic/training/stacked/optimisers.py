"""SGD, Adam and AdamW for all sites of a stack at once, with the numbers that torch.optim gives site by site."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from polyclinic.core import Bundle, Optimiser, SiteId, Tensors

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""The defaults of torch.optim.Adam."""
SLOTS = {
    "sgd": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
}
"""Each optimiser's state by torch.optim's names. Momentum starts at zero, so that it is the gradient after one step."""


StepHook: TypeAlias = Callable[["StackedOptimiser", Tensors, Tensors, Tensor | None], None]
STEP_PRE_HOOKS: list[StepHook] = []
"""Called with the arguments of every `StackedOptimiser.step` before it, as those of
`torch.optim.optimizer.register_optimizer_step_pre_hook` are."""


class StackedOptimiser:
    """An optimiser whose tensors all have a leading axis of sites.

    Args:
        options: The optimiser that the recipe asks for.
        lr: The learning rate of this round.
        number: The position of its step among the steps that a job takes on every batch.
        sites: The names of the sites.
    """

    def __init__(self, options: Optimiser, lr: float, number: int, sites: Sequence[SiteId] = ()) -> None:
        self.options, self.lr, self.number, self.sites = options, lr, number, tuple(sites)
        plain = options.name == "sgd" and not options.momentum
        self.slots: Bundle = {} if plain else {slot: {} for slot in SLOTS[options.name]}

    def load_state(self, state: Tensors) -> None:
        for path, value in state.items():
            number, slot, name = path.split("/", 2)
            if int(number) == self.number:
                self.slots[slot][name] = value

    def state(self) -> Tensors:
        return {f"{self.number}/{slot}/{n}": t for slot, group in self.slots.items() for n, t in group.items()}

    @torch.no_grad()
    def step(self, model: Tensors, grads: Tensors, members: Tensor | None) -> None:
        """Move the members' rows of `model` (None: all rows) along `grads`, which holds only theirs."""
        for hook in STEP_PRE_HOOKS:
            hook(self, model, grads, members)
        for slot, group in self.slots.items():
            for name in grads.keys() - group.keys():
                like = model[name]
                group[name] = (
                    like.new_zeros(len(like), dtype=torch.float32) if slot == "step" else torch.zeros_like(like)
                )
        groups = {"": model, **self.slots}
        everything = {slot: {name: group[name] for name in grads} for slot, group in groups.items()}
        if members is None:
            self._update_rows(everything, grads)
        elif grads:
            rows = {slot: {name: t[members] for name, t in group.items()} for slot, group in everything.items()}
            self._update_rows(rows, grads)
            for slot, group in everything.items():
                for name, tensor in group.items():
                    tensor[members] = rows[slot][name]

    def _update_rows(self, rows: Bundle, grads: Tensors) -> None:
        weights, gradients, options = list(rows[""].values()), list(grads.values()), self.options
        if options.name == "adamw":
            torch._foreach_mul_(weights, 1 - self.lr * options.weight_decay)
        elif options.weight_decay:
            gradients = list(torch._foreach_add(gradients, weights, alpha=options.weight_decay))
        slots = [list(rows[slot].values()) for slot in self.slots]
        if options.name != "sgd":
            self._adam(weights, gradients, *slots)
        else:
            for buffers in slots:
                torch._foreach_mul_(buffers, options.momentum)
                torch._foreach_add_(buffers, gradients)
            torch._foreach_add_(weights, slots[0] if slots else gradients, alpha=-self.lr)

    def _adam(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        steps: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - BETA_1)
        torch._foreach_mul_(squares, BETA_2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - BETA_2)
        for weight, mean, square, step in zip(weights, means, squares, steps, strict=True):
            count = step.to(weight.dtype).reshape(-1, *[1] * (weight.ndim - 1))
            scale = self.lr / (1 - BETA_1**count)
            weight -= scale * mean / (square.sqrt() / (1 - BETA_2**count).sqrt() + EPSILON)

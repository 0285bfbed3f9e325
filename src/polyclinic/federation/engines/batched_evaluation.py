"""Evaluating many sites at once, where they predict with the same weights: their images pass as one long batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from polyclinic.core import Bundle, Part, Score, SiteId, Tensors
from polyclinic.data.examples import Selection
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.training.fit import score
from polyclinic.training.losses import predict_probabilities

Key = tuple[Part, tuple[int, ...]]
RECENT = 8
"""Weights that may be asked for again; sites' own models are not, and are not to be held all at once."""


class BatchedEvaluation:
    """Cached predictions of one round. When a second site uses the same weights as a first, all sites are computed."""

    def __init__(self, runners: Sequence[SiteRunner]) -> None:
        self.runners = runners
        self._asked: dict[Key, tuple[SiteId, Bundle]] = {}
        self._known: dict[Key, dict[SiteId, Tensors]] = {}

    def predict(self, runner: SiteRunner, weights: Bundle, part: Part) -> Tensors:
        key = part, tuple(id(tensor) for group in weights.values() for tensor in group.values())
        known = self._asked.pop(key, None)
        # Held, so that no other tensor takes its identity; what was asked for last comes last.
        self._asked[key] = known or (runner.name, weights)
        if known is None:
            if len(self._asked) > RECENT:
                oldest = next(iter(self._asked))
                del self._asked[oldest]
                self._known.pop(oldest, None)
            return runner.predict(weights, part)
        if key not in self._known:
            others = [r for r in self.runners if r.name != known[0] and r.network is runner.network]
            self._known[key] = predict_batched(others, weights, part)
        found = self._known[key].pop(runner.name, None)
        return runner.predict(weights, part) if found is None else found


def predict_batched(runners: Sequence[SiteRunner], weights: Bundle, part: Part) -> dict[SiteId, Tensors]:
    """Return the sites' predictions from one pass over all images; {} where these are not in one tensor."""
    held = {runner.name: getattr(runner.images, part) for runner in runners}
    parts = [examples for examples in held.values() if isinstance(examples, Selection)]
    if not parts or len(parts) < len(held) or any(examples.shared is not parts[0].shared for examples in parts):
        return {}
    rows, place = torch.unique(torch.cat([examples.rows for examples in parts]), return_inverse=True)
    everything = replace(parts[0], rows=rows, labels=parts[0].shared.labels[rows], patients=None)
    found = score(Score(weights, predict_probabilities), runners[0].network, everything)
    found = {name: tensor[place] for name, tensor in found.items()}
    pieces = {name: torch.split(tensor.cpu(), [len(examples) for examples in parts]) for name, tensor in found.items()}
    return {site: {name: split[number] for name, split in pieces.items()} for number, site in enumerate(held) if pieces}

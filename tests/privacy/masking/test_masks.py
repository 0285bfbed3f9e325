"""Fixed point and masks: sums are exact, masks cancel and look random, and nothing wraps around in silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from polyclinic.privacy.masking.fixed_point import (
    PARAMETERS,
    WIDE,
    FixedGrid,
    as_tensor,
    as_words,
    quantise_group,
    restore_group,
)
from polyclinic.privacy.masking.masks import add_mask, neighbours_of, pair_sign
from polyclinic.privacy.masking.secrets import RoundSecrets
from polyclinic.privacy.transforms.mask import Mask

COHORT = "a hash of all keys"


def words(grid: FixedGrid, size: int = 5000) -> dict[str, np.ndarray]:
    return {"model": np.zeros(size, grid.words), "buffers": np.zeros(3, np.uint64)}


@pytest.mark.parametrize("kind", ["model", "control"])
def test_the_mean_is_that_of_the_sites_but_for_half_a_step(kind: str) -> None:
    draws = torch.Generator().manual_seed(3)
    received = {"w": torch.randn(40, 7, generator=draws), "b": torch.randn(7, generator=draws)}
    updates = [
        {name: tensor + 0.01 * torch.randn(tensor.shape, generator=draws) for name, tensor in received.items()}
        for _ in range(4)
    ]
    weights, grid = [1.0, 0.25, 0.5, 0.125], PARAMETERS if kind == "model" else WIDE
    vectors = [
        quantise_group(kind, update, received, w, grid.limit(4))[0] for update, w in zip(updates, weights, strict=True)
    ]
    total = np.sum(vectors, axis=0, dtype=vectors[0].dtype)
    mean = restore_group(kind, total, received, received, sum(weights))
    for name, tensor in mean.items():
        exact = sum(w * update[name].double() for w, update in zip(weights, updates, strict=True)) / sum(weights)
        rounding = grid.step * len(weights) / 2 / sum(weights) + 2.0**-22  # of the grid, and of single precision
        assert float((tensor.double() - exact).abs().max()) <= rounding
        assert tensor.dtype == torch.float32
    assert list(mean) == list(received)


def test_counters_are_averaged_and_rounded_as_in_the_mean_of_single_updates() -> None:
    received = {"batches": torch.tensor(10)}
    vectors = [
        quantise_group("buffers", {"batches": torch.tensor(n)}, received, 1.0, WIDE.limit(3))[0] for n in (12, 13, 15)
    ]
    mean = restore_group("buffers", np.asarray(np.sum(vectors, axis=0, dtype=np.uint64)), received, received, 3.0)
    assert mean["batches"].dtype == torch.int64
    assert int(mean["batches"]) == 13


@pytest.mark.parametrize("sites", [1, 3, 40])
@pytest.mark.parametrize("kind", ["model", "control"])
def test_values_that_the_sum_cannot_carry_are_brought_into_range(kind: str, sites: int) -> None:
    grid = PARAMETERS if kind == "model" else WIDE
    limit, inside = grid.limit(sites), torch.tensor([0.5, -0.25])
    update = torch.cat([inside, torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])])
    words, changed = quantise_group(kind, {"w": update}, {}, 1.0, limit)
    found = as_tensor(words)
    assert changed == 5
    assert (found[:2] * grid.step).tolist() == inside.tolist(), "the others are as they were"
    assert found[-1] == 0
    for place, sign in ((2, 1), (3, -1), (4, 1), (5, -1)):
        assert abs(int(found[place])) <= limit
        assert int(found[place]) == pytest.approx(sign * limit, rel=1e-9)
        assert int(as_tensor(np.sum([words] * sites, axis=0, dtype=words.dtype))[place]) == sites * int(found[place])


@pytest.mark.parametrize("noise", [1e6, 3e7])
def test_the_noise_of_all_sites_has_room_beside_their_updates(noise: float) -> None:
    """Updates at the limit, with the most noise that a sum has: it does not wrap around."""
    sites, std = 20, noise
    reach = 10 * std * sites**0.5
    limit = PARAMETERS.limit(sites, reach)
    assert limit > 0
    assert sites * limit + reach <= 2**31 - 1
    assert sites * (limit + 1) + reach > 2**31 - 1 - 1, "and no more room than that is given away"
    assert PARAMETERS.limit(sites, 1e10) < 1


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.sampled_from([PARAMETERS, WIDE]))
def test_the_largest_values_of_all_sites_do_not_wrap_around(sites: int, grid: FixedGrid) -> None:
    most = grid.limit(sites)
    total = np.sum(np.full((sites, 1), most, dtype=np.int64).astype(grid.words), axis=0, dtype=grid.words)
    assert int(as_tensor(total)[0]) == sites * most


def test_masks_cancel_in_the_sum_and_nothing_else_does() -> None:
    sites = [f"site {n}" for n in range(5)]
    secrets = {site: RoundSecrets(bytes([n]) * 32) for n, site in enumerate(sites)}
    keys = {site: secret.mask_key.public_key().public_bytes_raw() for site, secret in secrets.items()}
    masked = {}
    for site in sites:
        masked[site] = words(PARAMETERS)
        for other in neighbours_of(site, sites, None, COHORT):
            add_mask(masked[site], secrets[site].pair_seed(keys[other], COHORT), pair_sign(site, other))
    for kind in ("model", "buffers"):
        assert not np.sum([masked[site][kind] for site in sites], axis=0, dtype=masked[sites[0]][kind].dtype).any()
        assert np.sum([masked[site][kind] for site in sites[1:]], axis=0, dtype=masked[sites[0]][kind].dtype).any()


def test_a_mask_is_uniform_and_differs_by_seed_and_kind() -> None:
    one, other = words(PARAMETERS, 40_000), words(PARAMETERS, 40_000)
    add_mask(one, bytes(32), 1)
    add_mask(other, bytes(31) + b"\1", 1)
    assert not (one["model"] == other["model"]).any()
    counts = np.bincount(one["model"].view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 160 < chi_squared < 370, "255 degrees of freedom: outside with a chance of 1 in 100,000"
    add_mask(one, bytes(32), -1)
    assert not one["model"].any()
    assert not one["buffers"].any()


def test_a_circle_of_neighbours_is_regular_symmetric_and_follows_from_all_keys() -> None:
    sites = [f"site {n}" for n in range(20)]
    near = {site: neighbours_of(site, sites, 6, COHORT) for site in sites}
    assert {len(found) for found in near.values()} == {6}
    assert all(site in near[other] for site in sites for other in near[site])
    assert near != {site: neighbours_of(site, sites, 6, "other keys") for site in sites}
    assert neighbours_of("site 0", sites[:4], 6, COHORT) == ["site 1", "site 2", "site 3"]


def test_shares_are_read_by_their_recipient_only() -> None:
    one, two, three = (RoundSecrets(bytes([n]) * 32) for n in range(3))
    public = [site.cipher_key.public_key().public_bytes_raw() for site in (one, two, three)]
    sealed = one.seal_shares(public[1], COHORT, ("a", "b"), (123, 456))
    assert two.open_shares(public[0], COHORT, ("a", "b"), sealed) == (123, 456)
    assert two.open_shares(public[0], COHORT, ("b", "a"), sealed) is None
    assert two.open_shares(public[0], "another cohort", ("a", "b"), sealed) is None
    assert three.open_shares(public[0], COHORT, ("a", "b"), sealed) is None
    assert two.open_shares(public[0], COHORT, ("a", "b"), sealed[:-1] + bytes([sealed[-1] ^ 1])) is None


def test_a_secret_differs_by_cohort_and_its_polynomial_with_it() -> None:
    own = RoundSecrets(bytes(32))
    assert own.shared_secrets("one")[0] == own.shared_secrets("other")[0], "the mask key is signed before the cohort"
    assert own.shared_secrets("one")[1] != own.shared_secrets("other")[1]
    assert own.coefficients("one", "mask key", 3) != own.coefficients("other", "mask key", 3)
    assert own.coefficients("one", "mask key", 3) != own.coefficients("one", "own mask", 3)


def test_integers_travel_without_a_change() -> None:
    for dtype in (np.uint32, np.uint64):
        vector = np.array([0, 1, np.iinfo(dtype).max], dtype)
        assert (as_words(as_tensor(vector)) == vector).all()


@pytest.mark.parametrize(
    ("sites", "options", "problem"),
    [
        (3, Mask(), ""),
        (5, Mask(), ""),
        (2, Mask(), "one honest site"),
        (2, Mask(colluders=0), ""),
        (5, Mask(threshold=3), "two sums"),
        (5, Mask(threshold=6), "a round has 5 sites"),
        (5, Mask(colluders=3), "one honest site"),
        (7, Mask(threshold=5, colluders=2), ""),
        (7, Mask(threshold=5, colluders=3), "two sums"),
    ],
)
def test_a_threshold_that_protects_nothing_is_refused_with_its_numbers(sites: int, options: Mask, problem: str) -> None:
    found = options.problem_with(sites)
    assert (problem in found) if problem else found == ""


@pytest.mark.parametrize("sites", range(2, 30))
@pytest.mark.parametrize("colluders", range(4))
def test_two_lists_of_survivors_share_an_honest_site(sites: int, colluders: int) -> None:
    """Where nothing is refused: any two sets of `threshold` signers have more sites in common than can collude."""
    options = Mask(colluders=colluders)
    if options.problem_with(sites) == "":
        threshold = options.threshold_of(sites)
        assert 2 * threshold - sites > colluders
        assert threshold - colluders >= 2

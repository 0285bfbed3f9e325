"""Private randomness: ChaCha20 as RFC 8439 has it, and the numbers that are made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from polyclinic.core.rng import Stream
from polyclinic.training.dp import secure_random
from polyclinic.training.dp.secure_random import (
    CHUNK,
    chacha20_words,
    draw_geometric,
    draw_normals,
    draw_permutation,
    draw_uniforms,
    draw_words,
    draw_words_on_device,
)

SECRET, CPU = Stream(11, ("secret",)), torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
    ),
]
VECTORS = {  # RFC 8439: key, counter, nonce, keystream
    "2.3.2": (
        bytes(range(32)).hex(),
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1, 1": (
        "00" * 32,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1, 3": (
        "00" * 31 + "01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1, 5": (
        "00" * 32,
        0,
        "000000000000000000000002",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}


def words_of(texts: list[str], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack([np.frombuffer(bytes.fromhex(text), np.int32) for text in texts])).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VECTORS)
def test_chacha20_gives_the_keystreams_of_the_rfc(name: str, device: torch.device) -> None:
    key, counter, nonce, wanted = VECTORS[name]
    one, two, three = np.frombuffer(bytes.fromhex(nonce), np.uint32).tolist()
    found = chacha20_words(words_of(["11" * 32, key], device), 1, counter, (one, two, three))
    assert found[1].cpu().numpy().tobytes().hex() == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_draws_the_keystream_of_the_library(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(2**255 + 1), SECRET, SECRET.child("round", 3)]
    for least in (0, 1 << 60):  # computed there, or here and copied
        monkeypatch.setattr(secure_random, "DEVICE_WORDS", least)
        for count, block in ((1, 0), (8, 7), (100_001, 2**30)):
            found = draw_words_on_device(streams, count, device, block)
            assert found.device.type == device.type
            assert torch.equal(found.cpu(), torch.stack([draw_words(s, count, block) for s in streams]))


def kolmogorov(drawn: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """The p-value of sorted numbers being standard normal; scipy's own test sorts them anew and looks for exactness."""
    wanted, count = stats.norm.cdf(drawn), len(drawn)
    ranks = np.arange(count + 1) / count
    gap = max((ranks[1:] - wanted).max(), (wanted - ranks[:-1]).max())
    return float(stats.kstwobign.sf(gap * math.sqrt(count)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_m1_noise_is_standard_normal(dtype: torch.dtype, device: torch.device) -> None:
    drawn = draw_normals([SECRET], 1_000_000, device, dtype)[0].double().cpu().numpy()
    assert abs(np.corrcoef(drawn[::2], drawn[1::2])[0, 1]) < 5e-3
    assert drawn.std() == pytest.approx(1, rel=5e-3)
    drawn.sort()
    for scale in (1.0, 0.98, 1.02):
        assert (kolmogorov(drawn * scale) > 1e-3) == (scale == 1)


def normals_of(first: list[int], second: list[int]) -> Tensor:
    """The numbers z₁ of pairs of words."""
    return secure_random._to_normals(torch.tensor([first, second]).T.contiguous().view(-1)).view(-1, 2)[:, 0]


def test_tails_are_as_long_as_they_should_be() -> None:
    """At angle 0, z₁ > t exactly where u < e^(−t²/2): so many of the 2⁶³ words, up to the last at 9.42."""
    for t in (1.0, 4.0, 6.0, 7.0, 8.0, 9.0):
        words = math.exp(-t * t / 2) * 2.0**63
        slack = max(2.0, words * 1e-14)
        inside, beyond = normals_of([int(words + slack), int(words - slack)], [0, 0]).tolist()
        assert inside <= t * (1 + 1e-15)
        assert beyond >= t * (1 - 1e-15)
    assert float(normals_of([0], [0])[0]) == pytest.approx(math.sqrt(2 * 64 * math.log(2)), rel=1e-15)
    assert float(normals_of([-(2**63)], [0])[0]) == float(normals_of([0], [0])[0])
    assert float(normals_of([2**63 - 1], [0])[0]) == 0.0


def test_angles_go_round_once() -> None:
    eighth = 2**61
    found = normals_of([0] * 8, [n * eighth for n in range(-4, 4)]) / float(normals_of([0], [0])[0])
    assert torch.allclose(found, torch.arange(-4, 4).double().mul(math.pi / 4).cos(), atol=1e-15)


def test_a_longer_draw_begins_with_the_shorter_and_blocks_go_on() -> None:
    long = draw_normals([SECRET], 2 * CHUNK + 5, CPU, torch.float64)[0]
    for size in (0, 1, 7, CHUNK, CHUNK + 1):
        assert torch.equal(draw_normals([SECRET], size, CPU, torch.float64)[0], long[:size])
    assert torch.equal(draw_normals([SECRET], 9, CPU, torch.float64, block=3)[0], long[24:33])
    both = draw_normals([SECRET.child(1), SECRET], 100, CPU, torch.float64)
    assert torch.equal(both[1], long[:100])
    assert not torch.equal(both[0], both[1])
    assert torch.equal(draw_normals([SECRET], 100, CPU, torch.float32)[0], long[:100].float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_gpu_draws_the_same_numbers_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_random, "DEVICE_CHUNK", 2 * CHUNK)
    gpu = torch.device("cuda")
    found, wanted = (draw_normals([SECRET, SECRET.child(1)], 300_001, d, torch.float64).cpu() for d in (gpu, CPU))
    assert float((found - wanted).abs().max()) < 1e-13


def test_m4_noise_is_never_used_twice() -> None:
    """Not even where the numbers that seed it agree in their last 32 bits, which is all torch's CPU generator keeps."""
    streams = [
        Stream(seed, (site, round, "noise", t))
        for seed in (0, 1 << 32)
        for site in "ab"
        for round in (1, 2)
        for t in range(200)
    ]
    drawn = draw_normals(streams, 4, CPU, torch.float64)
    assert len(set(drawn.flatten().tolist())) == drawn.numel()
    assert torch.equal(draw_normals(streams[:1], 4, CPU, torch.float64)[0], drawn[0])


def test_the_key_of_a_stream_cannot_be_told_from_its_number() -> None:
    assert SECRET.key() != SECRET.child("").key()
    assert f"{SECRET.integer():x}" not in SECRET.key().hex()
    assert len({Stream(1, path).key() for path in ((), (1,), ("1",), (1, 1), (11,))}) == 5


def test_uniform_numbers_and_permutations() -> None:
    drawn = np.sort(draw_uniforms(SECRET, 100_000).numpy())
    assert stats.kstest(drawn, "uniform", method="asymp").pvalue > 1e-3
    assert stats.kstest(drawn**1.02, "uniform", method="asymp").pvalue < 1e-3
    orders = [tuple(draw_permutation(SECRET.child(n), 3).tolist()) for n in range(6000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("rate", [1e-3, 0.3, 0.97])
def test_geometric_numbers(rate: float) -> None:
    drawn = draw_geometric(SECRET, rate, 100_000)
    most = int(stats.geom.ppf(1 - 1e-4, rate)) + 1
    edges = np.unique(np.linspace(0, most, 30).astype(int))
    found = np.histogram(np.minimum(drawn, most), edges + 0.5)[0]
    wanted = np.diff(stats.geom.cdf(edges, rate))
    kept = wanted * len(drawn) > 5
    left = [len(drawn) - found[kept].sum(), len(drawn) * (1 - wanted[kept].sum())]
    rest = left if left[1] > 5 else [0, 0]
    total = ((found[kept] - len(drawn) * wanted[kept]) ** 2 / (len(drawn) * wanted[kept])).sum()
    total += (rest[0] - rest[1]) ** 2 / rest[1] if rest[1] else 0
    assert stats.chi2.sf(total, kept.sum()) > 1e-3
    assert int(draw_geometric(SECRET, 1e-300, 5).min()) > 2**61

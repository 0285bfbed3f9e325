"""Decoding against what was encoded: depths, colours, palettes, orientation, stacks of images, and damaged files."""

from __future__ import annotations

import logging
import struct
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin

from polyclinic.data.sources.decoder import decode_image
from polyclinic.data.sources.images import UnreadableImage, silence_decoders

Array = NDArray[Any]
NAME = "Quendolin^Xaver"

GREY = np.random.default_rng(0).integers(0, 256, (40, 56), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
SMOOTH = np.add.outer(np.arange(40), 2 * np.arange(56)).astype(np.uint8)
DEEP = np.random.default_rng(2).integers(0, 65536, (40, 56), dtype=np.uint16)


def saved(folder: Path, picture: Array | Image.Image, name: str, **how: Any) -> Path:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image.save(folder / name, **how)
    return folder / name


def reason(path: Path, **how: Any) -> str:
    with pytest.raises(UnreadableImage) as caught:
        decode_image(path, **how)
    assert "/" not in str(caught.value)
    return str(caught.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def deep_png(values: Array, colour_type: int, extra: bytes = b"") -> bytes:
    """A PNG of 16 bits per sample, by the specification: Pillow cannot write one in colour."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def scaled(values: Array, bits: int) -> Array:
    return np.asarray(np.rint(values * 255.0 / (2**bits - 1)))


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.TIFF", "a.webp", "a.PNG", "no_suffix"])
@pytest.mark.parametrize("picture", [GREY, COLOUR])
def test_lossless_files_come_back_as_they_were(tmp_path: Path, name: str, picture: Array) -> None:
    how = {"format": "WEBP", "lossless": True} if "webp" in name else {} if "." in name else {"format": "PNG"}
    decoded = decode_image(saved(tmp_path, picture, name, **how))
    expected = np.stack([picture] * 3, -1) if "webp" in name and picture.ndim == 2 else picture
    np.testing.assert_array_equal(decoded.pixels, expected)
    assert decoded.pixels.dtype == np.uint8
    assert (decoded.bits, decoded.colour) == (8, expected.ndim == 3)


@pytest.mark.parametrize(
    "picture", [SMOOTH, np.stack([SMOOTH, SMOOTH.T[:40, :].repeat(2, 1)[:, :56], 255 - SMOOTH], -1)]
)
def test_jpeg_is_what_pillow_shows(tmp_path: Path, picture: Array) -> None:
    path = saved(tmp_path, picture, "a.jpg", quality=95)
    np.testing.assert_array_equal(decode_image(path).pixels, np.array(Image.open(path)))
    assert decode_image(path).colour == (picture.ndim == 3)


@pytest.mark.parametrize("binary", [True, False])
def test_pgm(tmp_path: Path, binary: bool) -> None:
    path = tmp_path / "a.pgm"
    body = GREY.tobytes() if binary else " ".join(map(str, GREY.ravel())).encode()
    path.write_bytes(b"P%d\n# a comment\n56 40\n255\n" % (5 if binary else 2) + body)
    np.testing.assert_array_equal(decode_image(path).pixels, GREY)


@pytest.mark.parametrize("bits", [10, 12, 16])
def test_pgm_says_itself_how_many_bits_it_uses(tmp_path: Path, bits: int) -> None:
    values, path = DEEP >> (16 - bits), tmp_path / "a.pgm"
    path.write_bytes(b"P5 56 40 %d\n" % (2**bits - 1) + values.astype(">u2").tobytes())
    for said in (None, 12):
        assert np.abs(decode_image(path, said).pixels - scaled(values, bits)).max() <= 1


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
@pytest.mark.parametrize("bits", [None, 10, 12, 14, 16])
def test_sixteen_bit_grey_is_scaled_by_the_bits_in_use(tmp_path: Path, name: str, bits: int | None) -> None:
    values = DEEP >> (16 - (bits or 16))
    decoded = decode_image(saved(tmp_path, values, name), bits)
    np.testing.assert_array_equal(decoded.pixels, scaled(values, bits or 16))
    assert (decoded.bits, decoded.colour) == (16, False)


@pytest.mark.parametrize("bits", [8, 12, 15])
def test_more_than_the_bits_in_use_is_refused(tmp_path: Path, bits: int) -> None:
    values = np.full((3, 3), 2**bits, np.uint16)
    assert f"values too large for {bits} bits" in reason(saved(tmp_path, values, "a.png"), bits=bits)


def test_big_endian_tiff_and_tiff_where_white_is_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    for order, sign in ((b"MM\0*", ">"), (b"II*\0", "<")):
        for photometric in (0, 1) if sign == "<" else (1,):
            tags = [(256, 3, 56), (257, 3, 40), (258, 3, 16), (259, 3, 1), (262, 3, photometric), (273, 4, 8),
                    (277, 3, 1), (278, 3, 40), (279, 4, DEEP.nbytes)]  # fmt: skip
            entries = b"".join(
                struct.pack(f"{sign}HHI", tag, kind, 1) + struct.pack(f"{sign}HH" if kind == 3 else f"{sign}I",
                                                                       *((value, 0) if kind == 3 else (value,)))
                for tag, kind, value in tags
            )  # fmt: skip
            directory = struct.pack(f"{sign}H", len(tags)) + entries + b"\0\0\0\0"
            body = DEEP.astype(f"{sign}u2").tobytes()
            path.write_bytes(order + struct.pack(f"{sign}I", 8 + len(body)) + body + directory)
            expected = scaled(DEEP, 16)
            np.testing.assert_array_equal(decode_image(path).pixels, expected if photometric else 255 - expected)


def test_sixteen_bit_colour_png_keeps_all_its_bits(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    values = np.random.default_rng(3).integers(0, 4096, (40, 56, 3), dtype=np.uint16)
    path.write_bytes(deep_png(values, 2))
    decoded = decode_image(path, 12)
    np.testing.assert_array_equal(decoded.pixels, scaled(values, 12))
    assert (decoded.bits, decoded.colour) == (16, True)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert reason(path, bits=12) == "the PNG is truncated"


@pytest.mark.parametrize(("channels", "colour_type"), [(2, 4), (4, 6)])
def test_sixteen_bit_transparency_is_laid_on_black(tmp_path: Path, channels: int, colour_type: int) -> None:
    values = np.random.default_rng(4).integers(0, 65536, (20, 30, channels), dtype=np.uint16)
    (tmp_path / "a.png").write_bytes(deep_png(values, colour_type))
    expected = (values[..., :-1] / 65535.0 * (values[..., -1:] / 65535.0) * 255).squeeze()
    # each of two factors and their product is rounded
    assert np.abs(decode_image(tmp_path / "a.png").pixels - expected).max() <= 1.5


def test_sixteen_bit_colour_tiff_is_not_guessed_at(tmp_path: Path) -> None:
    rows = COLOUR.astype("<u2") * 257
    path = tmp_path / "a.tif"
    tags = [(256, 3, 1, 56), (257, 3, 1, 40), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 14),
            (277, 3, 1, 3), (278, 3, 1, 40), (279, 4, 1, rows.nbytes)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    directory = struct.pack("<H", len(tags)) + entries + b"\0\0\0\0"
    head = b"II*\0" + struct.pack("<I", 14 + rows.nbytes) + struct.pack("<HHH", 16, 16, 16)
    path.write_bytes(head + rows.tobytes() + directory)
    np.testing.assert_array_equal(decode_image(path).pixels, COLOUR)
    assert decode_image(path).bits == 16
    assert "16-bit colour TIFF" in reason(path, bits=12)


def test_transparency_is_laid_on_black(tmp_path: Path) -> None:
    alpha = np.random.default_rng(5).integers(0, 256, GREY.shape, dtype=np.uint8)
    for picture in (COLOUR, GREY):
        layers = np.dstack([picture, alpha])
        pixels = decode_image(saved(tmp_path, layers, "a.png")).pixels
        expected = picture.astype(float) * (alpha if picture.ndim == 2 else alpha[..., None]) / 255
        assert np.abs(pixels - expected).max() <= 0.5


def test_a_transparent_grey_value_is_black_and_the_image_stays_grey(tmp_path: Path) -> None:
    pixels = decode_image(saved(tmp_path, GREY, "a.png", transparency=200)).pixels
    np.testing.assert_array_equal(pixels, np.where(GREY == 200, 0, GREY))


@pytest.mark.parametrize("how", [{}, {"transparency": 7}])
def test_palette_becomes_rgb(tmp_path: Path, how: dict[str, int]) -> None:
    indices = GREY % 16
    table = np.random.default_rng(6).integers(1, 256, (16, 3), dtype=np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(table.tobytes())
    decoded = decode_image(saved(tmp_path, image, "a.png", **how))
    expected = table[indices]
    expected[indices == how.get("transparency", -1)] = 0
    np.testing.assert_array_equal(decoded.pixels, expected)
    assert decoded.colour


def test_one_bit_is_black_and_white(tmp_path: Path) -> None:
    decoded = decode_image(saved(tmp_path, GREY > 100, "a.png"))
    np.testing.assert_array_equal(decoded.pixels, np.where(GREY > 100, 255, 0))
    assert decoded.bits == 1


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[..., 0] = 255  # cyan: no red
    for name, tolerance in (("a.tif", 0), ("a.jpg", 3)):
        pixels = decode_image(saved(tmp_path, Image.fromarray(ink, "CMYK"), name)).pixels.astype(int)
        assert np.abs(pixels - (0, 255, 255)).max() <= tolerance


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "deep.png", "colour.png"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_pillow_does(tmp_path: Path, name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.array(ImageOps.exif_transpose(Image.open(saved(tmp_path, SMOOTH, "reference.png", exif=exif))))
    if name == "colour.png":
        values = np.dstack([SMOOTH.astype(np.uint16) * 257] * 3)
        (tmp_path / name).write_bytes(deep_png(values, 2, chunk(b"eXIf", exif.tobytes()[6:])))
    else:
        picture = SMOOTH.astype(np.uint16) * 257 if name == "deep.png" else SMOOTH
        saved(tmp_path, picture, name, exif=exif, **({"quality": 100} if name == "a.jpg" else {}))
    pixels = decode_image(tmp_path / name).pixels
    assert pixels.shape[:2] == upright.shape
    assert np.abs(pixels.reshape(*upright.shape, -1) - upright[..., None].astype(int)).max() <= (
        2 if name == "a.jpg" else 0
    )


# what is refused


def test_missing_empty_folder(tmp_path: Path) -> None:
    assert reason(tmp_path / "absent.png") == "the file does not exist"
    (tmp_path / "void.png").touch()
    assert reason(tmp_path / "void.png") == "the file is empty"
    (tmp_path / "drawer.png").mkdir()
    assert reason(tmp_path / "drawer.png") == "the file cannot be opened"


@pytest.mark.parametrize(
    "content", [b"Dear colleague, " * 50, b"GIF89a" + bytes(200), b"\x89PNG\r\n\x1a\n", b"%PDF-1.4"]
)
def test_what_is_no_image(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "letter.png").write_bytes(content)
    assert reason(tmp_path / "letter.png").startswith("it is not a PNG, JPEG")


@pytest.mark.parametrize(("name", "kind"), [("p.png", "PNG"), ("p.jpg", "JPEG"), ("p.bmp", "BMP"), ("p.tif", "TIFF"),
                                            ("p.webp", "WebP"), ("p.pgm", "PGM")])  # fmt: skip
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated_files(tmp_path: Path, name: str, kind: str, share: float) -> None:
    path = saved(tmp_path, GREY, name)
    whole = path.read_bytes()
    assert decode_image(path).pixels.size
    path.write_bytes(whole[: int(len(whole) * share)])
    assert reason(path) in (f"the {kind} is truncated", f"the {kind} is damaged") or kind == "WebP"


def test_decompression_bombs(tmp_path: Path) -> None:
    for side in (10_001, 50_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
        (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
        assert "100 megapixels" in reason(tmp_path / "bomb.png")


def test_numbers_without_a_range_and_several_pictures(tmp_path: Path) -> None:
    assert "fractional" in reason(saved(tmp_path, SMOOTH.astype(np.float32), "depth.tif"))
    assert "32-bit" in reason(saved(tmp_path, SMOOTH.astype(np.int32), "depth.tif"))
    pages = [Image.fromarray(GREY), Image.fromarray(SMOOTH)]
    assert reason(saved(tmp_path, pages[0], "pages.tif", save_all=True, append_images=pages[1:])) == (
        "it holds several pictures; save each as a file of its own"
    )


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.bmp", "a.webp"])
@given(damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_ends_in_pixels_or_in_a_reason(
    tmp_path_factory: pytest.TempPathFactory, name: str, damage: list[tuple[int, int]]
) -> None:
    path = saved(tmp_path_factory.mktemp("damaged"), SMOOTH, name)
    content = bytearray(path.read_bytes())
    for place, value in damage:
        content[place % len(content)] = value
    path.write_bytes(content)
    try:
        outcome = str(decode_image(path).pixels.dtype)
    except UnreadableImage as error:
        outcome = str(error)
    assert outcome
    assert "/" not in outcome


def test_nothing_written_in_a_picture_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Patient", NAME)
    described = Image.Exif()
    described[0x010E] = NAME
    folder = tmp_path / NAME
    folder.mkdir()
    paths = [saved(folder, GREY, "a.png", pnginfo=notes), saved(folder, GREY, "a.tif", exif=described)]
    caplog.clear()
    caplog.set_level(logging.DEBUG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [f"{vars(decode_image(path))} {decode_image(path).pixels.base!r}" for path in paths]
    assert NAME not in "".join(kept) + caplog.text


def test_silence_ends_when_the_last_thread_leaves() -> None:
    entered, leave, loud = threading.Event(), threading.Event(), []

    def first() -> None:
        with silence_decoders():
            entered.set()
            leave.wait(5)

    def level() -> int:
        return logging.getLogger("pydicom").getEffectiveLevel()

    before, thread = level(), threading.Thread(target=first)
    thread.start()
    entered.wait(5)
    with silence_decoders():
        leave.set()
        thread.join()
        loud.append(level())
        warnings.warn("not heard", stacklevel=1)
    assert loud[0] > logging.CRITICAL
    assert level() == before
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)

"""From a file to 8-bit pixels: PNG, JPEG, BMP, TIFF, WebP, PGM and DICOM. Stacks of images: `stacks.py`.

A file that cannot be read is refused by a short reason that names neither the file nor what is written in it, and never
replaced by something else: reasons end up in reports, and files and their headers carry patients' names.
"""

from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from polyclinic.data.sources.images import (
    TOO_LARGE,
    Bytes,
    DecodedImage,
    UnreadableImage,
    check_size,
    read_head,
    scale_to_bytes,
    silence_decoders,
)

FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")
KINDS = {"PPM": "PGM", "MPO": "JPEG", "WEBP": "WebP"}
GREY = ("1", "L", "LA", "La")
ORIENTATION = 0x0112
UPRIGHT: dict[object, tuple[bool, bool, bool]] = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
"""EXIF orientation: (transpose, then reverse the rows, then reverse the columns)."""
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0


def decode_image(path: Path, bits: int | None = None) -> DecodedImage:
    """Decode an image as it is meant to be displayed: upright, transparency on black, palettes and CMYK as RGB.

    `bits` is the number of bits that 16-bit image files really use (None: all). DICOM and PGM files state it.
    """
    head = read_head(path)
    with silence_decoders():
        if path.suffix.lower() in (".dcm", ".dicom") or head[128:] == b"DICM":
            return _decode_dicom(path)
        return _decode_picture(path, head, bits)


def _decode_dicom(path: Path) -> DecodedImage:
    try:
        dicom = import_module("polyclinic.data.sources.dicom")  # pydicom is optional, and slow to load
    except ImportError:
        raise UnreadableImage('it is a DICOM file; install the reader with pip install "polyclinic[dicom]"') from None
    decoded: DecodedImage = dicom.read_dicom(path)
    return decoded


def _decode_picture(path: Path, head: bytes, bits: int | None) -> DecodedImage:
    kind = "image"
    try:
        # given a path, not a file, Pillow maps uncompressed TIFFs into memory and garbles those that lie on their side
        with path.open("rb") as file, Image.open(file, formats=FORMATS) as image:
            kind = KINDS.get(str(image.format), str(image.format))
            check_size(*image.size)
            # the other pictures of an MPO, a JPEG of some cameras, are previews of the first
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise UnreadableImage("it holds several pictures; save each as a file of its own")
            image.load()
            pixels, depth = _decode_deep_png(path, bits) if _is_deep_colour_png(head) else _to_eight_bit(image, bits)
            pixels = _apply_orientation(pixels, image.getexif().get(ORIENTATION, 1))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(
            "it is not a PNG, JPEG, BMP, TIFF, WebP, PGM or DICOM image, or cut off at its start"
        ) from None
    except Image.DecompressionBombError:
        raise UnreadableImage(TOO_LARGE) from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise UnreadableImage(f"the {kind} is {'truncated' if 'truncated' in str(error) else 'damaged'}") from None
    return DecodedImage(pixels, depth, colour=pixels.ndim == 3)


def _to_eight_bit(image: Image.Image, bits: int | None) -> tuple[Bytes, int]:
    """Return the pixels as bytes, and the stored depth."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _scale_deep_grey(image, bits), 16
    if image.mode in ("I", "F"):
        raise UnreadableImage("its pixels are signed, 32-bit or fractional numbers; save it with 8 or 16 bits")
    depth = _sample_depth(image, bits)
    if image.has_transparency_data:
        rgba = np.array(image.convert("RGBA"))
        pixels = _blend_onto_black(rgba[..., :3], rgba[..., 3:])
        return (pixels[..., 0].copy() if image.mode in GREY else pixels), depth
    return np.array(image.convert("L" if image.mode in GREY else "RGB")), depth


def _scale_deep_grey(image: Image.Image, bits: int | None) -> Bytes:
    values = np.array(image).astype(np.uint16)
    if image.format == "PPM":  # Pillow has stretched it already, by the greatest value that the header states
        return scale_to_bytes(values, 16)
    pixels = scale_to_bytes(values, bits or 16)
    return 255 - pixels if _tiff_tag(image, PHOTOMETRIC) == WHITE_IS_ZERO else pixels


def _sample_depth(image: Image.Image, bits: int | None) -> int:
    samples = _tiff_tag(image, BITS_PER_SAMPLE)
    if isinstance(samples, tuple) and max(samples) > 8:
        if bits not in (None, 16):  # Pillow keeps only the upper eight
            raise UnreadableImage(f"it is a 16-bit colour TIFF, of which {bits} bits cannot be picked; save it as PNG")
        return 16
    return 1 if image.mode == "1" else 8


def _tiff_tag(image: Image.Image, tag: int) -> object:
    return image.tag_v2.get(tag) if image.format == "TIFF" and hasattr(image, "tag_v2") else None


def _is_deep_colour_png(head: bytes) -> bool:
    """Whether a PNG has 16 bits per sample and more than grey, of which Pillow would keep only the upper eight bits."""
    return head.startswith(b"\x89PNG") and head[24:25] == b"\x10" and head[25:26] != b"\x00"


def _decode_deep_png(path: Path, bits: int | None) -> tuple[Bytes, int]:
    import torch
    from torchvision.io import ImageReadMode, decode_png

    packed = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    values: NDArray[np.uint16] = decode_png(packed, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
    has_alpha = values.shape[2] in (2, 4)
    pixels = scale_to_bytes(values[..., :-1] if has_alpha else values, bits or 16)
    if has_alpha:
        pixels = _blend_onto_black(pixels, scale_to_bytes(values[..., -1:], 16))
    return (pixels[..., 0].copy() if pixels.shape[2] == 1 else pixels), 16


def _blend_onto_black(pixels: Bytes, alpha: Bytes) -> Bytes:
    return ((pixels.astype(np.uint16) * alpha + 127) // 255).astype(np.uint8)


def _apply_orientation(pixels: Bytes, orientation: object) -> Bytes:
    transpose, rows, columns = UPRIGHT.get(orientation, (False, False, False))
    turned = pixels.swapaxes(0, 1) if transpose else pixels
    return np.ascontiguousarray(turned[:: -1 if rows else 1, :: -1 if columns else 1])

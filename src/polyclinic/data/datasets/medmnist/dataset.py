"""Small images (28 × 28) of eleven medical tasks; the option `file` says which: chest X-rays by default.

MedMNIST v2: small versions of public medical image sets, one npz file each (Yang et al., Scientific Data, 2023).
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from polyclinic.data.datasets.toolkit import Download, ImageOptions, Listing, NamedDataset, read_npz, read_public_set

ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "dermamnist": (
        "actinic keratoses and intraepithelial carcinoma",
        "basal cell carcinoma",
        "benign keratosis-like lesions",
        "dermatofibroma",
        "melanoma",
        "melanocytic nevi",
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("0", "1", "2", "3", "4"),
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocytes",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "collecting duct, connecting tubule",
        "distal convoluted tubule",
        "glomerular endothelial cells",
        "interstitial endothelial cells",
        "leukocytes",
        "podocytes",
        "proximal tubule segments",
        "thick ascending limb",
    ),
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
}
"""The classes of each file, in the order of its label numbers. ChestMNIST is missing: it has many labels per image."""
ZENODO = "https://zenodo.org/records/10519652/files"
SITES = {"pneumoniamnist": "Guangzhou", "breastmnist": "Cairo"}
"""The files whose images all come from one hospital."""


def describe_download(name: str) -> str:
    return f"download {name}.npz from {ZENODO.removesuffix('/files')} into that folder."


class MedMnistOptions(ImageOptions):
    file: Literal[
        "pneumoniamnist",
        "breastmnist",
        "retinamnist",
        "bloodmnist",
        "dermamnist",
        "octmnist",
        "organamnist",
        "organcmnist",
        "organsmnist",
        "pathmnist",
        "tissuemnist",
    ] = "pneumoniamnist"
    resolution: Literal[28, 64, 128, 224] = 28
    """Side of the published images; those larger than 28 are in files of their own (breastmnist_224.npz)."""
    size: int = Field(28, ge=8, le=2048)


def read_listing(options: MedMnistOptions, folder: Path) -> Listing:
    """List a file, which may also lie in a folder of its own name beside the set's folder."""
    name = options.file if options.resolution == 28 else f"{options.file}_{options.resolution}"
    classes = CLASSES[options.file]
    places = (folder, folder.with_name(options.file))
    candidates = [place / f"{stem}.npz" for place in places for stem in (name, f"{name}_rebuilt")]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)

    def publisher(_: Path) -> Listing | None:
        return read_npz(file, name=name, classes=classes, label_names=classes) if file else None

    found = read_public_set(
        "medmnist", file.parent if file else folder, publisher, describe_download(name), classes=classes
    )
    site = SITES.get(options.file, "")
    return replace(found, records=tuple(replace(record, site=record.site or site) for record in found.records))


DATASET = NamedDataset(
    name="medmnist",
    licence="CC BY 4.0 (DermaMNIST: CC BY-NC 4.0), cite Yang et al. 2023 and the source of the file",
    classes=CLASSES["pneumoniamnist"],
    read=read_listing,
    obtain=describe_download("pneumoniamnist"),
    options=MedMnistOptions,
    downloads=tuple(
        Download(f"{ZENODO}/{name}.npz", "", f"{name}.npz") for name in ("pneumoniamnist", "breastmnist", "retinamnist")
    ),
)

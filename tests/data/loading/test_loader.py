"""From files to a collection: what is wrong is told, counted and stops; what is right arrives, all of it, unchanged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic.core.rng import Stream
from polyclinic.data import NAMED_DATASETS
from polyclinic.data.check import check_listing
from polyclinic.data.loading.cache import cache_folder
from polyclinic.data.loading.loader import draw_records
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import read_folder
from polyclinic.data.sources.npz import read_npz
from tests.data.clinics import NAME, Rows, clinic, listed, loaded, noise
from tests.data.dicoms import RAMP, dataset, save
from tests.data.written import refused

ANEW = "get new copies of these files, or leave them out."
WITHOUT = pytest.mark.parametrize("cache", [True, False])


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return clinic(tmp_path)


# What is wrong: planted, named, counted, the first five shown.


def cut_jpegs(folder: Path, rows: Rows) -> None:
    for number in range(7):
        path = folder / f"{NAME} {number}.jpg"
        Image.fromarray(noise(number, 40, 40)).save(path)
        path.write_bytes(path.read_bytes()[:-300])
        rows[number]["path"] = path.name


def report_as_dicom(folder: Path, rows: Rows) -> None:
    made = dataset(RAMP)
    del made.PixelData, made.Rows, made.Columns
    rows[3]["path"] = save(folder, made).name


def dicom_without_pixels(folder: Path, rows: Rows) -> None:
    made = dataset(RAMP)
    del made.PixelData
    rows[3]["path"] = save(folder, made).name


def no_such_files(folder: Path, rows: Rows) -> None:
    for number in range(2, 8):
        rows[number]["path"] = f"{NAME}.gone{number}.png"


def misspelt(folder: Path, rows: Rows) -> None:
    rows[4]["label"], rows[5]["label"] = "benin", "Benign"


def no_label(folder: Path, rows: Rows) -> None:
    rows[20]["label"] = " "


def one_of_a_kind(folder: Path, rows: Rows) -> None:
    rows[9]["label"] = NAME


def two_of_a_kind(folder: Path, rows: Rows) -> None:
    rows[8]["label"] = rows[9]["label"] = NAME


BENIN = "'benin' (did you mean 'benign'?), 'Benign' (did you mean 'benign'?)"
FAULTS: list[tuple[Callable[[Path, Rows], None], str]] = [
    (cut_jpegs, f"7 files cannot be read: the JPEG is truncated (7) (labels.csv row 2, 3, 4, 5, 6 and 2 more); {ANEW}"),
    (
        report_as_dicom,
        "1 file cannot be read: it holds no picture (it is a report or another document), or ends before it (1) "
        f"(labels.csv row 5); {ANEW}",
    ),
    (
        dicom_without_pixels,
        f"1 file cannot be read: it has no pixel data, or is truncated within them (1) (labels.csv row 5); {ANEW}",
    ),
    (
        no_such_files,
        "6 listed files cannot be found (labels.csv row 4, 5, 6, 7, 8 and 1 more); "
        "put the files there or remove them from the list.",
    ),
    (
        misspelt,
        f"2 labels look misspelt: {BENIN} (labels.csv row 6, 7); "
        "correct them, or declare the classes if this is a class of its own.",
    ),
    (no_label, "1 image has no label (labels.csv row 22); write the labels, or leave these images out."),
    (
        one_of_a_kind,
        "1 class has a single image (the class of labels.csv row 11); "
        "leave the class out, join it with another, or get more images.",
    ),
    (
        two_of_a_kind,
        "1 class has fewer than 3 patients (the class of labels.csv row 10); correct these labels, or declare the "
        "classes if these are some; they may be names in the wrong column.",
    ),
]


@WITHOUT
@pytest.mark.parametrize(("plant", "sentence"), FAULTS)
def test_a_fault_is_told_and_counted_and_stops(
    plant: Callable[[Path, Rows], None], sentence: str, rows: Rows, tmp_path: Path, cache: bool
) -> None:
    plant(tmp_path, rows)
    assert refused(lambda: loaded(listed(tmp_path, rows), cache=cache)) == sentence
    assert not list(cache_folder().glob("*/index.json")), "what could not be read was kept as something else"


def blank(folder: Path, rows: Rows) -> None:
    """Square; and oblong and coloured, which prepared has black bars."""
    Image.new("L", (30, 30), 7).save(folder / rows[4]["path"])
    Image.new("RGB", (30, 20), (9, 99, 200)).save(folder / rows[9]["path"])


def copied_to_another_class(folder: Path, rows: Rows) -> None:
    """Grey as colour, in another format."""
    Image.fromarray(noise(0)).convert("RGB").save(folder / f"{NAME}.bmp")
    rows[2]["path"] = f"{NAME}.bmp"


def listed_twice(folder: Path, rows: Rows) -> None:
    rows.append({**rows[0], "label": "malignant"})


PICTURES: list[tuple[Callable[[Path, Rows], None], str]] = [
    (
        blank,
        "2 images are of one grey value all over (labels.csv row 6, 11); "
        "get new copies of these images, or leave them out.",
    ),
    (copied_to_another_class, "2 images have the same pixels as others, in 1 group: 1 under two labels"),
    (listed_twice, "1 file is listed more than once, under different labels (labels.csv row 2 = labels.csv row 26); "),
]


@pytest.mark.parametrize("channels", [1, 3])
@WITHOUT
@pytest.mark.parametrize(("plant", "sentence"), PICTURES)
def test_what_check_sees_in_pictures_stops_too(
    plant: Callable[[Path, Rows], None], sentence: str, rows: Rows, tmp_path: Path, cache: bool, channels: int
) -> None:
    plant(tmp_path, rows)
    listing = listed(tmp_path, rows, classes=("benign", "malignant"))
    assert not check_listing(listing).may_train
    for _ in range(2):  # the second time prepared images come from the cache
        assert refused(lambda: loaded(listing, cache=cache, channels=channels)).startswith(sentence)
    (finding,) = [finding for finding in check_listing(listing).findings if finding.stops]
    known = listing.exclude_records(dict.fromkeys(finding.positions, "a known fault"))
    assert len(loaded(known, cache=cache, channels=channels)) == len(rows) - len(finding.positions)


def test_what_only_looks_alike_when_prepared_is_no_copy_and_not_blank(rows: Rows, tmp_path: Path) -> None:
    """Pictures that differ in the width of their black borders, and one whose middle is black."""
    for number, width in ((0, 5), (2, 9)):
        Image.fromarray(np.pad(noise(0), ((0, 0), (width, 0)))).save(tmp_path / rows[number]["path"])
    black = np.pad(np.zeros((20, 30), np.uint8), ((0, 0), (20, 20)), constant_values=9)
    Image.fromarray(black).save(tmp_path / rows[5]["path"])
    listing = listed(tmp_path, rows)
    assert check_listing(listing).may_train
    trimmed = loaded(listing, crop_borders=True)
    assert torch.equal(trimmed.images[0], trimmed.images[2])
    assert trimmed.labels[0] != trimmed.labels[2]
    assert not loaded(listing, fit="crop").images[5].any()


def test_faults_of_several_kinds_are_told_together(rows: Rows, tmp_path: Path) -> None:
    for plant in (no_such_files, no_label):
        plant(tmp_path, rows)
    told = refused(lambda: loaded(listed(tmp_path, rows)))
    assert "6 listed files cannot be found" in told
    assert "1 image has no label" in told


def test_reasons_are_counted_apart(rows: Rows, tmp_path: Path) -> None:
    cut_jpegs(tmp_path, rows)
    (tmp_path / rows[10]["path"]).write_bytes(b"")
    told = refused(lambda: loaded(listed(tmp_path, rows)))
    assert "8 files cannot be read: the JPEG is truncated (7), the file is empty (1)" in told


def test_a_broken_stack_counts_every_image_of_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=noise(0, 9, 8, 8), labels=np.arange(9) % 3)
    listing = read_npz(tmp_path / "set.npz", name="stack")
    data = bytearray((tmp_path / "set.npz").read_bytes())
    data[400] ^= 1
    (tmp_path / "set.npz").write_bytes(data)
    told = refused(lambda: loaded(listing))
    assert told.startswith("9 files cannot be read: the file is truncated or damaged (9) (images row 0, 1, 2, 3, 4 and")


@WITHOUT
def test_what_is_left_out_is_left_out_and_nothing_else(rows: Rows, tmp_path: Path, cache: bool) -> None:
    whole = loaded(listed(tmp_path, rows))
    cut_jpegs(tmp_path, rows)
    no_such_files(tmp_path, rows[10:])
    broken = {*range(7), *range(12, 18)}
    listing = listed(tmp_path, rows, ("benign", "malignant")).exclude_records(dict.fromkeys(broken, "broken"))
    found = loaded(listing, cache=cache)
    kept = [number for number in range(24) if number not in broken]
    assert torch.equal(found.images, whole.images[kept])
    assert found.labels.tolist() == whole.labels[kept].tolist()
    assert found.patients == tuple(whole.patients[number] for number in kept)


def test_depths_are_for_check_to_tell_and_are_brought_to_one(rows: Rows, tmp_path: Path) -> None:
    shallow = loaded(listed(tmp_path, rows))
    deep = Image.fromarray(noise(6).astype(np.uint16) * 257)
    deep.save(tmp_path / rows[6]["path"])
    listing = listed(tmp_path, rows)
    (finding,) = [finding for finding in check_listing(listing).findings if finding.kind == "several bit depths"]
    assert (finding.count, finding.where) == (1, ("labels.csv row 8",))
    assert torch.equal(loaded(listing).images, shallow.images)


def test_names_alike_are_for_check_to_tell_and_both_are_loaded(rows: Rows, tmp_path: Path) -> None:
    for number, name in ((0, f"{NAME}.png"), (1, f"{NAME.upper()}.PNG"), (2, f"{NAME}.bmp")):
        Image.fromarray(noise(number)).save(tmp_path / name)
        rows[number]["path"] = name
    (tmp_path / "other").mkdir()
    Image.fromarray(noise(3)).save(tmp_path / "other" / f"{NAME}.png")
    rows[3]["path"] = f"other/{NAME}.png"
    listing = listed(tmp_path, rows)
    (finding,) = [finding for finding in check_listing(listing).findings if finding.kind == "names alike"]
    assert finding.where == ("labels.csv row 2 = labels.csv row 3 = labels.csv row 4",)
    images = loaded(listing, size=20).images
    assert [images[number, 0].numpy().tobytes() for number in range(4)] == [noise(n).tobytes() for n in range(4)]


def test_a_set_in_the_wrong_folder_is_refused(rows: Rows, tmp_path: Path) -> None:
    listed(tmp_path, rows)
    told = refused(
        lambda: NAMED_DATASETS["office_caltech10"].read(NAMED_DATASETS["office_caltech10"].options(), tmp_path)
    )
    assert told.startswith(
        f"The folder {tmp_path} is not that of the set office_caltech10: the labels.csv there lists another set "
        "(its labels are none of: "
    )
    assert re.search(r"; it looks like (\w+ or )*breakhis( or \w+)*\); put each set into a folder of its own: ", told)
    assert "benign" not in told
    listed(tmp_path, [{**row, "label": f"{NAME} {number % 2}"} for number, row in enumerate(rows)])
    assert "looks like" not in refused(lambda: NAMED_DATASETS["mias"].read(NAMED_DATASETS["mias"].options(), tmp_path))
    told = refused(lambda: loaded(listed(tmp_path, rows, classes=("cat", "dog"))))
    assert told.startswith("24 images have a label that is none of the task's classes (labels.csv row 2, 3, 4, 5, 6 ")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "holds no image as <label>/<file>" in refused(lambda: read_folder(tmp_path, name="nothing"))
    nothing = Listing("nothing", tmp_path, (), ())
    assert refused(lambda: loaded(nothing)) == "nothing has no image to use; check where it was loaded from."


def test_files_whose_names_no_computer_likes(tmp_path: Path) -> None:
    """Not UTF-8, as old archives unpack them; and in a table one that is too long for any disk."""
    for seed, label in ((0, "benign"), (3, "malignant")):
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(3):
            path = bytes(tmp_path / "set" / label) + b"/\xe9\xff" + str(number).encode() + b".png"
            with open(path, "wb") as file:
                Image.fromarray(noise(seed + number)).save(file, "PNG")
    assert len(loaded(read_folder(tmp_path / "set", name="old"))) == 6
    table = listed(tmp_path, [{"path": f"{NAME * 20}.png", "label": "benign"}])
    assert refused(lambda: loaded(table)).startswith("1 listed file cannot be found (labels.csv row 2);")


# What is chosen.

TASK = {"sick": ["malignant"], "well": ["benign", "normal"]}


def test_a_task_regroups_labels_and_leaves_others_out(rows: Rows, tmp_path: Path) -> None:
    for number in range(4):
        rows[number]["label"], rows[23 - number]["label"] = "normal", "unclear"
    whole = loaded(listed(tmp_path, rows, classes=("benign", "malignant", "normal", "unclear")))
    found = loaded(listed(tmp_path, rows, classes=("benign", "malignant", "normal", "unclear")), task=TASK)
    assert found.classes == ("sick", "well")
    kept = [number for number, row in enumerate(rows) if row["label"] != "unclear"]
    assert torch.equal(found.images, whole.images[kept])
    said = [found.classes[label] for label in found.labels.tolist()]
    assert said == ["sick" if rows[number]["label"] == "malignant" else "well" for number in kept]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"all": ["benign", "malignant"]}, "The task needs at least two classes"),
        ({"a": ["benign"], "b": ["malignant", "benign"]}, "and each label in only one of them"),
        ({"a": ["benign"], "b": ["cancer"]}, "names the label 'cancer', which clinic does not have; it has benign, "),
    ],
)
def test_an_impossible_task_is_refused(task: dict[str, list[str]], words: str, rows: Rows, tmp_path: Path) -> None:
    one_of_a_kind(tmp_path, rows)
    told = refused(lambda: loaded(listed(tmp_path, rows), task=task))
    assert words in told
    assert NAME not in told


def test_a_task_does_not_swallow_a_misspelt_label(rows: Rows, tmp_path: Path) -> None:
    rows[4]["label"] = "benin"
    listing = listed(tmp_path, rows)
    told = refused(lambda: loaded(listing, task={"sick": ["malignant"], "well": ["benign"]}))
    assert "1 label looks misspelt: 'benin' (did you mean 'benign'?) (labels.csv row 6)" in told
    assert len(loaded(listing, task={"sick": ["malignant"], "well": ["benign", "benin"]})) == 24


def patient_records(sizes: Sequence[int]) -> tuple[Record, ...]:
    owners = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return tuple(Record(Path(f"{number}"), "a", patient=f"p{owner}") for number, owner in enumerate(owners))


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_draws_whole_patients_as_far_as_it_reaches(seed: int) -> None:
    records = patient_records((1, 2, 3, 4, 5, 1, 2, 6))
    size = Counter(record.patient for record in records)
    before: set[Record] = set()
    for limit in range(1, len(records) + 3):
        kept = draw_records(records, limit, Stream(seed))
        assert kept == draw_records(records, limit, Stream(seed))
        assert len(kept) == min(limit, len(records))
        assert list(kept) == sorted(kept, key=records.index)
        assert before <= set(kept), "a larger limit only adds"
        cut = [name for name, count in Counter(record.patient for record in kept).items() if count < size[name]]
        assert len(cut) <= 1, "only the last patient drawn may be cut"
        before = set(kept)
    assert len({draw_records(records, 6, Stream(other)) for other in range(30)}) > 10


def test_a_limit_draws_every_image_alike_where_patients_are_unknown() -> None:
    records = tuple(Record(Path(str(number)), "a") for number in range(10))
    times = Counter(record for seed in range(400) for record in draw_records(records, 5, Stream(seed)))
    assert min(times.values()) > 150, "half of 400, with a standard deviation of 10"
    assert max(times.values()) < 250


def test_a_limit_is_applied_before_anything_is_decoded(rows: Rows, tmp_path: Path) -> None:
    whole, some = loaded(listed(tmp_path, rows)), loaded(listed(tmp_path, rows), limit=9)
    place = {image.numpy().tobytes(): number for number, image in enumerate(whole.images)}
    kept = [place[image.numpy().tobytes()] for image in some.images]
    assert len(some) == 9
    assert some.labels.tolist() == whole.labels[kept].tolist()
    assert some.patients == tuple(whole.patients[number] for number in kept)
    assert sorted(path.stat().st_size for path in cache_folder().glob("*/pixels")) == [9 * 256, 24 * 256]

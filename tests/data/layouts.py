"""Small folders in the layouts of publishers whose datasets are not available to the tests.

Every file name and cell where a publisher puts a patient carries a planted name, which must not appear in any output.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NAME = "Mustermann"


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def touch(root: Path, *names: str) -> None:
    write(root, dict.fromkeys(names, "pixels"))


def table(*rows: str) -> str:
    return "\n".join(rows) + "\n"


CASES = "patient_id,breast_density,left or right breast,image view,abnormality id,pathology,image file path"


def case(kind: str, part: str, patient: str, view: str, lesion: int, pathology: str, series: str) -> str:
    folder = f"{kind}-{part}_{patient}_LEFT_{view}/1.3.study/{series}/000000.dcm"
    return f'{patient},3,LEFT,{view},{lesion},{pathology},"{folder}\n"'


MASS_TRAIN = table(
    CASES,
    case("Mass", "Training", f"P_{NAME}", "CC", 1, "MALIGNANT", "1.3.24515"),
    case("Mass", "Training", f"P_{NAME}", "CC", 2, "BENIGN", "1.3.24515"),
    case("Mass", "Training", f"P_{NAME}", "MLO", 1, "BENIGN_WITHOUT_CALLBACK", "1.3.24516"),
)
MASS_TEST = table(CASES, case("Mass", "Test", "P_00016", "CC", 1, "BENIGN", "1.3.14172"))


def cbis_ddsm(root: Path) -> None:
    """As the retriever saves it: study and series renamed, the series' last digits kept."""
    write(root, {"mass_case_description_train_set.csv": MASS_TRAIN, "mass_case_description_test_set.csv": MASS_TEST})
    series = "07-20-2016-DDSM-NA-74994/1.000000-full mammogram images-24515/1-1.dcm"
    touch(
        root / "manifest-ZkhPvrLo5216730872708713142/CBIS-DDSM",
        f"Mass-Training_P_{NAME}_LEFT_CC/{series}",
        f"Mass-Training_P_{NAME}_LEFT_MLO/{series}",
        f"Mass-Training_P_{NAME}_LEFT_CC_1/{series.replace('full mammogram', 'cropped')}",
        f"Mass-Test_P_00016_LEFT_CC/{series}",
    )


def inbreast(root: Path) -> None:
    header = "Patient ID;Patient age;Laterality;View;Acquisition date;File Name;ACR;Bi-Rads"
    images = {"20586908": "6", "20586934": "4a", "22678622": "1", "22678646": "2", "53586388": "3 "}
    rows = [f"removed;removed;L;CC;201001;{image};     ;{grade}" for image, grade in images.items()]
    write(root, {"INbreast.csv": table(header, *rows)})
    owners = (f"{NAME}6c613a14b80a8591", f"{NAME}6c613a14b80a8591", "61b13c59bcba149e", "61b13c59bcba149e", "01ab")
    touch(
        root / "AllDICOMs",
        *(f"{image}_{owner}_MG_L_CC_ANON.dcm" for image, owner in zip(images, owners, strict=True)),
        f"99999999_{NAME}_MG_L_CC_ANON.dcm",
    )


def covid_qu_ex(root: Path) -> None:
    """Kaggle's archive repeats the collection's folder."""
    for part in ("Train", "Val", "Test"):
        for label in ("COVID-19", "Non-COVID", "Normal"):
            place = root / "Lung Segmentation Data/Lung Segmentation Data" / part / label
            touch(place, f"images/{NAME}_1.png", "images/2.png", f"lung masks/{NAME}_1.png", "lung masks/2.png")
    touch(root / "Infection Segmentation Data/Infection Segmentation Data/Train/Normal", "images/2.png")


def neojaundice(root: Path) -> None:
    touch(root / "images", *(f"{infant}-{view}.jpg" for infant in ("0012", "0022", "0003") for view in (1, 2, 3)))
    touch(root / "images", f"{NAME}.jpg")
    pool = [f"{infant}-{view} {label}" for infant, label in (("0012", 0), ("0022", 1)) for view in (1, 2, 3)]
    write(root, {"fewshot-pool.txt": table(*pool), "test.txt": table(*(f"0003-{view} 0" for view in (1, 2, 3)))})


def aptos2019(root: Path) -> None:
    write(root, {"train.csv": table("id_code,diagnosis", f"{NAME}24f09,2", "001639a390f0,4", "0024cdab0c1e,0")})
    touch(root, f"train_images/{NAME}24f09.png", "train_images/001639a390f0.png", f"train_images/{NAME}.png")
    write(root, {"test.csv": table("id_code", "0005cfc8afb6")})
    touch(root, "test_images/0005cfc8afb6.png")


def retino(root: Path) -> None:
    images = ("20230116125802923001", "20230116125802923002", "20230112085804506", "20230116165508632001")
    touch(root / "images", *(f"{image}.png" for image in images))
    grades = ("0", "1", "2", "4")
    rows = [f"{image}.png,{grade}" for image, grade in zip(images, grades, strict=True)]
    write(root, {"Retino_published_G5.csv": table("image,level", *rows)})


def idrid(root: Path) -> None:
    grading, header = root / "B. Disease Grading", "Image name,Retinopathy grade,Risk of macular edema ,,,"
    training = table(header, "IDRiD_001,3,2,,,", "IDRiD_002,0,0,,,", ",,,,,")
    write(grading, {"2. Groundtruths/a. IDRiD_Disease Grading_Training Labels.csv": training})
    testing = table(header.rstrip(","), "IDRiD_001,4,0")
    write(grading, {"2. Groundtruths/b. IDRiD_Disease Grading_Testing Labels.csv": testing})
    touch(grading / "1. Original Images/a. Training Set", "IDRiD_001.jpg", "IDRiD_002.jpg", f"{NAME}.jpg")
    touch(grading / "1. Original Images/b. Testing Set", "IDRiD_001.jpg")


def tb_montgomery(root: Path) -> None:
    top = root / "MontgomerySet"
    touch(top / "CXR_png", "MCUCXR_0001_0.png", "MCUCXR_0002_0.png", "MCUCXR_0104_1.png", f"{NAME}.png", "Thumbs.db")
    touch(top / "ManualMask/leftMask", "MCUCXR_0001_0.png")
    touch(top / "ClinicalReadings", "MCUCXR_0001_0.txt")


def tb_shenzhen(root: Path) -> None:
    touch(root / "ChinaSet_AllFiles/CXR_png", "CHNCXR_0001_0.png", "CHNCXR_0327_1.png", "CHNCXR_0328_1.png")


def tb_india(root: Path) -> None:
    touch(root / "DatasetA", "Training/px1.jpg", "Training/nx1.jpg", "Training/nx2.jpg", "Testing/px17.jpg")
    touch(root / "DatasetB", "Training/p/px1.dcm", "Testing/n/nx1.dcm")


def rsna_mammography(root: Path) -> None:
    header = "site_id,patient_id,image_id,laterality,view,age,cancer,biopsy,invasive,BIRADS,implant,density,machine_id"
    rows = (
        f"2,{NAME}10006,462822612,L,CC,61.0,0,0,0,,0,,29",
        f"2,{NAME}10006,1459541791,L,MLO,61.0,0,0,0,,0,,29",
        "1,10011,220375232,L,CC,55.0,1,1,1,0.0,0,C,21",
        "1,10013,421254180,R,CC,,0,0,0,,0,B,21",
    )
    write(root, {"train.csv": table(header, *rows)})
    for row in rows:
        cells = row.split(",")
        touch(root, f"train_images/{cells[1]}/{cells[2]}.dcm")


def roboflow_breast(root: Path) -> None:
    touch(root / "train/0", "105_1232990271_png.rf.0d15.jpg", "105_1934323665_png.rf.a1e7.jpg", f"{NAME}_jpg.rf.1.jpg")
    touch(root / "train/0", f"{NAME}_jpg.rf.2.jpg")
    touch(root / "train/1", "10011_220375232_png.rf.ff2f.jpg")
    touch(root / "valid/0", "105_397491913_png.rf.ff2f.jpg")
    touch(root / "test/1", "106_1160585918_png.rf.ddf7.jpg")
    write(root, {"README.roboflow.txt": "exported"})


def breast_ct(root: Path) -> None:
    touch(root / "Cancer", f"{NAME}1.png", "2.png")
    touch(root / "Normal", "1.png", "2.png", "3.png")

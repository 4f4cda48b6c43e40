"""Presets find the cases of published data sets in their true layout and naming."""

import json
import os
import runpy
from pathlib import Path

import nibabel
import numpy as np
import yaml
from PIL import Image
from pytest import MonkeyPatch, fixture, mark, raises, skip

from wardround.data.datasets import (
    list_presets,
    load_preset,
    make_federation_file,
    page,
    read_preset,
    write_labels,
)
from wardround.data.datasets.labels import snap_to_nearest
from wardround.data.federation_file import FederationFile, Source, as_text, check_consistency
from wardround.data.listing import Listing
from wardround.data.proposing.proposal import propose
from wardround.data.readers import READERS
from wardround.data.readers.image_files import read_label
from wardround.data.sources import list_cases, read_source
from wardround.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
WANTED = [
    *("brats19", "brats21", "breast_ultrasound", "fundus", "lgg", "msd", "msd_brain", "msd_heart"),
    *(
        "msd_hippocampus",
        "pancreas_t1",
        "pancreas_t2",
        "polyp",
        "polypgen",
        "prostate",
        "ucsf_pdgm",
        "upenn_gbm",
    ),
]


def touch(root: Path, *paths: str) -> None:
    """Empty files: listing opens none."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def picture(path: Path, values: list[list[int]], kind: str = "uint8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.kron(np.array(values, dtype=kind), np.ones((8, 8), dtype=kind))).save(path)


def names(listing: Listing, client: str) -> list[str]:
    return [entry.name for entry in listing.of(client)]


# Every preset


def test_the_presets_of_the_issue_are_all_here() -> None:
    assert list_presets() == sorted(WANTED)


@mark.parametrize("name", list_presets())
def test_a_preset_tells_what_a_person_needs(name: str) -> None:
    preset = load_preset(name)

    assert preset.licence and preset.get and preset.layout and preset.clients and preset.cases
    assert all("20" in text for text in preset.cite)  # a year
    assert page.describe_dataset(name).rows[-1][1].startswith("wardround data")
    assert abs(sum(preset.splits.ratios) - 1) < 1e-9
    assert preset.prepare.size is None or len(preset.prepare.size) == preset.dimensions


def test_the_list_has_a_row_a_preset() -> None:
    assert [row[0] for row in page.list_datasets().rows] == sorted(WANTED)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with raises(ConfigError, match="Did you mean 'polyp'"):
        load_preset("polyps")


@mark.parametrize("name", [name for name in list_presets() if load_preset(name).reader == "parts"])
def test_a_folder_without_the_data_set_says_what_was_expected(name: str, tmp_path: Path) -> None:
    touch(tmp_path, "somewhere/else.nii.gz")

    with raises(DataError, match="does not hold .* as it is published. Expected: .*datasets show"):
        read_preset(load_preset(name), tmp_path)


def test_the_reference_page_is_current() -> None:
    made = page.make_page()

    assert page.PAGE.read_text(encoding="utf-8") == made, "python -m wardround.data.datasets.page --write"


# One by one, in the true layout


def test_ucsf_pdgm_pairs_four_channels_and_keeps_a_patient_together(tmp_path: Path) -> None:
    for case in ("0004", "0429", "0429_FU003d"):
        stem = f"UCSF-PDGM-{case}"
        ends = ("T1", "T1_bias", "T1c", "T2", "FLAIR", "SWI", "brain_segmentation", "tumor_segmentation")
        touch(tmp_path, *(f"UCSF-PDGM-v5/{stem}_nifti/{stem}_{end}.nii.gz" for end in ends))

    listing = read_preset(load_preset("ucsf_pdgm"), tmp_path)

    assert names(listing, "ucsf_pdgm") == ["UCSF-PDGM-0004", "UCSF-PDGM-0429", "UCSF-PDGM-0429_FU003d"]
    first, later, again = listing.entries
    assert [path.name[15:] for path in first.images] == [
        "FLAIR.nii.gz",
        "T1.nii.gz",
        "T1c.nii.gz",
        "T2.nii.gz",
    ]
    assert first.label is not None and first.label.name == "UCSF-PDGM-0004_tumor_segmentation.nii.gz"
    assert later.group == again.group != first.group
    assert listing.labels == {"necrosis": (1,), "oedema": (2,), "enhancing": (4,)}
    assert listing.regions["whole_tumour"] == (1, 2, 3) and listing.regions["tumour_core"] == (1, 3)


def test_upenn_gbm_takes_the_corrected_label_first(tmp_path: Path) -> None:
    for case in ("UPENN-GBM-00001_11", "UPENN-GBM-00002_11", "UPENN-GBM-00002_21"):
        ends = ("T1", "T1GD", "T2", "FLAIR")
        touch(tmp_path, *(f"NIfTI-files/images_structural/{case}/{case}_{end}.nii.gz" for end in ends))
        touch(tmp_path, f"NIfTI-files/images_structural_unstripped/{case}/{case}_T1_unstripped.nii.gz")
    touch(
        tmp_path,
        "NIfTI-files/images_segm/UPENN-GBM-00002_11_segm.nii.gz",
        "NIfTI-files/automated_segm/UPENN-GBM-00001_11_automated_approx_segm.nii.gz",
        "NIfTI-files/automated_segm/UPENN-GBM-00002_11_automated_approx_segm.nii.gz",
    )

    one, two, later = read_preset(load_preset("upenn_gbm"), tmp_path).entries

    assert one.label is not None and one.label.parent.name == "automated_segm"
    assert two.label is not None and two.label.name == "UPENN-GBM-00002_11_segm.nii.gz"
    assert later.label is None and later.group == two.group and later.columns == {"visit": "21"}
    assert [path.name[19:-7] for path in one.images] == ["FLAIR", "T1", "T1GD", "T2"]


def test_brats19_clients_are_the_institutions_in_the_names(tmp_path: Path) -> None:
    cases = ("HGG/BraTS19_CBICA_AAB_1", "HGG/BraTS19_2013_10_1", "LGG/BraTS19_TCIA10_202_1",
             "HGG/BraTS19_TCIA02_135_1", "HGG/BraTS19_TMC_06290_1")  # fmt: skip
    for case in cases:
        stem = case.partition("/")[2]
        ends = ("flair", "t1", "t1ce", "t2", "seg")
        touch(tmp_path, *(f"MICCAI_BraTS_2019_Data_Training/{case}/{stem}_{end}.nii.gz" for end in ends))

    listing = read_preset(load_preset("brats19"), tmp_path)

    assert listing.clients == ["brats2013", "cbica", "tcia", "tmc"]
    assert names(listing, "tcia") == ["BraTS19_TCIA02_135_1", "BraTS19_TCIA10_202_1"]
    assert listing.of("tcia")[1].columns == {"grade": "LGG", "source": "10"}
    assert [path.name.split("_")[-1] for path in listing.entries[0].images] == [
        "flair.nii.gz", "t1.nii.gz", "t1ce.nii.gz", "t2.nii.gz"]  # fmt: skip


def test_brats21_is_one_site_dealt_to_several(tmp_path: Path) -> None:
    for number in ("00000", "00002"):
        stem = f"BraTS2021_{number}"
        ends = ("flair", "t1", "t1ce", "t2", "seg")
        touch(tmp_path, *(f"BraTS2021_Training_Data/{stem}/{stem}_{end}.nii.gz" for end in ends))

    file = make_federation_file("brats21", tmp_path)

    assert names(read_preset(load_preset("brats21"), tmp_path), "brats21") == [
        "BraTS2021_00000",
        "BraTS2021_00002",
    ]
    assert file.partition.kind == "iid" and file.labels["enhancing"] == (4,)


def decathlon(
    root: Path, folder: str, stems: list[str], modality: dict[str, str], labels: dict[str, str]
) -> None:
    pairs = [{"image": f"./imagesTr/{s}.nii.gz", "label": f"./labelsTr/{s}.nii.gz"} for s in stems]
    for stem in stems:
        touch(
            root / folder, f"imagesTr/{stem}.nii.gz", f"imagesTr/._{stem}.nii.gz", f"labelsTr/{stem}.nii.gz"
        )
    facts = {"name": folder, "modality": modality, "labels": labels, "training": pairs, "test": []}
    (root / folder / "dataset.json").write_text(json.dumps(facts), encoding="utf-8")


@mark.parametrize(
    ("name", "folder", "stem", "modality", "labels"),
    [
        ("msd_brain", "Task01_BrainTumour", "BRATS_001",
         {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
         {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}),
        ("msd_heart", "Task02_Heart", "la_003", {"0": "MRI"}, {"0": "background", "1": "left atrium"}),
        ("msd_hippocampus", "Task04_Hippocampus", "hippocampus_001", {"0": "MRI"},
         {"0": "background", "1": "Anterior", "2": "Posterior"}),
        ("msd", "Task09_Spleen", "spleen_2", {"0": "CT"}, {"0": "background", "1": "spleen"}),
    ],
)  # fmt: skip
def test_a_decathlon_task_is_read_with_the_presets_names(
    name: str, folder: str, stem: str, modality: dict[str, str], labels: dict[str, str], tmp_path: Path
) -> None:
    decathlon(tmp_path, folder, [stem], modality, labels)
    place = tmp_path / folder if name == "msd" else tmp_path  # the task itself, or the folder around it

    listing = read_preset(load_preset(name), place)

    assert [entry.name for entry in listing.entries] == [stem]
    assert len(listing.channels) == len(modality)
    assert sorted(v for own in listing.labels.values() for v in own) == [int(k) for k in labels if k != "0"]
    assert make_federation_file(name, place).sources[0].reader == f"preset:{name}"


def test_a_decathlon_folder_without_its_list_is_refused(tmp_path: Path) -> None:
    with raises(DataError, match="has no dataset.json; give Task02_Heart"):
        read_preset(load_preset("msd_heart"), tmp_path)


def published_polyps(root: Path) -> None:
    touch(
        root,
        "Kvasir-SEG/images/cju0qkwl35piu0993l0dewei2.jpg",
        "Kvasir-SEG/masks/cju0qkwl35piu0993l0dewei2.jpg",
        "Kvasir-SEG/kavsir_bboxes.json",
        *(f"ETIS-LaribPolypDB/ETIS-LaribPolypDB/{n}.tif" for n in (1, 8, 9)),
        *(f"ETIS-LaribPolypDB/Ground Truth/p{n}.tif" for n in (1, 8, 9)),
        *(f"CVC-ColonDB/CVC-ColonDB/{mark}{n}.tiff" for n in (38, 39, 301) for mark in ("", "p", "cp")),
        "CVC-ColonDB/CVC-ColonDB/77.tif",
        "CVC-ColonDB/CVC-ColonDB/p77.tiff",
        *(f"CVC-ClinicDB/{part}/{n}.tif" for n in (25, 26, 612) for part in ("Original", "Ground Truth")),
    )


def test_polyps_of_four_sources_stay_together_by_video(tmp_path: Path) -> None:
    published_polyps(tmp_path)

    listing = read_preset(load_preset("polyp"), tmp_path)

    assert listing.clients == ["clinicdb", "colondb", "etis", "kvasir"]
    assert all(entry.label is not None for entry in listing.entries)
    assert {entry.name: entry.group for entry in listing.of("colondb")} == {
        "301": "colondb_video12", "38": "colondb_video01", "39": "colondb_video02", "77": "colondb_video04",
    }  # fmt: skip
    assert [entry.group[-2:] for entry in listing.of("clinicdb")] == ["01", "02", "29"]
    assert [entry.group for entry in listing.of("etis")] == ["etis_run01", "etis_run01", "etis_run02"]
    assert listing.of("etis")[0].label == tmp_path / "ETIS-LaribPolypDB/Ground Truth/p1.tif"


def test_polyps_as_the_fedevi_authors_repacked_them(tmp_path: Path) -> None:
    folders = ("Kvasir", "ETIS", "CVC-ColonDB", "CVC-ClinicDB")
    touch(tmp_path, *(f"Polyp/{f}/{part}/7.png" for f in folders for part in ("image", "mask")))

    listing = read_preset(load_preset("polyp"), tmp_path)

    assert listing.clients == ["clinicdb", "colondb", "etis", "kvasir"]
    assert all(e.label is not None and e.label.parent.name == "mask" for e in listing.entries)


def test_a_source_that_is_not_there_is_said(tmp_path: Path) -> None:
    touch(tmp_path, "Kvasir-SEG/images/a.jpg", "Kvasir-SEG/masks/a.jpg", "Kvasir-SEG/images/b.jpg")

    notes = " ".join(read_preset(load_preset("polyp"), tmp_path).notes)

    assert "nothing of 'etis' is here" in notes and "1 cases have no label: b" in notes


def test_polypgen_finds_six_centres_and_the_name_with_a_stray_mark(tmp_path: Path) -> None:
    root = "PolypGen2021_MultiCenterData_v3"
    for centre in range(1, 7):
        touch(tmp_path, f"{root}/data_C{centre}/images_C{centre}/100H0050.jpg")
        touch(tmp_path, f"{root}/data_C{centre}/masks_C{centre}/100H0050_mask.jpg")
        touch(tmp_path, f"{root}/data_C{centre}/bbox_image_C{centre}/100H0050_mask_bbox.jpg")
    touch(tmp_path, f"{root}/data_C3/images_C3/C3_EndoCV2021_00489_.jpg")
    touch(tmp_path, f"{root}/data_C3/masks_C3/C3_EndoCV2021_00489_mask.jpg")
    touch(tmp_path, f"{root}/sequenceData/positive/seq1/images_seq1/x.jpg")

    listing = read_preset(load_preset("polypgen"), tmp_path)

    assert listing.clients == [f"c{n}" for n in range(1, 7)]
    assert names(listing, "c3") == ["100H0050", "C3_EndoCV2021_00489"]
    assert all(entry.label is not None for entry in listing.entries) and len(listing.entries) == 7


def breast(root: Path) -> None:
    for kind in ("benign", "malignant", "normal"):
        for end in (".png", "_mask.png"):
            picture(root / f"Dataset_BUSI_with_GT/{kind}/{kind} (1){end}", [[0, 255], [0, 0]])
    picture(root / "Dataset_BUSI_with_GT/benign/benign (4).png", [[9, 9], [9, 9]])
    picture(root / "Dataset_BUSI_with_GT/benign/benign (4)_mask.png", [[255, 0], [0, 0]])
    picture(root / "Dataset_BUSI_with_GT/benign/benign (4)_mask_1.png", [[0, 0], [0, 254]])
    picture(root / "BUSIS/Original/case001.png", [[5, 6], [7, 8]])
    picture(root / "BUSIS/GT/case001_GT.bmp", [[0, 1], [0, 0]])
    picture(root / "UDIAT/BUS/original/000001.png", [[5, 6], [7, 8]])
    picture(root / "UDIAT/BUS/GT/000001.png", [[0, 0], [255, 255]])


def test_breast_ultrasound_leaves_normal_and_many_masked_images_out(tmp_path: Path) -> None:
    breast(tmp_path)

    listing = read_preset(load_preset("breast_ultrasound"), tmp_path)

    assert {client: names(listing, client) for client in listing.clients} == {
        "busi": ["benign (1)", "malignant (1)"], "busis": ["case001"], "udiat": ["000001"],
    }  # fmt: skip
    assert listing.of("busi")[0].columns == {"kind": "benign"}
    assert "1 cases with several masks are left out: benign (4)" in " ".join(listing.notes)


def test_written_labels_join_masks_cut_greys_and_are_a_list(tmp_path: Path) -> None:
    breast(tmp_path / "data")

    written = write_labels("breast_ultrasound", tmp_path / "data", tmp_path / "out")
    file = make_federation_file("breast_ultrasound", tmp_path / "out")
    listing = list_cases(file, tmp_path)

    assert written.num_cases == len(listing.entries) == 5 and file.labels == {"lesion": (1,)}
    masks = {entry.name: read_label(entry.label).data[0, ::8, ::8].tolist()
             for entry in listing.entries if entry.label}  # fmt: skip
    assert masks["benign (4)"] == [[1, 0], [0, 1]]  # both masks, 254 is white
    assert masks["case001"] == [[0, 1], [0, 0]]  # stored as 0 and 1
    assert listing.of("busi")[0].images[0].is_relative_to(tmp_path / "data")
    assert listing.of("busi")[0].columns["kind"] == "benign"


def test_written_labels_do_not_overwrite_and_say_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    touch(tmp_path, "out/mine.txt")

    with raises(DataError, match="not an empty folder"):
        write_labels("polyp", tmp_path, tmp_path / "out")
    with raises(ConfigError, match="can be used as they are"):
        write_labels("prostate", tmp_path, tmp_path / "new")


def test_a_broken_mask_is_left_out_of_written_labels_and_named(tmp_path: Path) -> None:
    breast(tmp_path / "data")
    (tmp_path / "data/UDIAT/BUS/GT/000001.png").write_bytes(b"")

    written = write_labels("breast_ultrasound", tmp_path / "data", tmp_path / "out")

    assert written.num_cases == 4 and "is empty (0 bytes)" in written.notes[-1]


def test_prostate_finds_six_sites_in_either_spelling(tmp_path: Path) -> None:
    for site in ("RUNMC", "BMC", "I2CVB", "UCL", "BIDMC", "HK"):
        mask = "Segmentation" if site == "BMC" else "segmentation"
        touch(tmp_path, f"Prostate/{site}/Case00.nii.gz", f"Prostate/{site}/Case00_{mask}.nii.gz")

    listing = read_preset(load_preset("prostate"), tmp_path)

    assert listing.clients == ["BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"]
    assert all(entry.label is not None and len(entry.images) == 1 for entry in listing.entries)
    assert len({entry.group for entry in listing.entries}) == 6 and listing.labels == {"prostate": (1, 2)}


def fundus(root: Path) -> None:
    for number in range(1, 5):
        picture(root / f"Fundus/Domain{number}/train/ROIs/image/x{number}.png", [[1, 2], [3, 4]])
        picture(root / f"Fundus/Domain{number}/train/ROIs/mask/x{number}.png", [[255, 128], [0, 120]])
    picture(root / "Fundus/Domain1/test/ROIs/image/gdrishtiGS_002.png", [[1, 2], [3, 4]])
    picture(root / "Fundus/Domain1/test/ROIs/mask/gdrishtiGS_002.png", [[255, 128], [0, 128]])


def riga(root: Path) -> None:
    for place in ("BinRushed/BinRushed1/image1", "Magrabia/MagrabiFemale/image1"):
        picture(root / f"RIGA/image/{place}prime.jpg", [[1, 2], [3, 4]])
        for expert in range(1, 7):
            mask = root / f"RIGA/mask/{place}-{expert}.tif"
            picture(mask, [[0, 255], [128, 0]])


def test_fundus_domains_are_four_clients(tmp_path: Path) -> None:
    fundus(tmp_path)

    listing = read_preset(load_preset("fundus"), tmp_path)

    assert listing.clients == ["drishti_gs", "refuge_canon", "refuge_zeiss", "rim_one_r3"]
    assert names(listing, "drishti_gs") == ["gdrishtiGS_002", "x1"]
    assert listing.labels == {"rim": (128,), "cup": (0,)} and listing.regions == {"disc": (1, 2), "cup": (2,)}


def test_fundus_of_six_sources_needs_labels_of_one_meaning(tmp_path: Path) -> None:
    fundus(tmp_path / "data")
    riga(tmp_path / "data")

    with raises(DataError, match="label value 128 is 'rim' in some of its sets and 'cup' in others"):
        read_preset(load_preset("fundus"), tmp_path / "data")
    write_labels("fundus", tmp_path / "data", tmp_path / "out")
    file = make_federation_file("fundus", tmp_path / "out")
    listing = list_cases(file, tmp_path)

    assert len(listing.clients) == 6 and names(listing, "magrabia") == ["MagrabiFemale_image1"]
    masks = {entry.client: read_label(entry.label).data[0, ::8, ::8].tolist()
             for entry in listing.entries if entry.label}  # fmt: skip
    assert masks["refuge_zeiss"] == [[0, 1], [2, 1]] and masks["binrushed"] == [[0, 1], [2, 0]]
    assert file.labels == {"rim": (1,), "cup": (2,)} and file.regions["disc"] == (1, 2)


@mark.parametrize("name", ["pancreas_t1", "pancreas_t2"])
def test_pancreas_centres_are_in_the_names(name: str, tmp_path: Path) -> None:
    stems = ("nyu_12", "CAD_28", "MCF_3", "northwestern_4", "NU5", "AHN05", "ahn_6", "mca_7", "IU_8", "EMC_9")
    for t in ("t1", "t2"):
        files = (f"IPMN_images_masks/{t}/{part}/{s}.nii.gz" for s in stems for part in ("images", "masks"))
        touch(tmp_path, *files)

    listing = read_preset(load_preset(name), tmp_path)

    assert listing.clients == ["AHN", "EMC", "IU", "MCA", "MCF", "NU", "NYU"]
    assert len(listing.entries) == len(stems) and listing.channels == (name[-2:],)
    assert all(name[-2:] in entry.images[0].parts for entry in listing.entries)


def test_pancreas_of_the_earlier_release_is_read_too(tmp_path: Path) -> None:
    for site in ("NYU", "NWU"):
        touch(tmp_path, f"t1/imagesTr/{site}_0001_0000.nii.gz", f"t1/labelsTr/{site}_0001.nii.gz")

    assert read_preset(load_preset("pancreas_t1"), tmp_path).clients == ["NU", "NYU"]


def test_lgg_slices_stay_with_their_patient_and_a_lone_patient_is_held_out(tmp_path: Path) -> None:
    for patient in ("TCGA_CS_4941_19960909", "TCGA_EZ_7264_20010816", "TCGA_HT_A61B_19991127"):
        for number in (1, 10):
            stem = f"kaggle_3m/{patient}/{patient}_{number}"
            touch(tmp_path, f"{stem}.tif", f"{stem}_mask.tif")
    touch(tmp_path, "kaggle_3m/data.csv")

    listing = read_preset(load_preset("lgg"), tmp_path)

    assert listing.clients == ["TCGA_CS", "TCGA_EZ", "TCGA_HT"] and len(listing.entries) == 6
    assert {entry.group for entry in listing.of("TCGA_HT")} == {"TCGA_HT_A61B_19991127"}
    assert make_federation_file("lgg", tmp_path).held_out == ("TCGA_EZ",)


# Hostile and odd folders


def test_a_link_in_a_circle_and_a_copy_do_not_count_twice(tmp_path: Path) -> None:
    touch(tmp_path, "HK/Case00.nii.gz", "HK/Case00_segmentation.nii.gz")
    (tmp_path / "HK/loop").symlink_to(tmp_path)
    touch(tmp_path, "copy/HK/Case00.nii.gz", "copy/HK/Case00_segmentation.nii.gz", "HK/.hidden.nii.gz")

    listing = read_preset(load_preset("prostate"), tmp_path)

    assert [entry.images[0] for entry in listing.entries] == [tmp_path / "HK/Case00.nii.gz"]
    assert "a second time" in " ".join(listing.notes)


def test_a_folder_behind_a_link_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "disk/HK/Case00.nii.gz", "disk/HK/Case00_segmentation.nii.gz", "here/readme.txt")
    (tmp_path / "here/HK").symlink_to(tmp_path / "disk/HK")

    assert read_preset(load_preset("prostate"), tmp_path / "here").clients == ["HK"]


def test_a_case_without_a_channel_is_left_out_and_counted(tmp_path: Path) -> None:
    stem = "BraTS2021_00001"
    touch(tmp_path, *(f"{stem}/{stem}_{end}.nii.gz" for end in ("flair", "t1", "t2", "seg")))
    stem = "BraTS2021_00002"
    touch(tmp_path, *(f"{stem}/{stem}_{end}.nii.gz" for end in ("flair", "t1", "t1ce", "t2", "seg")))

    listing = read_preset(load_preset("brats21"), tmp_path)

    assert names(listing, "brats21") == ["BraTS2021_00002"]
    assert "1 cases lack a channel; left out: BraTS2021_00001" in " ".join(listing.notes)


def test_a_name_that_is_no_name_is_left_out(tmp_path: Path) -> None:
    touch(
        tmp_path, "Kvasir-SEG/images/a\nb.jpg", "Kvasir-SEG/images/{case}.jpg", "Kvasir-SEG/masks/{case}.jpg"
    )

    listing = read_preset(load_preset("polyp"), tmp_path)

    assert names(listing, "kvasir") == ["{case}"]
    assert "cannot be used" in " ".join(listing.notes)


def test_one_client_for_all_tells_equal_names_apart(tmp_path: Path) -> None:
    for site in ("HK", "UCL"):
        touch(tmp_path, f"{site}/Case00.nii.gz", f"{site}/Case00_segmentation.nii.gz")

    listing = read_preset(load_preset("prostate"), tmp_path, client="pooled")

    assert names(listing, "pooled") == ["HK_Case00", "UCL_Case00"]


def test_values_snap_to_the_nearest_level() -> None:
    data = np.array([0, 63, 65, 128, 191, 192, 255])

    assert snap_to_nearest(data, [0, 128, 255]).tolist() == [0, 0, 128, 128, 128, 255, 255]


# With the rest


@fixture
def sites(tmp_path: Path) -> Path:
    """Two prostate sites that open."""
    for site in ("HK", "UCL"):
        for number in range(3):
            volume = np.arange(4 * 4 * 4, dtype=np.float32).reshape(4, 4, 4) + number
            mask = (volume > 30).astype(np.uint8)
            (tmp_path / site).mkdir(exist_ok=True)
            for end, values in (("", volume), ("_segmentation", mask)):
                image = nibabel.Nifti1Image(values, np.eye(4))  # type: ignore[no-untyped-call]
                nibabel.save(image, tmp_path / site / f"Case0{number}{end}.nii.gz")
    return tmp_path


@mark.parametrize("name", ["prostate"])
def test_a_federation_file_is_sound_and_can_be_written(name: str, sites: Path) -> None:
    file = make_federation_file(name, sites)
    check_consistency(file)
    text = as_text(file, sites / "federation.yaml")

    assert "preset:prostate" in text and "licence" in text
    assert file.splits.ratios == (0.7, 0.1, 0.2) and file.prepare.size == (192, 192, 32)


def test_the_reader_preset_works_in_a_federation_file(sites: Path) -> None:
    try:
        listing = read_source(Source(path=sites, reader="preset:prostate"), Path())
    except ConfigError:
        skip("the readers do not know presets yet")

    assert listing.clients == ["HK", "UCL"] and "prostate" not in READERS


def test_presets_are_read_without_looking_outside_their_folder(sites: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(os.sep)

    assert len(read_preset(load_preset("prostate"), sites).entries) == 6


# The example and the how-to


def test_the_example_of_own_data_makes_folders_that_are_recognised(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "examples/own_data/make_hospitals.py"))["make"](tmp_path / "hospitals")
    proposal = propose(made)

    assert proposal.file.clients == tuple(folder.name for folder in made) and len(made) == 2
    assert proposal.file.splits.by == "ratios"


def test_the_federation_file_of_the_how_to_is_sound() -> None:
    text = (ROOT / "docs/how-to/own-data.md").read_text(encoding="utf-8")
    shown = text.partition("```yaml\n")[2].partition("```")[0]
    file = FederationFile.model_validate(yaml.safe_load(shown))
    check_consistency(file)

    assert file.regions["whole"] == (1, 2) and file.prepare.size == (128, 128, 128)

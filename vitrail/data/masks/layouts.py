"""The folder layouts of masks: two folders, VOC, ADE20K, Cityscapes, CamVid, CVAT and LabelMe.

| layout     | images                           | masks                                                             |
|------------|----------------------------------|-------------------------------------------------------------------|
| two folders| `images/x.jpg`                   | `masks/x.png`, or with a suffix: `x_mask.png`                      |
| VOC        | `JPEGImages/x.jpg`               | `SegmentationClass/x.png`, splits in `ImageSets/Segmentation/*.txt`|
| CVAT       | as VOC                           | colours, named in `labelmap.txt`                                   |
| ADE20K     | `images/training/x.jpg`          | `annotations/training/x.png`, 0 is no label                        |
| Cityscapes | `leftImg8bit/train/…/x_leftImg8bit.png` | `gtFine/train/…/x_gtFine_labelTrainIds.png`                 |
| CamVid     | `train/x.png`                    | `trainannot/x.png`                                                 |
| LabelMe    | `x.jpg`                          | `x.json`, polygons                                                 |

Splits may be folders inside or outside of those of images and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitrail.data.folder import SPLITS, files_below, images_below, is_image, stop, subfolders
from vitrail.data.masks.names import CAMVID, CITYSCAPES, CITYSCAPES_IDS, VOC
from vitrail.data.masks.polygons import labelme, labelme_folder
from vitrail.data.masks.raw import COLOUR, MaskFile, RawMask
from vitrail.data.masks.values import Layout
from vitrail.errors import UserError, shortlist, shown
from vitrail.files import read_lines, reading
from vitrail.progress import log

Pairs = list[tuple[Path, RawMask]]

IMAGE_FOLDERS = ("images", "image", "imgs", "img", "jpegimages", "photos", "pictures", "inputs")
MASK_FOLDERS = (
    *("masks", "mask", "labels", "label", "annotations", "annotation", "gt", "groundtruth", "ground_truth"),
    *("segmentation", "segmentations", "segmentationclass", "targets", "semantic"),
)
SUFFIXES = (
    "_mask",
    "_masks",
    "_gt",
    "_label",
    "_labels",
    "_seg",
    "_segmentation",
    "_annotation",
    "_l",
    "-mask",
    "_groundtruth",
)
NAMES_FILE = "classes.txt"  # one name per line, in the order of the values
_LABELMAP = "labelmap.txt"
_MOST_MISSING = 0.5


@dataclass(frozen=True)
class Pictures:
    """Images with their masks, by split, and what the layout says of the masks' values."""

    parts: Mapping[str, Pairs]
    layout: Layout = field(default_factory=Layout)


def find_masks(root: Path) -> Pictures | None:
    """The images and masks of a folder; None if it has no such layout."""
    for reader in (_voc, _cityscapes, _ade20k, _camvid, _two_folders, _labelme):
        found = reader(root)
        if found is not None:
            return replace(found, layout=_named(root, found.layout))
    return None


def _named(root: Path, layout: Layout) -> Layout:
    """The names in `classes.txt`, if there is one and the layout has none of its own."""
    file = root / NAMES_FILE
    if layout.names or not file.is_file():
        return layout
    names = [line for line in read_lines(file, "a list of classes") if line]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{file} names '{twice}' twice. Every class needs its own name.")
    ignored = () if len(names) > 255 else (255,)
    return Layout(dict(enumerate(names)), ignored, f"{file}, one name per line from 0,")


# Two folders ------------------------------------------------------------------------------------------------


def _two_folders(root: Path) -> Pictures | None:
    """`images/[split/]x` and `masks/[split/]x`, or `split/images/x` and `split/masks/x`."""
    pair = _pair(root)
    if pair is not None:
        images, masks = pair
        inner = {SPLITS[f.name.lower()]: f for f in subfolders(images) if f.name.lower() in SPLITS}
        if inner and len(inner) == len(subfolders(images)):
            parts = {split: matched(folder, _inside(masks, folder.name, split)) for split, folder in inner.items()}
        else:
            parts = {"train": matched(images, masks)}
        return Pictures(parts)
    outer = {SPLITS[f.name.lower()]: p for f in subfolders(root) if f.name.lower() in SPLITS and (p := _pair(f))}
    return Pictures({split: matched(*folders) for split, folders in outer.items()}) if outer else None


def _pair(root: Path) -> tuple[Path, Path] | None:
    """The folders of images and masks in a folder."""
    folders = {folder.name.lower(): folder for folder in subfolders(root)}
    images = next((folders[name] for name in IMAGE_FOLDERS if name in folders), None)
    masks = next((folders[name] for name in MASK_FOLDERS if name in folders and _has_masks(folders[name])), None)
    return None if images is None or masks is None else (images, masks)


def _has_masks(folder: Path) -> bool:
    """Whether a folder has pictures: text files of boxes are another layout."""
    return any(images_below(folder, lambda _: None))


def _inside(masks: Path, name: str, split: str) -> Path:
    """The mask folder of a split."""
    for folder in subfolders(masks):
        if folder.name == name or SPLITS.get(folder.name.lower()) == split:
            return folder
    raise UserError(f"The images have a folder '{name}', but {masks} has none. Add the masks of this split.")


def matched(
    images: Path, masks: Path, key: Callable[[str], str] = str, wanted: Callable[[Path], bool] = is_image
) -> Pairs:
    """Each image with the mask of the same name, or of the same name with a suffix such as `_mask`."""
    pictures = sorted(images_below(images, stop), key=Path.as_posix)
    if not pictures:
        raise UserError(f"{images} has no images.")
    found: dict[str, Path] = {}
    for path in sorted((p for p in files_below(masks, stop) if wanted(p)), key=Path.as_posix):
        name = path.relative_to(masks).with_suffix("").as_posix()
        for stem in {key(name), _stem(key(name))}:
            if stem in found and found[stem].suffix != path.suffix and found[stem].stem == path.stem:
                raise UserError(f"{found[stem]} and {path} are masks of one image. Remove one of them.")
            found.setdefault(stem, path)
    pairs: Pairs = []
    missing = []
    for path in pictures:
        name = path.relative_to(images).with_suffix("").as_posix()
        mask = next((found[s] for s in (name, key(name), _stem(key(name)), Path(name).name) if s in found), None)
        if mask is None:
            missing.append(path.name)
        else:
            pairs.append((path, MaskFile(mask)))
    rule = f"a mask has the name of its image, or a suffix ({', '.join(SUFFIXES[:4])}, …)"
    _leave_out(missing, len(pictures), images, f"mask in {masks}", rule)
    unused = len({*found.values()} - {mask.path for _, mask in pairs if isinstance(mask, MaskFile)})
    if unused:
        log.warning("%d masks in %s belong to no image and are ignored.", unused, masks)
    return pairs


def _leave_out(missing: Sequence[str], count: int, images: Path, what: str, rule: str) -> None:
    """Warns of images without an annotation; raises UserError if they are more than half."""
    if len(missing) > _MOST_MISSING * count:
        raise UserError(f"{len(missing)} of {count} images in {images} have no {what}, such as {missing[0]}: {rule}.")
    if missing:
        names = shortlist(missing, 5)
        log.warning("%d of %d images in %s have no %s and are left out: %s.", len(missing), count, images, what, names)


def _stem(name: str) -> str:
    """A mask's name without its suffix."""
    low = name.lower()
    return next((name[: -len(end)] for end in SUFFIXES if low.endswith(end) and len(name) > len(end)), name)


# Data sets --------------------------------------------------------------------------------------------------


def _voc(root: Path) -> Pictures | None:
    images, masks = root / "JPEGImages", root / "SegmentationClass"
    if not masks.is_dir() or not _has_masks(masks):
        return None
    if not images.is_dir():
        raise UserError(f"{root} has SegmentationClass, but no JPEGImages with the images. Add the folder.")
    colours = _labelmap(root / _LABELMAP) if (root / _LABELMAP).is_file() else None
    pairs = {path.stem: (path, mask) for path, mask in matched(images, masks)}
    lists = sorted((root / "ImageSets" / "Segmentation").glob("*.txt"))
    parts: dict[str, Pairs] = {}
    for file in lists:
        split = "train" if file.stem == "default" else SPLITS.get(file.stem)
        if split is None:
            continue
        names = [name for line in read_lines(file, "a list of images") for name in line.split()]
        lost = [name for name in names if Path(name).name not in pairs]
        if lost:
            raise UserError(f"{file} lists '{lost[0]}', which has no image or mask ({len(lost)} of {len(names)}).")
        parts[split] = [pairs[Path(name).name] for name in names]
    parts = parts or {"train": list(pairs.values())}
    if colours is None:
        return Pictures(
            parts, Layout(dict(enumerate(VOC)), (255,), "VOC") if not (root / NAMES_FILE).is_file() else Layout()
        )
    coloured = {
        split: [(path, replace(mask, colours=True)) for path, mask in part if isinstance(mask, MaskFile)]
        for split, part in parts.items()
    }
    return Pictures({split: list(part) for split, part in coloured.items()}, colours)


def _labelmap(file: Path) -> Layout:
    """CVAT's `labelmap.txt`: lines of `name:R,G,B:parts:actions`."""
    names: dict[int, str] = {}
    for number, line in enumerate(read_lines(file, "a map of labels"), start=1):
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition(":")
        try:
            r, g, b = (int(part) for part in rest.split(":")[0].split(","))
            if not 0 <= min(r, g, b) <= max(r, g, b) <= 255:
                raise ValueError
        except ValueError as error:
            raise UserError(f"Line {number} of {file} must be name:R,G,B::, but it is {shown(line)}.") from error
        value = COLOUR + (r << 16) + (g << 8) + b
        if value in names:
            raise UserError(f"{file} gives '{names[value]}' and '{name}' the same colour, {r},{g},{b}.")
        names[value] = name
    return Layout(names, (), str(file))


def _ade20k(root: Path) -> Pictures | None:
    splits = {"training": "train", "validation": "val"}
    if not all((root / kind / "training").is_dir() for kind in ("images", "annotations")):
        return None
    parts = {
        split: matched(root / "images" / name, root / "annotations" / name)
        for name, split in splits.items()
        if (root / "images" / name).is_dir()
    }
    info = root / "objectInfo150.txt"
    names = {value: f"class {value}" for value in range(1, 151)}
    if info.is_file():
        rows = [line.split("\t") for line in read_lines(info, "ADE20K's list of classes")[1:] if line]
        with reading(info, "ADE20K's list of classes"):
            names = {int(row[0]): row[-1].split(",")[0].strip() for row in rows}
    return Pictures(parts, Layout(names, (0, 255), "ADE20K"))


def _cityscapes(root: Path) -> Pictures | None:
    images, masks = root / "leftImg8bit", root / "gtFine"
    if not images.is_dir() or not masks.is_dir():
        return None
    files = [path.name for path in files_below(masks, stop)]
    trained = any(name.endswith("_labelTrainIds.png") for name in files)
    end = "_gtFine_labelTrainIds" if trained else "_gtFine_labelIds"

    def key(name: str) -> str:
        return name.removesuffix("_leftImg8bit").removesuffix(end)

    def wanted(path: Path) -> bool:
        return path.stem.endswith(end)

    parts = {
        SPLITS[folder.name]: matched(folder, masks / folder.name, key, wanted)
        for folder in subfolders(images)
        if folder.name in ("train", "val")
    }
    if not trained:
        log.info("%s has labelIds only: they are mapped to the 19 classes of labelTrainIds.", masks)
        table = {value: CITYSCAPES[k] for value, k in CITYSCAPES_IDS.items()}
        return Pictures(parts, Layout(table, tuple({*range(256)} - {*table}), "Cityscapes"))
    return Pictures(parts, Layout(dict(enumerate(CITYSCAPES)), (255,), "Cityscapes"))


def _camvid(root: Path) -> Pictures | None:
    splits = {folder.name: folder for folder in subfolders(root)}
    parts = {
        SPLITS[name]: matched(folder, splits[f"{name}annot"])
        for name, folder in splits.items()
        if name in SPLITS and f"{name}annot" in splits
    }
    return Pictures(parts, Layout(dict(enumerate(CAMVID)), (11, 255), "CamVid")) if parts else None


def _labelme(root: Path) -> Pictures | None:
    folders = {SPLITS[f.name.lower()]: f for f in subfolders(root) if f.name.lower() in SPLITS} or {"train": root}
    if not all(labelme_folder(folder) for folder in folders.values()):
        return None
    parts, layout = labelme(folders)
    for split, folder in folders.items():
        images = {child.name for child in folder.iterdir() if is_image(child)}
        missing = sorted(images - {path.name for path, _ in parts[split]})
        _leave_out(missing, len(images), folder, "JSON file", "LabelMe's x.json belongs to x.jpg beside it")
    return Pictures(parts, layout)

"""Data sets: sources, splits and image reading, without torch. `preprocess` and `loader` produce tensors."""

from vitrail.data.dataset import ArraySplit, Data, FileSplit, Split
from vitrail.data.images import UnreadableImage, read_image
from vitrail.data.sources import Source, full_name, is_object, is_there, open_data

__all__ = [
    "ArraySplit",
    "Data",
    "FileSplit",
    "Source",
    "Split",
    "UnreadableImage",
    "full_name",
    "is_object",
    "is_there",
    "open_data",
    "read_image",
]

"""Data sets, opened and read without torch; the modules `preprocess` and `loader` make tensors of them."""

from vitrail.data.dataset import ArraySplit, Data, FileSplit, Split
from vitrail.data.images import UnreadableImage, read_image
from vitrail.data.sources import full_name, open_data

__all__ = ["ArraySplit", "Data", "FileSplit", "Split", "UnreadableImage", "full_name", "open_data", "read_image"]

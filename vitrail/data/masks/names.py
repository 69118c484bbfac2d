"""The class names of published data sets, in the order of their values."""

from __future__ import annotations

VOC = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
CITYSCAPES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
# The value of each class in labelIds files, which have 34.
CITYSCAPES_IDS = dict(
    zip((7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33), range(19), strict=True)
)
CAMVID = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian", "bicyclist"),
)

"""Run folders, predictors, and the engines that compute their outputs."""

from typing import Literal

EngineName = Literal[
    "auto", "torch", "packed", "bf16", "openvino"
]  # here, where the command line finds it without torch

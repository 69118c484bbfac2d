"""Run folders, predictors, and the engines that compute their outputs."""

from typing import Literal

# Here, where the command line finds it without importing torch.
EngineName = Literal["auto", "torch", "packed", "bf16", "openvino"]

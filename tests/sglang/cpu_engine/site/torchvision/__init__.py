"""Stand-in for torchvision, whose PyPI build needs CUDA; no test looks at an image."""

from __future__ import annotations

from standin import add_submodules, missing_names

__version__ = "0.0.0"
__getattr__ = missing_names(__name__)

add_submodules(
    __name__,
    ["io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"],
)

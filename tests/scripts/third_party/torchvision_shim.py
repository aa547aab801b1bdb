"""Lets a torchvision built for CUDA be imported by a torch that was not, without its operators."""

import importlib.util
import re
from pathlib import Path

import torch

_libraries = []  # an operator lives as long as its library


def define_operators() -> None:
    """Defines what torchvision looks up while it is imported, if its own library cannot load."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    text = (Path(spec.origin).parent / "_meta_registrations.py").read_text()
    for name in sorted(set(re.findall(r"(?:register_meta\(\"|torchvision::)(\w+)", text))):
        library.define(f"{name}(Tensor x) -> Tensor")
    _libraries.append(library)

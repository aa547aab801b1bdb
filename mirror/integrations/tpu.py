"""``mirror.TPUStrategy``: of a distribution of its own, or a class that says how to install it.

The distribution is mirror-strategy-tpu, and its package ``mirror_tpu``. They are in extras/tpu of
the repository, so a checkout has them without installing them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mirror.base.migration_hints import init_with_hints

_CHECKOUT = Path(__file__).parents[2] / "extras" / "tpu"
_REASON = "not installed: mirror-strategy-tpu; pip install 'mirror-strategy[tpu]'"

if find_spec("mirror_tpu") is None and (_CHECKOUT / "mirror_tpu").is_dir():
    sys.path.append(str(_CHECKOUT))

if TYPE_CHECKING or find_spec("mirror_tpu") is not None:
    from mirror_tpu.strategy import TPUStrategy
    from mirror_tpu.torchax_library import PINS, unavailable_reason
else:
    PINS: dict[str, str] = {}

    @init_with_hints
    class TPUStrategy:
        """Runs whole steps on all TPU devices of this process; its distribution is not installed.

        Raises:
            ModuleNotFoundError: ``pip install 'mirror-strategy[tpu]'`` installs it.
        """

        def __init__(self, devices: Any = None) -> None:
            raise ModuleNotFoundError(
                f"mirror.TPUStrategy needs torchax and jax; {_REASON}", name="mirror_tpu"
            )

    def unavailable_reason() -> str | None:
        """Returns why TPUStrategy cannot be created."""
        return _REASON


__all__ = ["PINS", "TPUStrategy", "unavailable_reason"]

"""The pytest plug-in of mirror: the fixture ``simulated_devices``.

pytest imports this module at every start in an environment that has mirror. So it is a module of
its own, outside the package: it does not import torch until a test asks for the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mirror.testing import SimulatedDeviceNames


@pytest.fixture
def simulated_devices() -> SimulatedDeviceNames:
    """Names of two simulated devices for a strategy; ``simulated_devices(4)``: of four."""
    from mirror.testing import SimulatedDeviceNames

    return SimulatedDeviceNames()

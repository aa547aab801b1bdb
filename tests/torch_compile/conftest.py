"""A fresh compiler that raises an error where it would fall back silently."""

import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # costs seconds
    # A frame that hits the limit silently runs uncompiled; here it fails.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield

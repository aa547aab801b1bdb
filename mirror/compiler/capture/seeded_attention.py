"""Attention in a trace: with dropout, torch makes it of products, and its dropout has seeds.

The fused kernels of GPUs (flash, memory-efficient, cuDNN) draw their dropout from the GPU's
generator, in the kernel, where a compiled step has no seeds for it. Torch's own composition
(``SDPBackend.MATH``) calls ``dropout`` instead, on any device. Simulated devices always use that.
Without dropout torch chooses the kernel.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# The calls, and where they have the probability of their dropout. The second calls the first, but
# no mode of torch sees what a function written in Python calls.
ATTENTION: dict[Any, int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
}


def call_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``func``, one of ``ATTENTION``.

    The flags that choose the kernel are the process's; they are put back at once.
    """
    given = (*args[ATTENTION[func] :][:1], kwargs.get("dropout_p"))
    if not given[0] or kwargs.get("training") is False:
        return func(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)

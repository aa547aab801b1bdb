"""Optimizers, schedulers and what clips gradients, as source with ``{params}`` to fill in.

Rates are small and ``eps`` is large, so that rounding is not blown up by a division.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A class of torch.optim with choices of its options; the first is the simplest.

    Attributes:
        takes: what parameters it takes beside dense floating ones: complex, sparse, half.
        is_sharp: whether it follows the signs of gradients, so that zeros must be exact.
    """

    name: str
    always: str
    options: tuple[str, ...] = ("",)
    takes: frozenset[str] = frozenset({"complex", "half"})
    groups: bool = True
    is_sharp: bool = False
    tolerance: float = 0.0


_COMMON = ("", ", foreach=True", ", foreach=False", ", weight_decay=0.01", ", maximize=True")
_ADAM = (
    *_COMMON,
    ", amsgrad=True",
    ", fused=True",
    ", fused=True, amsgrad=True, weight_decay=0.1",
    ", betas=(0.5, 0.9), amsgrad=True, foreach=True",
)
_ALL = frozenset({"complex", "half", "sparse", "fp16"})

OPTIMIZERS = (
    Optimizer(
        "SGD",
        "lr=0.05",
        (
            *_COMMON,
            ", momentum=0.9",
            ", momentum=0.9, nesterov=True, weight_decay=0.01",
            ", momentum=0.5, dampening=0.3, foreach=True",
            ", momentum=0.9, fused=True",
            ", momentum=0.9, maximize=True",
        ),
        _ALL,
    ),
    Optimizer("Adam", "lr=0.01, eps=1e-5", (*_ADAM, ", decoupled_weight_decay=True")),
    Optimizer("AdamW", "lr=0.01, eps=1e-5", _ADAM),
    Optimizer("Adagrad", "lr=0.02, eps=1e-5", (*_COMMON, ", lr_decay=0.1"), _ALL),
    Optimizer("Adadelta", "lr=0.5, eps=1e-5", (*_COMMON, ", rho=0.5")),
    Optimizer("Adamax", "lr=0.01, eps=1e-5", _COMMON),
    Optimizer("NAdam", "lr=0.01, eps=1e-5", (*_COMMON, ", decoupled_weight_decay=True")),
    Optimizer("RAdam", "lr=0.01, eps=1e-5", _COMMON),
    Optimizer("RMSprop", "lr=0.01, eps=1e-4", (*_COMMON, ", momentum=0.5, centered=True")),
    Optimizer("ASGD", "lr=0.02", (*_COMMON, ", t0=2, lambd=0.01")),
    Optimizer("Rprop", "lr=0.01", ("", ", foreach=True", ", etas=(0.4, 1.3)"), is_sharp=True),
    Optimizer(
        "Adafactor",
        "lr=0.01, eps=(1e-8, 1e-3)",
        ("", ", weight_decay=0.01"),
        frozenset({"half"}),
        is_sharp=True,  # it scales gradients, also those that are zero but for rounding
    ),
    Optimizer(
        "LBFGS",
        "lr=0.3, max_iter=4",
        ("", ", history_size=2", ", line_search_fn='strong_wolfe'"),
        groups=False,
        is_sharp=True,
        tolerance=1e-6,
    ),
)

SCHEDULERS = (
    "StepLR(optimizer, 2, gamma=0.5)",
    "ExponentialLR(optimizer, 0.9)",
    "LambdaLR(optimizer, lambda step: 1 / (1 + step))",
    "MultiplicativeLR(optimizer, lambda step: 0.9)",
    "MultiStepLR(optimizer, [1, 3], gamma=0.3)",
    "CosineAnnealingLR(optimizer, T_max=10)",
    "CosineAnnealingWarmRestarts(optimizer, T_0=2)",
    "LinearLR(optimizer, total_iters=3)",
    "ConstantLR(optimizer, total_iters=2)",
    "PolynomialLR(optimizer, total_iters=9)",
    "OneCycleLR(optimizer, 0.02, total_steps=30, cycle_momentum=False)",
    "CyclicLR(optimizer, 0.001, 0.02, step_size_up=2, cycle_momentum=False)",
    "ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)",
    "SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), "
    "lr_scheduler.ExponentialLR(optimizer, 0.8)], milestones=[2])",
    "ChainedScheduler([lr_scheduler.ConstantLR(optimizer, 0.5, 2), "
    "lr_scheduler.ExponentialLR(optimizer, 0.8)], optimizer)",
)

# Between backward and step. Each works on complex, half and missing gradients.
CLIPS = (
    "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    "nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0, foreach=True)",
    "nn.utils.clip_grad_norm_(list(model.parameters())[1:], 0.1, error_if_nonfinite=True)",
    "nn.utils.clip_grad_value_(model.parameters(), 0.05)",
    "nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float('inf'), foreach=False)",
    "nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, nn.utils.get_total_norm("
    "[p.grad for p in model.parameters() if p.grad is not None]))",
)

# Other things that loops do to gradients there. ``p`` is the parameter, ``{k}`` its number.
GRADIENT_EDITS = (
    "if p.grad is not None and p.grad.abs().max() > 1e9: raise ValueError",
    "if p.grad is not None: p.grad.mul_(0.5)",
    "if p.grad is not None: p.grad = p.grad * 0.5",
    "p.grad = None",
    "p.grad = torch.ones_like(p)",
    "if p.grad is not None: p.grad += 0.01 * p.detach()",
    "if p.grad is not None: p.grad.zero_()",
    "if p.grad is not None: p.grad.data.add_(0.01)",
    "if p.grad is not None: p.grad[0] = 0.1",
    "if p.grad is not None: p.grad.copy_(p.grad.flip(0))",
)

"""Losses over what a linear layer gives: those that N replicas make exactly, and those not."""

import torch
import torch.nn.functional as F
from torch import nn

FEATURES, CLASSES = 6, 5
RAMP = torch.arange(CLASSES).float()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.linear(x)


def labels(h):
    return h.detach().argmax(1)


def dice(m, h):
    p, t = h.sigmoid(), (h.detach() > 0).float()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def vae(h):
    return F.mse_loss(h, RAMP.expand_as(h), reduction="none") - (1 + h - h.square() - h.exp()) / 2


def focal(m, h):
    losses = F.cross_entropy(h, labels(h), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def siamese(m, h):
    both = torch.cat([h, h.sin()])
    return (both[: len(h)] - both[len(h) :]).square().mean()


def chunks(m, h):
    one, other = torch.cat([h, h.sin()]).chunk(2)
    return (one - other).square().mean()


def actor_critic(m, h):
    logs = h.log_softmax(1)
    policy = -(logs[:, 0] * h.detach()[:, 1]).mean()
    return policy + 0.5 * h[:, 1].square().mean() + 0.01 * (logs.exp() * logs).sum(-1).mean()


def uncertain(m, h):
    one, other = m.scale[0], m.scale[1]
    return torch.exp(-one) * h.square().mean() + one + torch.exp(-other) * h.abs().mean() + other


def times(m, h):
    """Of four time steps, which come first."""
    return torch.stack([h, h.sin(), h.cos(), h.tanh()])


def penalty(m):
    return sum(p.square().sum() for p in m.parameters())


def orthogonal(m):
    return (m.linear.weight @ m.linear.weight.T - torch.eye(CLASSES)).square().sum()


def scaled(m, h):
    # Of as many numbers as parts have examples, and of more than a few nodes.
    rows = [p.flatten()[:1] for p in m.parameters() for _ in range(20)]
    return [torch.cat(rows[:n]).sum() for n in (2, 3, 4, 6, 12)]


def of_each(h, indices):
    return [F.mse_loss(h[i], RAMP) for i in indices]


def looped(h, indices):
    """The mean over examples of a loop over some of them; each is counted once where it is."""
    loss = 0
    for one in of_each(h, indices):
        loss = loss + one
    return loss / len(h)


def deep(m, h):
    """Of more paths from the loss to the layer than can be walked."""
    for _ in range(40):
        h = h + h / 40
    return h.square().mean()


EXACT = {
    "loop over examples": lambda m, h: looped(h, range(len(h))),
    "sum over examples": lambda m, h: (
        sum(F.cross_entropy(o[None], t[None]) for o, t in zip(h, labels(h), strict=True)) / len(h)
    ),
    "stacked losses of examples": lambda m, h: torch.stack(of_each(h, range(len(h)))).mean(),
    "joined losses of examples": lambda m, h: (
        torch.cat(
            [F.cross_entropy(h[i : i + 1], labels(h)[i : i + 1])[None] for i in range(len(h))]
        )
    ).mean(),
    "stacked sums of examples": lambda m, h: torch.stack([o.square().sum() for o in h]).mean(),
    "loop over examples, scaled": lambda m, h: 0.3 * looped(h, range(len(h))),
    "loop over examples, and a mean": lambda m, h: looped(h, range(len(h))) + h.abs().mean(),
    "loop over two views": lambda m, h: torch.stack(
        [o.sin().sum() for o in torch.cat([h, h.cos()])]
    ).mean(),
    "stacked examples": lambda m, h: torch.stack([o.sin() for o in h]).softmax(1)[:, 0].mean(),
    "sum by column, divided": lambda m, h: torch.stack([h, h.sin()]).sum(1).mean() / len(h),
    "normalised and permuted": lambda m, h: h.T.log_softmax(0)[1].mean(),
    "times sums of parameters": lambda m, h: (h * sum(scaled(m, h))).mean(),
    "mse": lambda m, h: F.mse_loss(h, torch.zeros_like(h)),
    "l1": lambda m, h: F.l1_loss(h, h.detach() + 1),
    "huber": lambda m, h: F.huber_loss(h, torch.zeros_like(h)),
    "cross entropy": lambda m, h: F.cross_entropy(h, labels(h)),
    "cross entropy, smoothed": lambda m, h: F.cross_entropy(h, labels(h), label_smoothing=0.1),
    "cross entropy, soft": lambda m, h: F.cross_entropy(h, h.detach().softmax(1)),
    "nll": lambda m, h: F.nll_loss(h.log_softmax(1), labels(h)),
    "bce": lambda m, h: F.binary_cross_entropy(h.sigmoid(), (h > 0).float()),
    "bce with logits": lambda m, h: F.binary_cross_entropy_with_logits(
        h, (h > 0).float(), pos_weight=RAMP + 1
    ),
    "kl": lambda m, h: F.kl_div(
        h.log_softmax(1), h.detach().flip(1).softmax(1), reduction="batchmean"
    ),
    "kl by hand": lambda m, h: (
        (h.softmax(1) * (h.log_softmax(1) - RAMP.log_softmax(0))).sum(1).mean()
    ),
    "vae": lambda m, h: vae(h).sum(1).mean(),
    "vae, divided by the examples": lambda m, h: vae(h).sum() / len(h),
    "half a sum, divided by them": lambda m, h: 0.5 * (h.square().sum() / len(h)),
    "focal": focal,
    "triplet": lambda m, h: F.triplet_margin_loss(h, h * 2, h.sin()),
    "cosine embedding": lambda m, h: F.cosine_embedding_loss(h, h.sin(), torch.ones(len(h))),
    "hinge": lambda m, h: F.relu(1 - h).mean(),
    "margin": lambda m, h: F.multi_margin_loss(h, labels(h)),
    "gaussian": lambda m, h: F.gaussian_nll_loss(h, torch.zeros_like(h), h.exp()),
    "poisson": lambda m, h: F.poisson_nll_loss(h, torch.ones_like(h)),
    "log cosh": lambda m, h: torch.log(torch.cosh(h)).mean(),
    "entropy of each": lambda m, h: -(h.softmax(1) * h.log_softmax(1)).sum(1).mean(),
    "norm of each": lambda m, h: h.norm(dim=1).mean(),
    "variance of each": lambda m, h: h.var(1).mean(),
    "maximum of each": lambda m, h: h.max(1).values.mean(),
    "logsumexp of each": lambda m, h: h.logsumexp(1).mean(),
    "each centred": lambda m, h: (h - h.mean(1, keepdim=True)).square().mean(),
    "and squares of parameters": lambda m, h: h.square().mean() + 0.1 * penalty(m),
    "and norms of parameters": lambda m, h: (
        h.square().mean() + 0.1 * sum(p.norm() for p in m.parameters())
    ),
    "and a matrix of parameters": lambda m, h: h.square().mean() + orthogonal(m),
    "and a variance of parameters": lambda m, h: h.square().mean() + m.linear.weight.std(0).sum(),
    "of weighted tasks": lambda m, h: (
        torch.stack([h.square().mean(), F.cross_entropy(h, labels(h))]) * RAMP[1:3]
    ).sum(),
    "of tasks with learnt weights": uncertain,
    "accumulated": lambda m, h: h.square().mean() / 4,
    "scaled": lambda m, h: h.square().mean() * torch.tensor(1024.0),
    "a scale times it": lambda m, h: torch.tensor(1024.0) * h.square().mean(),
    "differences of columns": lambda m, h: (h[:, :, None] - h[:, None]).abs().mean(),
    "differences along a row": lambda m, h: (h[:, 1:] - h[:, :-1]).square().mean(),
    "sums along a row": lambda m, h: h.cumsum(1).square().mean(),
    "one column": lambda m, h: h[:, 0].tanh().mean(),
    "gathered": lambda m, h: -h.log_softmax(1).gather(1, labels(h)[:, None]).mean(),
    "indexed": lambda m, h: -h.log_softmax(1)[torch.arange(len(h)), labels(h)].mean(),
    "two views": siamese,
    "two chunks": chunks,
    "mean over time": lambda m, h: times(m, h).mean(0).square().mean(),
    "last in time": lambda m, h: times(m, h)[-1].square().mean(),
    "maximum over time": lambda m, h: times(m, h).max(0).values.mean(),
    "gan": lambda m, h: F.softplus(-h).mean() + F.softplus(h.sin()).mean(),
    "wgan": lambda m, h: h.mean() - h.sin().mean(),
    "actor and critic": actor_critic,
    "clipped ratio": lambda m, h: -torch.min(h.exp() * 2, h.exp().clamp(0.8, 1.2) * 2).mean(),
    "a parameter's multiple": lambda m, h: m.scale.exp().sum() * h.mean(),
    "a mean by column, weighted": lambda m, h: (h.mean(0) * RAMP).sum(),
    "a mean of means": lambda m, h: h.mean(0).mean(),
    "charbonnier": lambda m, h: (h.square() + 1e-6).sqrt().mean(),
    "einsum with a vector": lambda m, h: torch.einsum("bc,c->b", h, RAMP).tanh().mean(),
    "cosine of each": lambda m, h: (1 - F.cosine_similarity(h, h.sin())).mean(),
    "attention": lambda m, h: ((h[:, :, None] * h[:, None]).softmax(-1) @ h[:, :, None]).mean(),
    "layer norm": lambda m, h: F.layer_norm(h, (CLASSES,)).mul(RAMP).mean(),
    "layers for each": lambda m, h: torch.stack([(o @ m.linear.weight).mean() for o in h]).mean(),
    "many steps": deep,
    "joined values of each": lambda m, h: torch.cat([h[:, 0], h[:, 1].cos()]).mean() + penalty(m),
}


def chosen(value):
    return lambda m, h, k: value(h[k]) if k.any() else h.sum() * 0


def added(value):
    return lambda m, h, k: h.square().mean() + (value(h[k]) if k.any() else 0)


# Losses of the examples that k chooses; a part without any takes another branch.
BRANCHES = {
    "a mean, or a sum": chosen(lambda z: z.square().mean()),
    "a cross entropy, or a sum": chosen(lambda z: F.cross_entropy(z, labels(z))),
    "a mean, or a multiple": lambda m, h, k: h[k].mean() if k.any() else h.mean() * 0,
    "a loop, or a sum": chosen(lambda z: torch.stack([o.square().mean() for o in z]).mean()),
    "a mean, or a constant": lambda m, h, k: h[k].square().mean() if k.any() else h.new_zeros(()),
    "a term, or none": added(lambda z: z.abs().mean()),
    "a term of parameters, or none": lambda m, h, k: (
        h.square().mean() + (penalty(m) if k.any() else 0)
    ),
}


def mean_probability(h):
    return h.softmax(1).mean(0)


def router(m, h):
    """As transformers' mixtures of experts balance their load."""
    chosen = (h.softmax(1) > 0.2).float().mean(0)
    return (chosen * mean_probability(h)).sum() * CLASSES


def covariance(m, h):
    centred = h - h.mean(0)
    return (centred.T @ centred / (len(h) - 1)).pow(2).sum()


def entropy_of_mean(m, h):
    return -(mean_probability(h) * mean_probability(h).log()).sum()


SUMS = {
    "sum": lambda m, h: h.square().sum(),
    "sum of losses": lambda m, h: F.cross_entropy(h, labels(h), reduction="sum"),
    "sum of means": lambda m, h: h.square().mean(1).sum(),
    "sum of single examples": lambda m, h: sum(of_each(h, range(len(h)))),
    "sum by a constant": lambda m, h: h.square().sum() / 7.5,
}

INEXACT = {
    "root of a mean": lambda m, h: h.square().mean().sqrt(),
    "maximum": lambda m, h: h.max(),
    "maxima": lambda m, h: h.amax(0).sum(),
    "largest": lambda m, h: h.square().amax(),
    "product of all": lambda m, h: h.sigmoid().prod(),
    "dice": dice,
    "variance": lambda m, h: h.var(),
    "variances": lambda m, h: h.var(0).mean(),
    "variance by hand": lambda m, h: ((h - h.mean()) ** 2).mean(),
    "variances by hand": lambda m, h: ((h - h.mean(0)) ** 2).mean(),
    "mean square less square mean": lambda m, h: h.square().mean() - h.mean().square(),
    "standard deviation": lambda m, h: h.std(),
    "deviations": lambda m, h: h.std(0).sum(),
    "one of two results": lambda m, h: torch.std_mean(h)[0],
    "hinge of deviations": lambda m, h: F.relu(1 - (h.var(0) + 1e-4).sqrt()).mean(),
    "covariance": lambda m, h: torch.cov(h.T).square().sum(),
    "covariance by hand": covariance,
    "correlation": lambda m, h: torch.corrcoef(h.T).square().mean(),
    "gram matrix": lambda m, h: (h.T @ h / len(h)).square().sum(),
    "gram matrix by einsum": lambda m, h: (
        torch.einsum("bi,bj->ij", h, h).div(len(h)).square().mean()
    ),
    "determinant": lambda m, h: torch.logdet(torch.eye(CLASSES) + h.T @ h / len(h)),
    "entropy of the mean": entropy_of_mean,
    "entropy by torch": lambda m, h: torch.special.entr(mean_probability(h)).sum(),
    "entropy by xlogy": lambda m, h: -torch.xlogy(mean_probability(h), mean_probability(h)).sum(),
    "entropy of a distribution": lambda m, h: torch.distributions.Categorical(
        probs=mean_probability(h)
    ).entropy(),
    "logsumexp": lambda m, h: h.logsumexp((0, 1)),
    "logsumexps": lambda m, h: h.logsumexp(0).mean(),
    "product of means": lambda m, h: h.mean() * h.square().mean(),
    "mean and product of means": lambda m, h: h.square().mean() + h.mean() * h.abs().mean(),
    "router": router,
    "mean and router": lambda m, h: F.cross_entropy(h, labels(h)) + 0.1 * router(m, h),
    "mse of the mean": lambda m, h: F.mse_loss(h.mean(0), torch.ones(CLASSES)),
    "cross entropy of the mean": lambda m, h: F.cross_entropy(
        h.mean(0, keepdim=True), torch.tensor([1])
    ),
    "function of a mean": lambda m, h: h.mean().tanh(),
    "logarithm of a mean": lambda m, h: h.exp().mean().log(),
    "functions of means": lambda m, h: F.gelu(h.mean(0)).sum() + h.mean(0).sin().sum(),
    "norms over examples": lambda m, h: h.norm(dim=0).sum(),
    "nuclear norm": lambda m, h: torch.linalg.matrix_norm(h, "nuc"),
    "softmax over examples": lambda m, h: h.softmax(0).square().sum(1).mean(),
    "distance to the mean": lambda m, h: (h - h.mean(0, keepdim=True)).norm(dim=1).mean(),
    "standardised": lambda m, h: ((h - h.mean()) / (h.std() + 1e-5) * h.square()).mean(),
    "softmax over examples, permuted": lambda m, h: h.T.softmax(1).square().mean(),
    "divided by a number of them": lambda m, h: (h / h.detach().square().sum()).tanh().mean(),
    "the first example": lambda m, h: (h - h[0]).square().mean(),
    "difference of two examples": lambda m, h: h[0].sum() - h[1].sum(),
    "reversed": lambda m, h: (h - h.flip(0)).square().mean(),
    "rolled": lambda m, h: (h * h.roll(1, 0)).mean(),
    "differences of neighbours": lambda m, h: (h[1:] - h[:-1]).square().mean(),
    "sorted": lambda m, h: (h.sort(0).values - torch.linspace(0, 1, len(h))[:, None]).abs().mean(),
    "running sum": lambda m, h: h.cumsum(0).square().mean(),
    "differences of all pairs": lambda m, h: (h[:, None] - h[None]).square().sum(-1).exp().mean(),
}

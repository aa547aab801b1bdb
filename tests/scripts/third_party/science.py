"""Equations, graphs, probabilities, symmetries: torchdiffeq, torch_geometric, gpytorch, e3nn..."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.third_party.program import (
    SIZES,
    Program,
    case,
    classify,
    generator,
    images,
    regress,
    sequences,
    vectors,
)


class Field(nn.Module):
    """A vector field for differential equations."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t, y):
        return self.net(y)


for _way in ("odeint", "odeint_adjoint"):

    @case("torchdiffeq", f"{_way}, rk4")
    def torchdiffeq_model(way=_way):
        import torchdiffeq

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.field, self.head = Field(), nn.Linear(3, 1)

            def forward(self, x):
                times = torch.linspace(0.0, 1.0, 3, dtype=x.dtype)
                return self.head(getattr(torchdiffeq, way)(self.field, x, times, method="rk4")[-1])

        return Program(make=Net, batches=vectors(3), loss=regress)


@case("torchode", "Tsit5 with a fixed step, each example its own problem")
def torchode_model():
    import torchode

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = Field()

        def forward(self, x):
            term = torchode.ODETerm(self.field)
            stepper = torchode.Tsit5(term=term)
            solver = torchode.AutoDiffAdjoint(stepper, torchode.FixedStepController())
            times = torch.linspace(0.0, 1.0, 3, dtype=x.dtype).repeat(len(x), 1)
            problem = torchode.InitialValueProblem(y0=x, t_eval=times)
            start = torch.full((len(x),), 0.1, dtype=x.dtype)
            return solver.solve(problem, dt0=start).ys[:, -1]

    return Program(make=Net, batches=vectors(3, targets=(3,)), loss=regress)


for _name in ("GCNConv", "GATConv", "SAGEConv", "GINConv", "TransformerConv"):

    @case("torch_geometric", f"{_name}, a graph per example", ways=(1, 3))
    def graph_model(name=_name):
        import torch_geometric.nn as gnn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                make = getattr(gnn, name)
                self.conv = make(nn.Linear(4, 8)) if name == "GINConv" else make(4, 8)
                self.head = nn.Linear(8, 1)
                self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]))

            def forward(self, x):
                n, nodes = x.shape[:2]
                steps = nodes * torch.arange(n).repeat_interleave(self.edges.shape[1])
                edges = self.edges.repeat(1, n) + steps
                hidden = self.conv(x.flatten(0, 1), edges).relu().unflatten(0, (n, nodes))
                return self.head(hidden.mean(1))

        return Program(make=Net, batches=vectors(5, 4), loss=regress)


_WHOLE = "its default without batch= goes over all nodes of the batch, as batch normalisation does"
_OVER = {
    "LayerNorm, each graph by batch=": ("graph", True, ""),
    "LayerNorm, mode='node'": ("node", False, ""),
    "LayerNorm without batch=": (
        "graph",
        False,
        f"{_WHOLE}, so each replica normalises over its own part: give it batch=, which tells the "
        "graphs apart, or mode='node'",
    ),
}

for _name, (_mode, _is_told, _remark) in _OVER.items():

    @case("torch_geometric", _name, remark=_remark)
    def graph_norm(mode=_mode, is_told=_is_told):
        import torch_geometric.nn as gnn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.norm = nn.Linear(4, 8), gnn.LayerNorm(8, mode=mode)
                self.head = nn.Linear(8, 1)

            def forward(self, x):
                n, nodes = x.shape[:2]
                graphs = torch.arange(n).repeat_interleave(nodes) if is_told else None
                hidden = self.norm(self.body(x).flatten(0, 1), graphs).relu()
                return self.head(hidden.unflatten(0, (n, nodes)).mean(1))

        return Program(make=Net, batches=vectors(5, 4), loss=regress)


@case("torch_geometric", "DenseGCNConv and MLP")
def dense_graph():
    import torch_geometric.nn as gnn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mlp = gnn.DenseGCNConv(4, 8), gnn.MLP([8, 8, 1], norm=None)

        def forward(self, x):
            adjacent = torch.ones(5, 5, dtype=x.dtype).expand(len(x), 5, 5)
            return self.mlp(self.conv(x, adjacent).mean(1))

    return Program(make=Net, batches=vectors(5, 4), loss=regress)


@case("gpytorch", "exact GP: marginal likelihood of all data", ways=(1,))
def exact_gp():
    import gpytorch

    class Kernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 2)

        def forward(self, x):
            return torch.tanh(self.body(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Kernel()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return self.body(x)

    def loss(model, batch):
        x, y = batch
        covariance = model.kernel(model(x)).to_dense()
        covariance = covariance + 0.1 * torch.eye(len(x), dtype=x.dtype)
        normal = torch.distributions.MultivariateNormal(torch.zeros_like(y[:, 0]), covariance)
        return -normal.log_prob(y[:, 0]) / len(x)

    return Program(make=Net, batches=vectors(3), loss=loss)


@case("gpytorch", "variational GP, predictive log likelihood in run")
def variational_gp():
    import gpytorch

    class GP(gpytorch.models.ApproximateGP):
        def __init__(self):
            points = torch.randn(6, 3, generator=generator())
            strategy = gpytorch.variational.VariationalStrategy(
                self, points, gpytorch.variational.CholeskyVariationalDistribution(6)
            )
            super().__init__(strategy)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gp = GP()
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
            self.gp.variational_strategy.variational_params_initialized.fill_(1)

        def forward(self, x, y):
            elbo = gpytorch.mlls.VariationalELBO(self.likelihood, self.gp, num_data=22)
            return -elbo(self.gp(x), y[:, 0])

    return Program(make=Net, batches=vectors(3), loss=lambda m, b: m(b[0], b[1]))


@case("e3nn", "fully connected tensor product and gate")
def e3nn_model():
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = o3.Linear("2x0e + 1x1o", "4x0e + 2x1o")
            self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "4x0e + 2x1o", "2x0e")
            self.radial = FullyConnectedNet([2, 4, 1], torch.tanh)

        def forward(self, x):
            x = self.linear(x)
            return self.radial(self.product(x, x))

    return Program(make=Net, batches=vectors(5), loss=regress)


@case("neuraloperator", "FNO", remark="complex weights")
def fno():
    from neuralop.models import FNO

    g = generator()
    batches = [
        (torch.randn(n, 1, 16, 16, generator=g), torch.randn(n, 1, 16, 16, generator=g))
        for n in SIZES
    ]
    return Program(
        make=lambda: FNO(
            n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2
        ),
        batches=batches,
        loss=regress,
    )


@case("pykan", "KANLayer")
def kan():
    from kan.KANLayer import KANLayer

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([KANLayer(3, 4, num=3, k=2), KANLayer(4, 1, num=3, k=2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)[0]
            return x

    return Program(make=Net, batches=vectors(3), loss=regress)


@case("nflows", "masked autoregressive flow, log_prob through forward")
def nflows_model():
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform
    from nflows.transforms.permutations import ReversePermutation

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            steps = []
            for _ in range(2):
                steps += [ReversePermutation(3), MaskedAffineAutoregressiveTransform(3, 8)]
            self.flow = Flow(CompositeTransform(steps), StandardNormal([3]))

        def forward(self, x):
            return -self.flow.log_prob(x)

    return Program(make=Net, batches=vectors(3), loss=lambda m, b: m(b[0]).mean())


@case("nflows", "Flow.log_prob, a method called outside forward", ways=(3,))
def nflows_method():
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms import MaskedAffineAutoregressiveTransform

    return Program(
        make=lambda: Flow(MaskedAffineAutoregressiveTransform(3, 8), StandardNormal([3])),
        batches=vectors(3),
        loss=lambda m, b: -m.log_prob(b[0]).mean(),
    )


@case("normflows", "RealNVP, forward_kld", ways=(3,))
def normflows_model():
    import normflows

    def make():
        net = normflows.nets.MLP([1, 8, 2], init_zeros=False)
        flows = [normflows.flows.AffineCouplingBlock(net), normflows.flows.Permute(2)]
        return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(2), flows)

    return Program(make=make, batches=vectors(2), loss=lambda m, b: m.forward_kld(b[0]))


@case("pyro-ppl", "AutoRegressiveNN, a conditional flow, TorchDistribution")
def pyro_model():
    from pyro.distributions.transforms import AffineAutoregressive
    from pyro.nn import AutoRegressiveNN

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.flow = AffineAutoregressive(AutoRegressiveNN(3, [8]))

        def forward(self, x):
            z = self.flow(x)
            density = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
            return density + self.flow.log_abs_det_jacobian(x, z)

    return Program(make=Net, batches=vectors(3), loss=lambda m, b: -m(b[0]).mean())


@case("diffusers", "UNet2DModel, noise given")
def diffusers_unet():
    from diffusers import UNet2DModel

    g = generator()
    batches = [
        (
            torch.randn(n, 1, 8, 8, generator=g),
            torch.randint(100, (n,), generator=g),
            torch.randn(n, 1, 8, 8, generator=g),
        )
        for n in SIZES
    ]
    return Program(
        make=lambda: UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
            block_out_channels=(8, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
        ),
        batches=batches,
        loss=lambda m, b: F.mse_loss(m(b[0], b[1]).sample, b[2]),
    )  # fmt: skip


@case("diffusers", "AutoencoderKL, its mode")
def diffusers_vae():
    from diffusers import AutoencoderKL

    g = generator()
    return Program(
        make=lambda: AutoencoderKL(
            in_channels=1, out_channels=1, block_out_channels=(8,), norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
            latent_channels=2,
        ),
        batches=[(torch.randn(n, 1, 8, 8, generator=g),) for n in SIZES],
        loss=lambda m, b: F.mse_loss(m(b[0]).sample, b[0]),
    )  # fmt: skip


@case("denoising-diffusion-pytorch", "Unet")
def denoising():
    from denoising_diffusion_pytorch import Unet

    g = generator()
    batches = [
        (torch.randn(n, 1, 8, 8, generator=g), torch.randint(9, (n,), generator=g)) for n in SIZES
    ]
    return Program(
        make=lambda: Unet(dim=8, dim_mults=(1, 2), channels=1, flash_attn=False),
        batches=batches,
        loss=lambda m, b: F.mse_loss(m(b[0], b[1]), b[0]),
    )


@case("einops", "Rearrange and Reduce layers, EinMix")
def einops_model():
    from einops.layers.torch import EinMix, Rearrange, Reduce

    def make():
        return nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4),
            EinMix("b n c -> b n d", weight_shape="c d", bias_shape="d", c=48, d=8),
            Reduce("b n d -> b d", "mean"),
            nn.Linear(8, 10),
        )

    return Program(make=make, batches=images(16), loss=classify)


@case("higher", "MAML inside forward: one inner step a task", ways=(3,))
def maml():
    import higher

    def loss(model, batch):
        x, y = batch
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        total = 0.0
        for i in range(len(x)):
            with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (net, steps):
                steps.step(F.mse_loss(net(x[i]), y[i]))
                total = total + F.mse_loss(net(x[i].flip(0)), y[i])
        return total / len(x)

    return Program(
        make=lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)),
        batches=vectors(5, 2, targets=(5, 1)),
        loss=loss,
    )


@case("ncps", "closed-form continuous network (CfC), liquid (LTC)")
def liquid():
    from ncps.torch import LTC, CfC

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = CfC(3, 6), LTC(6, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.second(self.first(x)[0])[0][:, -1])

    return Program(make=Net, batches=vectors(5, 3), loss=regress)


@case("snntorch", "leaky integrate and fire, states in the forward")
def spiking():
    import snntorch

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 1)
            self.spike = snntorch.Leaky(beta=0.9, learn_beta=True)

        def forward(self, x):
            potential = torch.zeros(len(x), 8, dtype=x.dtype)
            total = 0.0
            for step in range(x.shape[1]):
                spikes, potential = self.spike(self.inner(x[:, step]), potential)
                total = total + self.outer(spikes)
            return total

    return Program(make=Net, batches=vectors(5, 3), loss=regress)


@case("pytorch-tcn", "temporal convolutions, weight norm")
def tcn():
    from pytorch_tcn import TCN

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = TCN(3, [4, 4], kernel_size=2, dropout=0.0, use_norm="weight_norm")
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.body(x)[:, :, -1])

    return Program(make=Net, batches=vectors(3, 8), loss=regress)


@case("geoopt", "parameters on the Poincare ball, RiemannianSGD")
def hyperbolic():
    import geoopt

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ball = geoopt.PoincareBall()
            start = 0.1 * torch.randn(50, 2, generator=generator())
            self.points = geoopt.ManifoldParameter(start, manifold=self.ball)

        def forward(self, tokens):
            points = self.points[tokens]
            return self.ball.dist(points[:, 0], points[:, 1])

    return Program(
        make=Net,
        batches=sequences(2),
        loss=lambda m, tokens: m(tokens).square().mean(),
        optimizer=lambda p: geoopt.optim.RiemannianSGD(p, lr=0.01),
    )

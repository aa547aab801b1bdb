"""Image models: timm, torchvision, segmentation, vit-pytorch, kornia, monai, self-supervision."""

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
    vectors,
)

_TIMM = {
    "resnet10t": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "depths": (1, 1), "num_heads": (2, 4)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "gmixer_12_224": {"img_size": 32},
    "regnetx_002": {},
    "poolformer_s12": {},
    "maxvit_pico_rw_256": {"img_size": 64},
}

for _name, _options in _TIMM.items():

    @case("timm", _name)
    def timm_model(name=_name, options=_options):
        import timm

        size = options.get("img_size", 64)
        return Program(
            make=lambda: timm.create_model(name, num_classes=10, **options),
            batches=images(size),
            loss=classify,
        )


for _name in ("resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5", "densenet121"):

    @case("torchvision", _name)
    def torchvision_model(name=_name):
        import torchvision

        options = {"densenet121": {"block_config": (1, 1, 1, 1)}}.get(name, {})
        make = getattr(torchvision.models, name)
        if options:
            make = torchvision.models.DenseNet
        return Program(
            make=lambda: make(num_classes=10, **options), batches=images(64), loss=classify
        )


@case("torchvision", "VisionTransformer")
def torchvision_vit():
    from torchvision.models import VisionTransformer

    options = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 10}
    return Program(
        make=lambda: VisionTransformer(image_size=32, patch_size=8, **options),
        batches=images(),
        loss=classify,
    )


@case("torchvision", "FCN head over resnet18 (IntermediateLayerGetter)")
def torchvision_fcn():
    import torchvision
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    def make():
        body = torchvision.models.resnet18()
        return FCN(IntermediateLayerGetter(body, {"layer2": "out"}), FCNHead(128, 4))

    return Program(make=make, batches=images(), loss=lambda m, b: m(b[0])["out"].square().mean())


for _name in ("Unet", "FPN", "Linknet", "MAnet", "UnetPlusPlus"):

    @case("segmentation_models_pytorch", f"{_name}, DiceLoss outside, mse in run")
    def segmentation(name=_name):
        import segmentation_models_pytorch as smp

        g = generator()
        batches = [
            (torch.randn(n, 3, 64, 64, generator=g), torch.randn(n, 1, 64, 64, generator=g))
            for n in SIZES
        ]
        return Program(
            make=lambda: getattr(smp, name)("resnet18", encoder_weights=None, classes=1),
            batches=batches[1:],
            loss=regress,
        )


@case("segmentation_models_pytorch", "Unet, DiceLoss of the whole batch", ways=(1,))
def segmentation_dice():
    import segmentation_models_pytorch as smp

    dice = smp.losses.DiceLoss("multiclass")
    g = generator()
    batches = [
        (torch.randn(n, 3, 32, 32, generator=g), torch.randint(4, (n, 32, 32), generator=g))
        for n in SIZES
    ]
    return Program(
        make=lambda: smp.Unet("resnet18", encoder_weights=None, classes=4),
        batches=batches,
        loss=lambda m, b: dice(m(b[0]), b[1]),
    )


_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2}


@case("vit-pytorch", "ViT")
def vit():
    from vit_pytorch import ViT

    return Program(make=lambda: ViT(**_VIT, mlp_dim=32), batches=images(), loss=classify)


@case("vit-pytorch", "SimpleViT")
def simple_vit():
    from vit_pytorch import SimpleViT

    return Program(make=lambda: SimpleViT(**_VIT, mlp_dim=32), batches=images(), loss=classify)


@case("vit-pytorch", "CaiT")
def cait():
    from vit_pytorch.cait import CaiT

    return Program(
        make=lambda: CaiT(**_VIT, mlp_dim=32, cls_depth=1), batches=images(), loss=classify
    )


@case("vit-pytorch", "DeepViT")
def deepvit():
    from vit_pytorch.deepvit import DeepViT

    return Program(make=lambda: DeepViT(**_VIT, mlp_dim=32), batches=images(), loss=classify)


@case("vit-pytorch", "CCT")
def cct():
    from vit_pytorch.cct import CCT

    return Program(
        make=lambda: CCT(
            img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3,
            pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=2,
            mlp_ratio=2.0, num_classes=10, positional_embedding="learnable",
        ),
        batches=images(),
        loss=classify,
    )  # fmt: skip


@case("vit-pytorch", "LeViT")
def levit():
    from vit_pytorch.levit import LeViT

    return Program(
        make=lambda: LeViT(
            image_size=32, num_classes=10, stages=2, dim=(16, 32), depth=1, heads=(2, 2),
            mlp_mult=2,
        ),
        batches=images(),
        loss=classify,
    )  # fmt: skip


@case("efficientnet_pytorch", "EfficientNet b0")
def efficientnet():
    from efficientnet_pytorch import EfficientNet

    options = {"num_classes": 10, "drop_connect_rate": 0.0, "dropout_rate": 0.0}
    return Program(
        make=lambda: EfficientNet.from_name("efficientnet-b0", **options),
        batches=images(64),
        loss=classify,
    )


@case("kornia", "augmented, differentiable filters in front of a net")
def kornia_filters():
    import kornia

    def make():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            kornia.filters.GaussianBlur2d((3, 3), (1.0, 1.0)),
            kornia.filters.Sobel(),
            nn.Flatten(),
            nn.Linear(4 * 16 * 16, 10),
        )

    return Program(make=make, batches=images(16), loss=classify)


@case("kornia", "VisionTransformer")
def kornia_vit():
    from kornia.models.vit import VisionTransformer

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = VisionTransformer(32, 8, embed_dim=16, depth=2, num_heads=2)
            self.head = nn.Linear(16, 10)

        def forward(self, x):
            return self.head(self.body(x)[:, 0])

    return Program(make=Net, batches=images(), loss=classify)


@case("monai", "UNet 3d")
def monai_unet():
    from monai.networks.nets import UNet

    g = generator()
    batches = [
        (torch.randn(n, 1, 8, 8, 8, generator=g), torch.randn(n, 2, 8, 8, 8, generator=g))
        for n in SIZES
    ]
    return Program(
        make=lambda: UNet(3, 1, 2, channels=(4, 8), strides=(2,), num_res_units=1),
        batches=batches,
        loss=regress,
    )


@case("monai", "DenseNet, DiceCELoss of whole batches", ways=(1,))
def monai_dice():
    from monai.losses import DiceCELoss
    from monai.networks.nets import BasicUNet

    loss = DiceCELoss(to_onehot_y=True, softmax=True, batch=True)
    g = generator()
    batches = [
        (torch.randn(n, 1, 16, 16, generator=g), torch.randint(3, (n, 1, 16, 16), generator=g))
        for n in SIZES
    ]
    return Program(
        make=lambda: BasicUNet(2, 1, 3, features=(4, 4, 8, 8, 8, 4), norm=("batch", {})),
        batches=batches[:3],
        loss=lambda m, b: loss(m(b[0]), b[1]),
    )


@case("lightly", "NTXentLoss over two views", ways=(1,))
def lightly_simclr():
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    criterion = NTXentLoss()

    def make():
        body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        return nn.Sequential(body, SimCLRProjectionHead(8, 8, 4))

    return Program(
        make=make,
        batches=images(16),
        loss=lambda m, b: criterion(m(b[0]), m(b[0].flip(-1))),
    )


@case("lightly", "BarlowTwinsLoss", ways=(1,))
def lightly_barlow():
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    criterion = BarlowTwinsLoss()

    def make():
        body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        return nn.Sequential(body, BarlowTwinsProjectionHead(8, 8, 4))

    return Program(
        make=make,
        batches=images(16)[:3],
        loss=lambda m, b: 0.1 * criterion(m(b[0]), m(b[0].flip(-1))),
    )


@case("pytorch-metric-learning", "TripletMarginLoss with a miner", ways=(1,))
def metric_learning():
    from pytorch_metric_learning import losses, miners

    criterion, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()

    def loss(model, batch):
        embedded = model(batch[0])
        return criterion(embedded, batch[1], miner(embedded, batch[1]))

    return Program(
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 4)),
        batches=images(8, classes=3)[:3],
        loss=loss,
    )


@case("pytorch-metric-learning", "ArcFaceLoss with trained weights")
def arcface():
    from pytorch_metric_learning import losses

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8))
            self.criterion = losses.ArcFaceLoss(num_classes=3, embedding_size=8)

        def forward(self, x, y):
            return self.criterion(self.body(x), y)

    return Program(make=Net, batches=images(8, classes=3), loss=lambda m, b: m(b[0], b[1]))


@case("vector-quantize-pytorch", "VectorQuantize, codebook by gradient")
def vector_quantize():
    from vector_quantize_pytorch import VectorQuantize

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 8)
            self.quantize = VectorQuantize(
                8, codebook_size=16, learnable_codebook=True, ema_update=False
            )
            self.outer = nn.Linear(8, 6)

        def forward(self, x):
            quantized, _, commitment = self.quantize(self.inner(x))
            return self.outer(quantized), commitment

    def loss(model, batch):
        out, commitment = model(batch[0])
        return F.mse_loss(out, batch[0]) + commitment.mean()

    return Program(make=Net, batches=vectors(4, 6), loss=loss)


@case("vector-quantize-pytorch", "FSQ autoencoder")
def fsq():
    from vector_quantize_pytorch import FSQ

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 3), nn.Linear(3, 6)
            self.quantize = FSQ([8, 5, 5])

        def forward(self, x):
            return self.outer(self.quantize(self.inner(x))[0])

    return Program(make=Net, batches=vectors(4, 6), loss=lambda m, b: F.mse_loss(m(b[0]), b[0]))

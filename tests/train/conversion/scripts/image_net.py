"""A large script's shape: options, meters, momentum, a schedule, checkpoints, accuracy."""

import argparse
import io

import torch
import torch.nn as nn
import torch.optim

parser = argparse.ArgumentParser(description="training")
parser.add_argument("--arch", default="small")
parser.add_argument("--pretrained", action="store_true")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def small():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


models = {"small": small}


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
        return [correct[:k].sum().item() * 100.0 / target.size(0) for k in topk]


def main_worker(args):
    if args.pretrained:
        model = models[args.arch]()
        model.load_state_dict(torch.load("pretrained.pt"))
    else:
        print(f"=> creating model '{args.arch}'")
        model = models[args.arch]()
    device = torch.device("cpu")
    model = model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)

    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=args.momentum,
        weight_decay=1e-4,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    images, labels = torch.randn(13, 3, 6, 6), torch.randint(5, (13,))
    for epoch in range(2):
        losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
        model.train()
        for at in range(0, 13, 5):
            image = images[at : at + 5].to(device, non_blocking=True)
            target = labels[at : at + 5].to(device, non_blocking=True)
            output = model(image)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), image.size(0))
            top1.update(acc1, image.size(0))
            top5.update(acc5, image.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, io.BytesIO())
        print(f"epoch {epoch} {losses.avg:.9f} {top1.avg:.4f} {top5.avg:.4f}")
    model.eval()
    with torch.no_grad():
        print(f"{criterion(model(images), labels).item():.9f}")


def main():
    args = parser.parse_args([])
    torch.manual_seed(3)
    main_worker(args)


if __name__ == "__main__":
    main()

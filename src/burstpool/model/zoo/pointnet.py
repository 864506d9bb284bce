"""PointNet for classification and segmentation of point clouds: Qi et al., CVPR'17.

Both align the points, then their features, by matrices that small networks (T-nets) predict. They return the
logits and the feature matrices; the loss pulls those towards orthogonal ones, as the paper does. The T-nets
and the classifier normalise over the batch alone, so training needs at least two samples a device.

Shapes: N = clouds, P = points, C = channels, K = classes or parts.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import Floats, Integers, Synthetic
from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Rate, Seed, Size

ORTHOGONALITY_WEIGHT = 0.001
"""Share of the feature matrices' distance from orthogonality in the loss, from the paper."""


def pointwise(in_channels: int, out_channels: int, *, relu: bool = True) -> nn.Sequential:
    """The same linear layer for each point, batch norm, ReLU."""
    layers: list[nn.Module] = [nn.Conv1d(in_channels, out_channels, 1), nn.BatchNorm1d(out_channels)]
    return nn.Sequential(*layers, *([nn.ReLU()] if relu else []))


def dense(in_features: int, out_features: int) -> nn.Sequential:
    """A linear layer for the whole cloud, batch norm, ReLU."""
    return nn.Sequential(nn.Linear(in_features, out_features), nn.BatchNorm1d(out_features), nn.ReLU())


def strongest(x_NCP: Tensor) -> Tensor:
    """The largest value of each channel over the points: the order of the points does not matter."""
    return torch.max(x_NCP, dim=2).values


class TNet(nn.Module):
    """Predicts a square matrix [N, C, C] from points [N, C, P]; the identity at first."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.points = nn.Sequential(
            pointwise(channels, width), pointwise(width, 2 * width), pointwise(2 * width, 16 * width)
        )
        self.cloud = nn.Sequential(dense(16 * width, 8 * width), dense(8 * width, 4 * width))
        self.matrix = nn.Linear(4 * width, channels * channels)
        nn.init.zeros_(self.matrix.weight)
        with torch.no_grad():
            self.matrix.bias.copy_(torch.eye(channels).flatten())

    def forward(self, x_NCP: Tensor) -> Tensor:
        matrices: Tensor = self.matrix(self.cloud(strongest(self.points(x_NCP))))
        return matrices.view(-1, self.channels, self.channels)


class PointFeatures(nn.Module):
    """What both networks share: features of each point, of the cloud, and the matrices that aligned them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.align_points = TNet(3, width)
        self.lift = pointwise(3, width)
        self.align_features = TNet(width, width)
        self.middle = pointwise(width, 2 * width)
        self.last = pointwise(2 * width, 16 * width, relu=False)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_NCP: Tensor = self.lift(torch.bmm(self.align_points(points), points))
        matrices_NCC: Tensor = self.align_features(x_NCP)
        local_NCP = torch.bmm(matrices_NCC, x_NCP)
        cloud_NC = strongest(self.last(self.middle(local_NCP)))
        return local_NCP, cloud_NC, matrices_NCC


class PointNetClassifier(nn.Module):
    """Takes points [N, 3, P], returns logits [N, K] and feature matrices [N, C, C]."""

    def __init__(self, *, num_classes: int = 16, width: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        self.features = PointFeatures(width)
        self.classifier = nn.Sequential(
            dense(16 * width, 8 * width),
            nn.Linear(8 * width, 4 * width),
            nn.Dropout(dropout),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, num_classes),
        )

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        _, cloud_NC, matrices_NCC = self.features(points)
        return self.classifier(cloud_NC), matrices_NCC


class PointNetSegmenter(nn.Module):
    """Takes points [N, 3, P], returns logits [N, K, P] and feature matrices [N, C, C]."""

    def __init__(self, *, num_parts: int = 50, width: int = 64) -> None:
        super().__init__()
        self.features = PointFeatures(width)
        self.segmenter = nn.Sequential(
            pointwise(17 * width, 8 * width),
            pointwise(8 * width, 4 * width),
            pointwise(4 * width, 2 * width),
            nn.Conv1d(2 * width, num_parts, 1),
        )

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        local_NCP, cloud_NC, matrices_NCC = self.features(points)
        everywhere_NCP = cloud_NC.unsqueeze(2).expand(-1, -1, points.shape[2])
        return self.segmenter(torch.cat((local_NCP, everywhere_NCP), 1)), matrices_NCC


def pointnet_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross-entropy plus 0.001 ‖I - A·Aᵀ‖² for the feature matrix A, the mean over samples."""
    logits, matrices_NCC = output
    identity = torch.eye(matrices_NCC.shape[1], device=matrices_NCC.device, dtype=matrices_NCC.dtype)
    gap_NCC = identity - torch.bmm(matrices_NCC, matrices_NCC.transpose(1, 2))
    return F.cross_entropy(logits, target) + ORTHOGONALITY_WEIGHT * gap_NCC.square().sum((1, 2)).mean()


def pointnet_classification(
    *,
    lr: Rate = 1e-3,
    num_classes: Size = 16,
    points: Size = 2500,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """PointNet naming the kind of a synthetic point cloud; `width` is the channels of its first layer."""
    return Job(
        model=partial(PointNetClassifier, num_classes=num_classes, width=width),
        loss=pointnet_loss,
        data=Synthetic(inputs=Floats(shape=(3, points)), target=Integers(count=num_classes)),
        optimizer=partial(torch.optim.Adam, lr=lr),
        batch=batch,
        seed=seed,
    )


def pointnet_segmentation(
    *,
    lr: Rate = 1e-3,
    num_parts: Size = 50,
    points: Size = 2500,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """PointNet naming the part that each point of a synthetic cloud belongs to."""
    return Job(
        model=partial(PointNetSegmenter, num_parts=num_parts, width=width),
        loss=pointnet_loss,
        data=Synthetic(inputs=Floats(shape=(3, points)), target=Integers(count=num_parts, shape=(points,))),
        optimizer=partial(torch.optim.Adam, lr=lr),
        batch=batch,
        seed=seed,
    )

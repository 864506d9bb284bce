"""Folding members into another dimension and back: views where the strides allow it, copies where not.

Shapes: M = members, N = samples, C = channels, … = any further dimensions.
"""
# ruff: noqa: N803 -- shape suffixes are capitals

import torch


def channels_folded(x_MNC: torch.Tensor) -> torch.Tensor:
    """[M, N, C, …] → [N, M·C, …]."""
    return x_MNC.transpose(0, 1).flatten(1, 2)


def channels_unfolded(x_NC: torch.Tensor, members: int) -> torch.Tensor:
    """[N, M·C, …] → [M, N, C, …], without a copy."""
    samples, channels, *rest = x_NC.shape
    return x_NC.view(samples, members, channels // members, *rest).transpose(0, 1)


def samples_folded(x_MN: torch.Tensor) -> torch.Tensor:
    """[M, N, …] → [M·N, …]."""
    return x_MN.flatten(0, 1)


def samples_unfolded(x_N: torch.Tensor, members: int) -> torch.Tensor:
    """[M·N, …] → [M, N, …], without a copy."""
    return x_N.view(members, x_N.shape[0] // members, *x_N.shape[1:])


def lies_in_channels(x_MNC: torch.Tensor) -> bool:
    """Whether members lie inside of samples in memory, as a grouped convolution leaves them."""
    return x_MNC.stride(0) < x_MNC.stride(1)


def per_channel(w_MC: torch.Tensor, rank: int) -> torch.Tensor:
    """[M, C] → [M, 1, C, 1, …], to meet one member's [N, C, …] of `rank` dimensions."""
    return w_MC.view(w_MC.shape[0], 1, -1, *[1] * (rank - 2))

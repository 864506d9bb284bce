"""Fusion: train an array of models as one, each as if alone. Start at array.py; the operators are in rules/."""

from burstpool.errors import FusionError
from burstpool.fusion.array import FusedArray, Member, fuse

__all__ = ["FusedArray", "FusionError", "Member", "fuse"]

"""A job to sweep over: a small network that learns handwritten digits.

burstpool sweep examples/digits_mlp.py --set lr=log:1e-3..1 --set momentum=0,0.9 --trials 32 --search asha
"""

import torch
from torch import nn
from torch.nn import functional as F

from burstpool import Job
from burstpool.data import digits


def job(
    lr: float = 0.1, momentum: float = 0.9, width: int = 64, dropout: float = 0.0, batch: int = 32, seed: int = 0
) -> Job:
    """Every argument is a hyper-parameter that `--set` may give."""
    return Job(
        model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)
        ),
        loss=F.cross_entropy,
        data=digits(train=True),
        evaluation=digits(train=False),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        batch=batch,
        seed=seed,
    )

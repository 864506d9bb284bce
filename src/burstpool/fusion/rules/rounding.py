"""Whether factors of 32 bits may be rounded to TF32.

torch has an old and a new setting; asked through the one when the other was set, it raises.
"""

import torch


def products_may_round() -> bool:
    """In matrix products."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def convolutions_may_round() -> bool:
    """In convolutions; without cuDNN these are products."""
    if not torch.backends.cudnn.enabled:
        return products_may_round()
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]

"""Data sets that need no download: real handwritten digits, and samples made up on the spot.

Each is a `torch.utils.data.Dataset` of `(input, target)`, deterministic and picklable. Their tensors collate
with torch's default collate function.
"""

from burstpool.data.handwritten import Digits, digits
from burstpool.data.sequences import Masked, NextToken, TeacherForced
from burstpool.data.synthetic import Floats, Integers, Synthetic

__all__ = ["Digits", "Floats", "Integers", "Masked", "NextToken", "Synthetic", "TeacherForced", "digits"]

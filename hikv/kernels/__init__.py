"""The launchers themselves, for people who want one kernel and no policy.

Each has the signature of `hikv.transfer` without the choice of a path.
"""

from hikv.kernels.copy_boxes import copy_boxes
from hikv.kernels.copy_engine import copy_engine
from hikv.kernels.reference import reference
from hikv.kernels.relayout import relayout
from hikv.kernels.relayout_tma import relayout_tma
from hikv.kernels.staged import staged

__all__ = ["copy_boxes", "copy_engine", "reference", "relayout", "relayout_tma", "staged"]

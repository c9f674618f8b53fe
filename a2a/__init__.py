"""a2a: the expert-parallel exchange of Mixture-of-Experts serving: one-sided dispatch and combine.

The public names. Importing starts no MPI and no CUDA and reads no environment.
"""

from a2a import errors
from a2a.alltoall import Dispatched, MoeAlltoAll
from a2a.config import ExchangeConfig
from a2a.errors import A2AError
from a2a.layout import WorkspaceLayout
from a2a.placement import Placement
from a2a.quant import ScaleLayout

__version__ = "0.1.0"

__all__ = [
    "A2AError",
    "Dispatched",
    "ExchangeConfig",
    "MoeAlltoAll",
    "Placement",
    "ScaleLayout",
    "WorkspaceLayout",
    "errors",
]

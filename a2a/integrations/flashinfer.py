"""integrations/flashinfer: the historical class and functions that engines call, and the newer `moe_ep` interface.

Owns no code: the names of FlashInfer 0.7.2.post1's MoeAlltoAll (the class, the `moe_a2a_*` functions and what their
constructors take), those of `flashinfer.moe_ep`'s one-sided communication, and `install`, which lets code find all of
them where it looks for FlashInfer. Refuses to need FlashInfer.
"""

from a2a.integrations.flashinfer_functions import (
    MOE_A2A_RANK_MASK_WORDS,
    SfLayout,
    moe_a2a_active_rank_mask,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    moe_a2a_sanitize_expert_ids,
    moe_a2a_wrap_payload_tensor_in_workspace,
)
from a2a.integrations.flashinfer_install import install
from a2a.integrations.flashinfer_mapping import CommBackend, Mapping, MnnvlConfig
from a2a.integrations.flashinfer_moe_alltoall import MoeAlltoAll
from a2a.integrations.flashinfer_moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpDispatchResult,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    create_communication,
)

__all__ = [
    "MOE_A2A_RANK_MASK_WORDS",
    "BootstrapConfig",
    "CommBackend",
    "Mapping",
    "MnnvlConfig",
    "MoEEpCommParams",
    "MoEEpDispatchResult",
    "MoeAlltoAll",
    "NVLinkOneSidedAlltoAll",
    "NVLinkOneSidedConfig",
    "SfLayout",
    "create_communication",
    "install",
    "moe_a2a_active_rank_mask",
    "moe_a2a_combine",
    "moe_a2a_dispatch",
    "moe_a2a_get_workspace_size_per_rank",
    "moe_a2a_initialize",
    "moe_a2a_sanitize_expert_ids",
    "moe_a2a_wrap_payload_tensor_in_workspace",
]

"""flashinfer: FlashInfer's one-sided exchange: its class `MoeAlltoAll`, or the newer `moe_ep` communication.

Owns how either is driven. Refuses to install or to build anything itself: FlashInfer compiles its kernels at the first
use, with the CUDA compiler of the machine. Rows of a block come in any order there, so they are told apart by their
router weights, and before graphs are timed all expert rows are made alike.
"""

from __future__ import annotations

import importlib
from typing import ClassVar, Final

import torch
from torch import Tensor

from a2a.bench.implementation import Case, Experts, Implementation, Received
from a2a.comm import Comm
from a2a.errors import Unsupported

_FORMATS: Final = {"fp8_block": "DeepSeekFp8", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4"}
"""Names of wire formats in `flashinfer.fused_moe.QuantFormat`; rows of the others are sent as they are."""
_INVALID: Final = -1


class FlashInfer(Implementation):
    """Dispatch of rows, scales, ids and weights, combine from the workspace; scrubbed ids, as a2a has them."""

    name: ClassVar[str] = "flashinfer"

    @classmethod
    def refusal(cls) -> str | None:
        if not torch.cuda.is_available():
            return "it needs GPUs"
        try:
            _interface()
        except ImportError as error:
            return f"{error}: pip install flashinfer-python"
        return None

    def __init__(self, case: Case, comm: Comm) -> None:
        refusal = self.refusal()
        if refusal is None and case.num_experts % case.ep_size:
            refusal = f"{case.num_experts} experts cannot be shared out among {case.ep_size} ranks"
        if refusal is None and any(map(_repeats, case.workload.topk_weights)):
            refusal = f"routing {case.workload.name} has tokens of equal weights, which could not be told apart"
        if refusal is not None:
            raise Unsupported(transport=self.name, reasons=(refusal,))
        self._case = case
        self._rounds: _OldClass | _NewClass = (_OldClass if _interface() == "class" else _NewClass)(case, comm)
        self._rows = torch.zeros(0)
        self._output = torch.zeros(case.num_tokens, case.hidden_size, dtype=case.row_dtype, device=case.device)
        shape = (case.ep_size, case.max_tokens, case.hidden_size)
        self._payload = (
            None if case.payload_in_workspace else torch.zeros(shape, dtype=case.row_dtype, device=case.device)
        )
        self._got: list[Tensor] = []
        self._area = torch.zeros(0)

    @property
    def transport(self) -> str:
        return f"{self._rounds.kind} {importlib.import_module('flashinfer').__version__}"

    def load(self, rows: Tensor) -> None:
        self._rows = rows

    def dispatch(self) -> None:
        data, scales = self._case.quantize(self._rows)
        self._got = self._rounds.dispatch(data, scales)
        self._area = self._rounds.area() if self._payload is None else self._payload

    def received(self) -> Received:
        """Rows in the order of their source's tokens."""
        case = self._case
        order = self._order()
        counts = tuple(int((order[:, 0] == rank).sum()) for rank in range(case.ep_size))
        data, *scales, ids, weights = (rows[order[:, 0], order[:, 1]] for rows in self._got)
        like, like_scales = case.quantize(torch.zeros(1, case.hidden_size, dtype=case.row_dtype, device=case.device))
        in_scales = None if like_scales is None else scales[0].view(like_scales.dtype)
        return Received(counts, data.view(like.dtype), in_scales, ids, weights)

    def fill(self, experts: Experts) -> None:
        order, got = self._order(), self.received()
        rows = self._case.dequantize(got.data, got.scales)
        self._area[order[:, 0], order[:, 1]] = experts(rows, self._case.ep_rank)

    def settle(self) -> None:
        # Slots change from round to round, so no row may depend on its slot.
        self._area[:] = torch.linspace(-1, 1, self._case.hidden_size, device=self._area.device).to(self._area.dtype)

    def combine(self) -> Tensor:
        self._rounds.combine(self._area, self._payload is None, self._output)
        return self._output

    def close(self) -> None:
        self._got, self._area = [], torch.zeros(0)
        self._rounds.close()

    def _order(self) -> Tensor:
        """int64 `[rows, 2]`: source rank and slot of every row that came, by source and its token."""
        case = self._case
        *_, ids, weights = self._got
        found = []
        for src_rank in range(case.ep_size):
            slots = (ids[src_rank] >= 0).any(dim=-1).nonzero().flatten().cpu()
            sent = case.workload.topk_weights[src_rank]
            tokens = {row.numpy().tobytes(): token for token, row in enumerate(sent)}
            came = weights[src_rank].cpu()
            by_token = sorted(slots.tolist(), key=lambda slot: tokens.get(came[slot].numpy().tobytes(), -1))
            found += [(src_rank, slot) for slot in by_token]
        return torch.tensor(found, dtype=torch.int64, device=ids.device).view(-1, 2)


def _interface() -> str:
    """The name "class" where the historical class exists, else "moe_ep".

    Raises:
        ImportError: neither does.
    """
    try:
        importlib.import_module("flashinfer.comm.trtllm_moe_alltoall").MoeAlltoAll  # noqa: B018
    except (ImportError, AttributeError):
        importlib.import_module("flashinfer.moe_ep").create_communication  # noqa: B018
        return "moe_ep"
    return "class"


class _OldClass:
    """Rounds of `flashinfer.comm.MoeAlltoAll`."""

    kind: Final = "flashinfer MoeAlltoAll"

    def __init__(self, case: Case, comm: Comm) -> None:
        module = importlib.import_module("flashinfer.comm.trtllm_moe_alltoall")
        mapping = importlib.import_module("flashinfer.comm.mapping").Mapping(
            world_size=case.ep_size, rank=case.ep_rank, gpus_per_node=case.ep_size, tp_size=case.ep_size,
            moe_ep_size=case.ep_size,
        )  # fmt: skip
        config = importlib.import_module("flashinfer.comm.mnnvl").MnnvlConfig(comm_backend=comm)
        size = module.moe_a2a_get_workspace_size_per_rank(
            case.ep_size, case.max_tokens, case.dispatch_row_bytes, case.combine_row_bytes
        )
        self._case = case
        self._moe = module.MoeAlltoAll(
            mapping, case.max_tokens, case.top_k, case.num_experts, workspace_size_per_rank=size, mnnvl_config=config
        )

    def dispatch(self, data: Tensor, scales: Tensor | None) -> list[Tensor]:
        """Views `[ep, R, *]`: rows, scales where there are any, ids, weights."""
        case = self._case
        rows = [_raw(data), *([] if scales is None else [_raw(scales)]), case.topk_ids, case.topk_weights]
        got: list[Tensor] = self._moe.dispatch(case.topk_ids, rows, case.max_tokens, _INVALID, len(rows) - 2)
        return got

    def area(self) -> Tensor:
        """Where combine reads without a copy, `[ep, R, H]`."""
        case = self._case
        area: Tensor = self._moe.get_combine_payload_tensor_in_workspace(
            case.max_tokens, case.hidden_size, case.row_dtype
        )
        return area.view(case.ep_size, case.max_tokens, case.hidden_size)

    def combine(self, rows: Tensor, in_workspace: bool, output: Tensor) -> None:
        """Sum into `output`."""
        self._moe.combine(rows, self._case.max_tokens, payload_in_workspace=in_workspace, output=output)

    def close(self) -> None:
        """Give the workspace back, which the class would keep for its next object of the same size."""
        self._moe._reset_workspace()


class _NewClass:
    """Rounds of `flashinfer.moe_ep.create_communication`."""

    kind: Final = "flashinfer moe_ep"

    def __init__(self, case: Case, comm: Comm) -> None:
        module = importlib.import_module("flashinfer.moe_ep")
        format_name = _FORMATS.get(case.format_name)
        formats = importlib.import_module("flashinfer.fused_moe").QuantFormat if format_name else None
        params = module.MoEEpCommParams(
            num_experts=case.num_experts,
            top_k=case.top_k,
            max_tokens_per_rank=case.max_tokens,
            hidden_size=case.hidden_size,
            dtype=case.row_dtype,
            dispatch_format=None if format_name is None else getattr(formats, format_name),
            invalid_expert_id=_INVALID,
        )
        bootstrap = module.BootstrapConfig(
            world_size=case.ep_size, rank=case.ep_rank, device=torch.cuda.current_device()
        )
        # Rows padded to a multiple are longer than the format alone would have them.
        config = module.NVLinkOneSidedConfig(
            extra_payload_bytes_per_token=max(0, case.wire_row_bytes - params.dispatch_bytes_per_token),
            comm_backend=comm,
        )
        self._case = case
        self._moe = module.create_communication(bootstrap, params, backend=config)

    def dispatch(self, data: Tensor, scales: Tensor | None) -> list[Tensor]:
        """As of `_OldClass`."""
        case = self._case
        got = self._moe.dispatch(
            data if scales is None else _raw(data),
            case.topk_ids,
            case.topk_weights,
            hidden_states_scale=None if scales is None else _raw(scales),
            runtime_max_tokens_per_rank=case.max_tokens,
        )
        rows = [got.hidden_states, *([] if scales is None else [got.hidden_states_scale])]
        return [each.view(case.ep_size, case.max_tokens, -1) for each in (*rows, got.topk_ids, got.topk_weights)]

    def area(self) -> Tensor:
        """As of `_OldClass`."""
        case = self._case
        area: Tensor = self._moe.get_combine_input_buffer(case.row_dtype)
        return area.view(case.ep_size, case.max_tokens, case.hidden_size)

    def combine(self, rows: Tensor, in_workspace: bool, output: Tensor) -> None:
        """As of `_OldClass`."""
        self._moe.combine(rows, output=output)

    def close(self) -> None:
        """Collective there, as here."""
        self._moe.destroy()


def _repeats(weights: Tensor) -> bool:
    return len({row.numpy().tobytes() for row in weights}) < len(weights)


def _raw(rows: Tensor) -> Tensor:
    """Bytes where the element type is one of 8 bits: it is copied, and not every binding knows it."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


PEER = FlashInfer

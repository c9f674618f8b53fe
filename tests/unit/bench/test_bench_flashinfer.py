"""The FlashInfer peer driven against stand-ins of both of its interfaces, whose slots come in any order."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from a2a.bench.implementation import Case
from a2a.bench.peers import peer
from a2a.bench.sweep import checked_round
from a2a.bench.workload import Workload, workload
from a2a.comm.protocol import SingleComm
from a2a.errors import Unsupported


class Rows:
    """One rank's exchange with itself: valid rows in any order, ids of the others -1, sums by slot."""

    def __init__(self, num_tokens: int, num_experts: int) -> None:
        self.capacity, self.num_experts, self.calls = num_tokens, num_experts, 0
        self.area: torch.Tensor | None = None

    def dispatch(self, ids: torch.Tensor, payloads: list[torch.Tensor], ids_payload: int) -> list[torch.Tensor]:
        self.calls += 1
        hit = ((ids >= 0) & (ids < self.num_experts)).any(1).nonzero().flatten()
        self.tokens = hit[torch.randperm(len(hit), generator=torch.Generator().manual_seed(self.calls))]
        self.count = ids.shape[0]
        out = []
        for index, rows in enumerate(payloads):
            view = torch.full((1, self.capacity, rows.shape[1]), 77).to(rows.dtype)
            if index == ids_payload:
                view.fill_(-1)
            view[0, : len(hit)] = rows[self.tokens]
            out.append(view)
        return out

    def combine(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        output.zero_()
        output[self.tokens] = rows.view(-1, rows.shape[-1])[: len(self.tokens)] + 0


class MoeAlltoAll(Rows):
    def __init__(self, mapping: Any, max_num_tokens: int, top_k: int, num_experts: int, **more: Any) -> None:
        super().__init__(max_num_tokens, num_experts)
        assert (
            mapping.moe_ep_size == 1 and more["workspace_size_per_rank"] == 4321 and more["mnnvl_config"].comm_backend
        )

    def dispatch(self, ids: Any, payloads: Any, most: int, invalid: int, index: int) -> Any:  # type: ignore[override]
        assert invalid == -1 and most == self.capacity and payloads[index] is ids
        return super().dispatch(ids, payloads, index)

    def get_combine_payload_tensor_in_workspace(self, most: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        self.area = torch.zeros(1, most, hidden, dtype=dtype) if self.area is None else self.area
        return self.area

    def combine(self, rows: Any, most: int, payload_in_workspace: bool, output: Any) -> None:  # type: ignore[override]
        assert payload_in_workspace == (rows.data_ptr() == self.area.data_ptr() if self.area is not None else False)
        super().combine(rows, output)

    def _reset_workspace(self) -> None:
        self.capacity = 0


class Communication(Rows):
    def __init__(self, bootstrap: Any, params: Any, backend: Any) -> None:
        super().__init__(params.max_tokens_per_rank, params.num_experts)
        self.hidden, self.scaled = params.hidden_size, params.dispatch_format is not None
        assert bootstrap.world_size == 1 and backend.comm_backend

    def dispatch(self, hidden: Any, ids: Any, weights: Any, **more: Any) -> Any:  # type: ignore[override]
        scales = more["hidden_states_scale"]
        assert (scales is not None) == self.scaled
        payloads = [hidden, *([] if scales is None else [scales]), ids, weights]
        got = [each.flatten(0, 1) for each in super().dispatch(ids, payloads, len(payloads) - 2)]
        scale = got[1] if self.scaled else None
        return SimpleNamespace(hidden_states=got[0], hidden_states_scale=scale, topk_ids=got[-2], topk_weights=got[-1])

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        self.area = torch.zeros(self.capacity, self.hidden, dtype=dtype) if self.area is None else self.area
        return self.area

    def combine(self, rows: Any, *, output: Any) -> None:  # type: ignore[override]
        super().combine(rows, output)

    def destroy(self) -> None:
        self.capacity = 0


def _install(monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    params = lambda **each: SimpleNamespace(dispatch_bytes_per_token=8, **each)  # noqa: E731
    modules: dict[str, dict[str, Any]] = {
        "flashinfer": {"__version__": "1.2", "__path__": []},
        "flashinfer.fused_moe": {"QuantFormat": SimpleNamespace(MXFP8="x", DeepSeekFp8="y")},
        "flashinfer.moe_ep": {
            "create_communication": lambda *args, backend: Communication(*args, backend),
            "MoEEpCommParams": params,
            "BootstrapConfig": SimpleNamespace,
            "NVLinkOneSidedConfig": SimpleNamespace,
        },
    }
    if interface == "class":
        modules |= {
            "flashinfer.comm": {"__path__": []},
            "flashinfer.comm.mapping": {"Mapping": SimpleNamespace},
            "flashinfer.comm.mnnvl": {"MnnvlConfig": SimpleNamespace},
            "flashinfer.comm.trtllm_moe_alltoall": {
                "MoeAlltoAll": MoeAlltoAll,
                "moe_a2a_get_workspace_size_per_rank": lambda *sizes: 4321,
            },
        }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def _case(format_name: str, in_workspace: bool, routed: Workload | None = None) -> Case:
    made = routed or workload("uniform", ep_size=1, tokens=9, num_experts=8, top_k=2, seed=4)
    return Case(0, 1, 256, 8, 2, format_name, 0, "compact", in_workspace, 9, made)


@pytest.mark.parametrize("interface", ["class", "moe_ep"])
@pytest.mark.parametrize("format_name", ["bf16", "mxfp8", "fp8_block"])
@pytest.mark.parametrize("in_workspace", [True, False])
def test_rounds_are_checked_whatever_slots_rows_take(
    monkeypatch: pytest.MonkeyPatch, interface: str, format_name: str, in_workspace: bool
) -> None:
    _install(monkeypatch, interface)
    case = _case(format_name, in_workspace)
    each = peer("flashinfer")(case, SingleComm())
    for seed in range(3):
        assert checked_round(each, case, seed, lambda: None) == {"dispatch": "", "combine": "", "pair": ""}
    # Repeated with rows filled once, as in a graph.
    each.settle()
    each.dispatch()
    first = each.combine().clone()
    each.dispatch()
    assert torch.equal(each.combine(), first) and first.any()
    assert "1.2" in each.transport
    each.close()


def test_a_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "class")
    right = MoeAlltoAll.dispatch

    def bent(self: Any, *args: Any) -> Any:
        got = right(self, *args)
        got[0][0, 2, 5] += 1
        return got

    monkeypatch.setattr(MoeAlltoAll, "dispatch", bent)
    case = _case("bf16", True)
    each = peer("flashinfer")(case, SingleComm())
    assert "data: row" in checked_round(each, case, 0, lambda: None)["dispatch"]


def test_what_cannot_be_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "moe_ep")
    ids = torch.zeros((3, 2), dtype=torch.int32)
    same = Workload("same", (ids,), (torch.ones(3, 2),))
    with pytest.raises(Unsupported, match="told apart"):
        peer("flashinfer")(_case("bf16", True, same), SingleComm())


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    refusal = peer("flashinfer").refusal()
    assert refusal is not None and "pip install flashinfer-python" in refusal
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peer("flashinfer").refusal() == "it needs GPUs"

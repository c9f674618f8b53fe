"""An MoE layer as TensorRT-LLM drives it, on the host transport: prepare_dispatch, dispatch, combine."""

from __future__ import annotations

import abc
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from a2a.errors import ConfigError, StateError
from a2a.integrations.trtllm import Communication, communication_class
from a2a.placement import Placement
from a2a.quant import wire_format

NUM_RANKS, TOP_K, NUM_SLOTS, MOST, HIDDEN = 3, 2, 8, 6, 64
COUNTS = (4, 0, 6)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


class CommunicationBase(abc.ABC):
    """The shape of the engine's base class."""

    def __init__(self, mapping: Any) -> None:
        self.mapping, self.ep_size, self.ep_rank = mapping, mapping.moe_ep_size, mapping.moe_ep_rank
        if not self.is_platform_supported():
            raise RuntimeError("not supported")

    @staticmethod
    @abc.abstractmethod
    def is_platform_supported() -> bool: ...

    @abc.abstractmethod
    def is_workload_feasible(self, all_rank_num_tokens: Any, num_chunks: int) -> bool: ...

    @abc.abstractmethod
    def dispatch(self, *arguments: Any, **keywords: Any) -> Any: ...

    @abc.abstractmethod
    def combine(self, final_hidden_states: Tensor, **keywords: Any) -> Tensor: ...


def build(cls: type, ranks: Any, **more: Any) -> Any:
    mapping = types.SimpleNamespace(moe_ep_rank=ranks.Get_rank(), moe_ep_size=NUM_RANKS, world_size=NUM_RANKS)
    return cls(mapping, NUM_SLOTS, TOP_K, MOST, False, **{"hidden_size": HIDDEN, "dtype": torch.bfloat16, **more})


def tokens(rank: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn((n, HIDDEN), generator=generator).bfloat16()
    slots = torch.randint(0, NUM_SLOTS, (n, TOP_K), generator=generator)
    return rows, slots, torch.rand((n, TOP_K), generator=generator)


def times_of(slots: Tensor, active: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    table = torch.as_tensor(Placement.contiguous(NUM_SLOTS, NUM_RANKS).table)
    counts = [len({int(table[each]) for each in row} & set(active)) for row in slots]
    return torch.tensor(counts, dtype=torch.float32)[:, None]


def rounds(comm: Any) -> list[int]:
    rank = comm.Get_rank()
    cls = communication_class(CommunicationBase, lambda mapping: comm)
    layer, sharing = build(cls, comm, num_experts=5), build(cls, comm, num_experts=5)
    assert isinstance(layer, CommunicationBase) and isinstance(layer, Communication)
    assert sharing.moe is layer.moe, "layers share one workspace"
    assert layer.supports_post_quant_dispatch() and layer.enable_eplb and layer.eplb_stats_num_experts == 5
    assert layer.is_workload_feasible([MOST] * 3, 2) and not layer.is_workload_feasible([1, MOST + 1, 0], 1)
    rows, slots, weights = tokens(rank, COUNTS[rank])
    wanted = (rows.float() * times_of(slots)).bfloat16()
    for with_scales in (False, True):
        for with_weights in (True, False):
            stats = torch.full((5,), rank, dtype=torch.int32)
            assert layer.prepare_dispatch(slots, COUNTS, stats) is None
            data, scales = wire_format("mxfp8").quantize(rows) if with_scales else (rows, None)
            # As the engine's scheduler calls: by name, with arguments that other methods ask for.
            got, got_scales, got_slots, got_weights = layer.dispatch(
                hidden_states=data,
                hidden_states_sf=scales,
                token_selected_slots=slots,
                token_final_scales=weights if with_weights else None,
                all_rank_num_tokens=list(COUNTS),
                use_dp_padding=False,
                enable_sanitize_expert_ids=True,
                pre_quant_scale=None,
            )
            assert (got_scales is None, got_weights is None) == (not with_scales, not with_weights)
            assert got.shape[0] == got_slots.shape[0] == NUM_RANKS * max(COUNTS) and got_slots.dtype == torch.int32
            filled = torch.arange(max(COUNTS))[None] < layer.moe.recv_counts[:, None]
            assert (got_slots[~filled.flatten()] == -1).all()
            gathered = layer.get_eplb_gathered_statistics()
            assert gathered is not None and gathered[:, 0].tolist() == [0, 1, 2]
            if got_scales is not None:
                got = wire_format("mxfp8").dequantize(got, got_scales, dtype=torch.bfloat16)
                back = wire_format("mxfp8").dequantize(data, scales, dtype=torch.bfloat16)
                wanted = (back.float() * times_of(slots)).bfloat16()
            area = layer.get_combine_payload_tensor_in_workspace(max(COUNTS), HIDDEN, torch.bfloat16)
            payload = area.copy_(got.view(area.shape)) if with_weights else got.clone()
            layer.payload_in_workspace = with_weights
            assert torch.equal(layer.combine(payload, all_rank_max_num_tokens=max(COUNTS)), wanted)
        wanted = (rows.float() * times_of(slots)).bfloat16()
    layer.dispatch(rows, None, slots, weights, COUNTS)
    assert layer.get_eplb_gathered_statistics() is None, "carried no statistics"
    with pytest.raises(StateError, match="dispatched"):
        layer.dispatch(rows, None, slots, weights, COUNTS)
    layer.reset_state()
    layer.reset_state()
    got, *_ = sharing.dispatch(rows, None, slots, weights, COUNTS)
    output = torch.empty_like(rows)
    assert sharing.combine(got.view(NUM_RANKS, -1, HIDDEN).clone(), output=output) is output
    assert torch.equal(output, (rows.float() * times_of(slots)).bfloat16())
    layer.destroy()
    layer.destroy()
    assert sharing.moe.state == "idle", "the other layer still holds it"
    sharing.destroy()
    with pytest.raises(StateError, match="not built"):
        sharing.dispatch(rows, None, slots, weights, COUNTS)
    return COUNTS[rank : rank + 1]


def test_rounds_of_layers_that_share_a_workspace(run_ranks: Any) -> None:
    assert run_ranks(rounds, NUM_RANKS) == [(4,), (0,), (6,)]


class Health:
    mask = 0b111

    def get_mask(self) -> int:
        return self.mask


def masked(comm: Any) -> bool:
    rank, health = comm.Get_rank(), Health()
    layer = build(Communication, comm, comm=comm, ep_group_health=health, alltoall_watchdog_timeout_s=20.0)
    assert layer.moe.timeout_s == 20.0
    rows, slots, weights = tokens(rank, 3)

    def exchanged() -> Tensor:
        got, *_ = layer.dispatch(rows, None, slots, weights, (3, 3, 3))
        combined: Tensor = layer.combine(got.clone())
        return combined

    assert torch.equal(exchanged(), (rows.float() * times_of(slots)).bfloat16())
    health.mask = 0b101
    if rank != 1:
        for _ in range(2):
            assert torch.equal(exchanged(), (rows.float() * times_of(slots, (0, 2))).bfloat16())
    comm.barrier()
    layer.destroy()
    return True


def test_the_health_of_the_group_says_who_takes_part(run_ranks: Any) -> None:
    assert run_ranks(masked, NUM_RANKS) == [True] * NUM_RANKS


def masks_of_layers_that_share_a_workspace(comm: Any) -> list[int]:
    rank, health = comm.Get_rank(), Health()
    cls = communication_class(CommunicationBase, lambda mapping: comm)
    first, second = (build(cls, comm, ep_group_health=health) for _ in range(2))
    rows, slots, weights = tokens(rank, 3)
    seen = []

    def play(layer: Any, active: tuple[int, ...], given: Tensor | None = None, *, changes: bool = False) -> None:
        got, *_ = layer.dispatch(rows, None, slots, weights, (3, 3, 3), active_rank_mask=given)
        seen.append(int(layer.moe.rank_mask[0]))
        if changes:
            # Known to this rank before the round has ended: what was sent comes back all the same.
            health.mask = 0b101
        combined = layer.combine(got.clone())
        assert torch.equal(combined, (rows.float() * times_of(slots, active)).bfloat16())
        assert int(layer.moe.rank_mask[0]) == seen[-1], "a round ends with the ranks it began with"

    play(first, (0, 1, 2), changes=rank != 1)
    if rank != 1:
        play(first, (0, 2))
        play(second, (0, 2))
    comm.barrier()
    # The ranks come back together.
    first.moe.reset()
    health.mask = 0b111
    play(second, (0, 1, 2))
    if rank != 1:
        play(first, (0, 2), torch.tensor([0b101], dtype=torch.uint64))
    comm.barrier()
    first.moe.reset()
    play(first, (0, 1, 2))
    for layer in (first, second):
        layer.destroy()
    return seen


def test_a_mask_is_of_a_round_and_of_all_layers(run_ranks: Any) -> None:
    all_, two = 0b111, 0b101
    wanted = [all_, two, two, all_, two, all_]
    assert run_ranks(masks_of_layers_that_share_a_workspace, NUM_RANKS) == [wanted, [all_, all_, all_], wanted]


def refusals(comm: Any) -> None:
    layer = build(Communication, comm, comm=comm)
    with pytest.raises(ConfigError, match="num_experts"):
        layer.get_eplb_gathered_statistics()
    layer.destroy()


def test_what_is_refused(run_ranks: Any) -> None:
    run_ranks(refusals, 2 + 1)
    mapping = types.SimpleNamespace(moe_ep_rank=0, moe_ep_size=2, world_size=4)
    with pytest.raises(ConfigError, match="over all ranks"):
        Communication(mapping, 4, 2, 8, hidden_size=64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="hidden_size, dtype"):
        Communication(mapping, 4, 2, 8)


def test_register_replaces_the_method_of_the_factory(tmp_path: Path) -> None:
    folder = tmp_path / "tensorrt_llm/_torch/modules/fused_moe/communication"
    folder.mkdir(parents=True)
    for each in (folder, *list(folder.parents)[:4]):
        (each / "__init__.py").touch()
    (tmp_path / "tensorrt_llm/_utils.py").write_text(
        "from a2a.comm.protocol import SingleComm\n"
        "class Session(SingleComm):\n    def Split(self, color, key=0):\n        return self\n"
        "def mpi_comm():\n    return Session()\n"
    )
    (folder / "base.py").write_text("from test_trtllm_shaped import CommunicationBase as Communication\n")
    (folder / "communication_factory.py").write_text(
        "from .base import Communication\nfrom .nvlink_one_sided import NVLinkOneSided\n"
    )
    (folder / "nvlink_one_sided.py").write_text(
        "from .base import Communication\nclass NVLinkOneSided(Communication):\n"
        "    def __init__(self, *a, **k): raise RuntimeError('theirs')\n"
    )
    code = (
        "import sys, types, torch; import a2a.integrations.trtllm as adapter; adapter.register(); adapter.register()\n"
        "assert 'tensorrt_llm' not in sys.modules\n"
        f"import importlib; factory = importlib.import_module({'tensorrt_llm._torch.modules.fused_moe.communication'!r}"
        "+ '.communication_factory')\n"
        "adapter.register()\n"
        "mapping = types.SimpleNamespace(moe_ep_rank=0, moe_ep_size=1, world_size=1)\n"
        "made = factory.NVLinkOneSided(mapping, 4, 2, 8, False, hidden_size=8, dtype=torch.bfloat16)\n"
        "assert isinstance(made, adapter.Communication) and isinstance(made, factory.Communication), type(made)\n"
        "theirs = sys.modules[factory.__package__ + '.nvlink_one_sided'].NVLinkOneSided\n"
        "assert isinstance(made, theirs) and type(made) is factory.NVLinkOneSided is not theirs\n"
        "rows = torch.ones(2, 8).bfloat16()\n"
        "got, *_ = made.dispatch(rows, None, torch.zeros(2, 2, dtype=torch.int32), None, [2])\n"
        "assert torch.equal(made.combine(got.clone()), rows); made.destroy(); print('served')\n"
    )
    path = [str(tmp_path), str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "served" in done.stdout, done.stdout + done.stderr


def test_against_the_installed_engine() -> None:
    """The verbs and arguments of the class that it replaces, where TensorRT-LLM can be imported."""
    try:
        from tensorrt_llm._torch.modules.fused_moe.communication.nvlink_one_sided import NVLinkOneSided
    except ImportError as error:
        pytest.skip(f"TensorRT-LLM cannot be imported here: {error}")
    import inspect

    for verb in ("prepare_dispatch", "combine", "is_workload_feasible", "get_eplb_gathered_statistics", "destroy"):
        assert callable(getattr(Communication, verb)) and hasattr(NVLinkOneSided, verb)
    theirs = list(inspect.signature(NVLinkOneSided.__init__).parameters)
    assert set(theirs) - {"alltoall_watchdog_on_timeout"} <= set(inspect.signature(Communication.__init__).parameters)

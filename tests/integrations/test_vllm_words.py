"""What a row takes in the words of vLLM's releases, and how the plugin reaches the engine, without ranks."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from vllm_shapes import QuantConfig

from a2a.comm.protocol import SingleComm
from a2a.errors import ConfigError, ShapeError
from a2a.integrations import vllm
from a2a.integrations.after_import import after_import
from a2a.integrations.flashinfer import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication
from a2a.integrations.rows import RowFormat
from a2a.integrations.vllm import dispatch_layout
from a2a.integrations.vllm.payload import row_bytes_per_token, row_format
from a2a.quant import wire_format

H = 2880
FP8 = QuantConfig(torch.float8_e4m3fn, [128, 128])


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_TRANSPORT", "host")


class QuantFormat(enum.Enum):
    BF16 = 1
    FP16 = 2
    NVFP4 = 3
    MXFP8 = 4
    DeepSeekFp8 = 5
    MXFP4 = 6


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({}, 2 * H),
        # Releases of the 0.22 kind.
        ({"dispatch_dtype_bytes_per_elem": 2}, 2 * H),
        ({"dispatch_dtype_bytes_per_elem": 0, "dispatch_scale_bytes_per_token": H // 16}, H // 2 + H // 16),
        ({"dispatch_dtype_bytes_per_elem": 1, "dispatch_scale_bytes_per_token": 96}, 3072 + 96),
        # Of the 0.32 kind: the row without its padding, the scales with it.
        ({"x_bytes_per_token": 2 * H}, 2 * H),
        ({"x_bytes_per_token": H // 2, "x_sf_bytes_per_token": H // 16}, H // 2 + H // 16),
        ({"x_bytes_per_token": H, "x_sf_bytes_per_token": H // 32}, H + H // 32),
        ({"x_bytes_per_token": H, "x_sf_bytes_per_token": 96}, 3072 + 96),
        # Of the 0.33 kind.
        ({"dispatch_format": QuantFormat.BF16}, 2 * H),
        ({"dispatch_format": QuantFormat.FP16}, 2 * H),
        ({"dispatch_format": QuantFormat.NVFP4}, H // 2 + H // 16),
        ({"dispatch_format": QuantFormat.MXFP8}, H + H // 32),
        ({"dispatch_format": QuantFormat.MXFP8, "extra_payload_bytes_per_token": 6}, 3072 + 96),
        # As this package's own layout function hands it on.
        ({"dispatch_format": RowFormat("mxfp8", 256)}, 3072 + 96),
    ],
    ids=str,
)
def test_row_bytes(words: dict[str, object], wanted: int) -> None:
    assert row_bytes_per_token(H, **words) == wanted


def test_fp8_block_rows_are_the_same_in_all_words() -> None:
    wanted = 256 + 2 * 4
    assert row_bytes_per_token(256, dispatch_format=QuantFormat.DeepSeekFp8) == wanted
    assert row_bytes_per_token(256, x_bytes_per_token=256, x_sf_bytes_per_token=8) == wanted
    assert row_bytes_per_token(256, dispatch_format=dispatch_layout(256, FP8).dispatch_format) == wanted


def test_unknown_formats_name_the_known() -> None:
    with pytest.raises(ConfigError, match=r"MXFP4.*BF16, FP16, NVFP4, MXFP8, DeepSeekFp8"):
        row_bytes_per_token(H, dispatch_format=QuantFormat.MXFP4)
    for wrong in (QuantConfig("int8"), QuantConfig(torch.float8_e4m3fn), QuantConfig(torch.int8, [128, 128])):
        with pytest.raises(ConfigError, match=r"None \(bf16 or fp16 rows\), 'nvfp4', 'mxfp8'.*\[128, 128\]"):
            row_format(wrong)
        assert row_format(wrong, defer_input_quant=True).name == "bf16"


def test_layouts() -> None:
    padded = dispatch_layout(H, QuantConfig("mxfp8", mx_alignment=256))
    assert (padded.x_bytes_per_token, padded.x_sf_bytes_per_token, padded.extra_payload_bytes_per_token) == (
        3072,
        96,
        0,
    )
    assert padded.dispatch_format == RowFormat("mxfp8", 256)
    assert dispatch_layout(H, None).x_bytes_per_token == 2 * H
    assert dispatch_layout(H, QuantConfig("int8"), torch.float16).x_bytes_per_token == 2 * H
    with pytest.raises(ConfigError, match="float16, bfloat16"):
        dispatch_layout(H, None, torch.float32)
    with pytest.raises(ShapeError, match="multiple of 128"):
        dispatch_layout(H, FP8)


def test_the_newer_interface_holds_padded_rows_as_vllm_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33's own class: rows padded to 3072, declared as rows of 2880 and six bytes for more scales."""
    monkeypatch.setenv("A2A_TRANSPORT", "host")
    params = MoEEpCommParams(4, 2, 8, H, torch.bfloat16, QuantFormat.MXFP8)
    config = NVLinkOneSidedConfig(extra_payload_bytes_per_token=6, comm_backend=SingleComm())
    communication = create_communication(BootstrapConfig(1, 0), params, backend=config)
    rows = torch.randn((8, H), generator=torch.Generator().manual_seed(0)).bfloat16()
    data, scales = wire_format("mxfp8").quantize(rows, alignment=256)
    ids, weights = torch.zeros((8, 2), dtype=torch.int32), torch.ones((8, 2))
    received = communication.dispatch(data, ids, weights, hidden_states_scale=scales, max_tokens_per_rank=8)
    assert torch.equal(received.hidden_states.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(communication.combine(rows), rows)
    communication.destroy()


def test_room_for_other_layers_is_no_padding() -> None:
    """vLLM's union of a layer of wide mxfp8 rows and one of narrower bf16 rows that take more bytes."""
    hidden, narrower, most = 7168, 6144, 8
    sizes = []
    for extra in (0, 2 * narrower - (hidden + hidden // 32)):
        config = NVLinkOneSidedConfig(extra_payload_bytes_per_token=extra, comm_backend=SingleComm())
        params = MoEEpCommParams(4, 2, most, hidden, torch.bfloat16, QuantFormat.MXFP8)
        communication = create_communication(BootstrapConfig(1, 0), params, backend=config)
        sizes.append(communication.alltoall.workspace.shape[1])
        rows, ids = torch.randn((most, narrower)).bfloat16(), torch.zeros((most, 2), dtype=torch.int32)
        if extra:
            received = communication.dispatch(rows, ids, torch.ones((most, 2)), max_tokens_per_rank=most)
            assert torch.equal(communication.combine(received.hidden_states.clone()), rows)
        communication.destroy()
    assert extra <= (sizes[1] - sizes[0]) / most < 1.5 * extra


# ---- the plugin --------------------------------------------------------------------------------------------------


def test_a_module_is_patched_right_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "patched_engine"
    package.mkdir()
    (package / "__init__.py").write_text("from patched_engine import thing\n")
    (package / "thing.py").write_text("CLASS = 'theirs'\n")
    (package / "taker.py").write_text("from patched_engine.thing import CLASS\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    calls: list[str] = []

    def patch(module: ModuleType) -> None:
        calls.append(module.__name__)
        module.__dict__["CLASS"] = "ours"

    def second(module: ModuleType) -> None:
        calls.append(f"second {module.__dict__['CLASS']}")

    for _ in range(2):
        after_import("patched_engine.thing", patch)
        after_import("patched_engine.thing", second)
    assert importlib.util.find_spec("patched_engine.thing") is not None, "whoever only looks for it changes nothing"
    taker = importlib.import_module("patched_engine.taker")
    thing = sys.modules["patched_engine.thing"]
    assert taker.CLASS == "ours"
    assert sorted(calls) in (["patched_engine.thing", "second ours"], ["patched_engine.thing", "second theirs"])
    assert type(thing.__spec__.loader).__name__ == type(thing.__loader__).__name__ == "SourceFileLoader"
    after_import("patched_engine.thing", second)
    assert calls[-1] == "second ours", "what is imported already is patched at once"
    for name in [name for name in sys.modules if name.startswith("patched_engine")]:
        del sys.modules[name]


FAKE_VLLM = {
    "distributed/device_communicators/base_device_communicator.py": "from vllm_shapes import All2AllManagerBase\n",
    "distributed/device_communicators/all2all.py": """
from .base_device_communicator import All2AllManagerBase
class FlashInferNVLinkOneSidedManager(All2AllManagerBase):
    pass
""",
    "model_executor/layers/fused_moe/modular_kernel.py": """
from vllm_shapes import ActivationFormat as FusedMoEActivationFormat, FusedMoEPrepareAndFinalizeModular
""",
    "model_executor/layers/fused_moe/prepare_finalize.py": """
from vllm.distributed.device_communicators.all2all import FlashInferNVLinkOneSidedManager
from .modular_kernel import FusedMoEPrepareAndFinalizeModular
class FlashInferNVLinkOneSidedPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    manager = FlashInferNVLinkOneSidedManager
""",
    "model_executor/layers/fused_moe/all2all_utils.py": """
from .prepare_finalize import FlashInferNVLinkOneSidedPrepareAndFinalize
def flashinfer_one_sided_dispatch_layout(hidden_dim, quant_config, input_dtype=None):
    raise ImportError("flashinfer")
def made(**sizes):
    layout = flashinfer_one_sided_dispatch_layout(64, None)
    return FlashInferNVLinkOneSidedPrepareAndFinalize(dispatch_format=layout.dispatch_format, **sizes)
""",
    "model_executor/layers/fused_moe/topk_weight_and_reduce.py": """
class TopKWeightAndReduceDelegate: pass
class TopKWeightAndReduceContiguous: pass
""",
    "model_executor/layers/fused_moe/utils.py": "def moe_kernel_quantize_input(*a, **k): raise AssertionError\n",
    "forward_context.py": """
import types
def get_forward_context():
    return types.SimpleNamespace(dp_metadata=types.SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: [3]))
""",
    "config.py": """
import types
def get_current_vllm_config():
    return types.SimpleNamespace(parallel_config=types.SimpleNamespace(num_ubatches=2))
""",
    "envs.py": "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE = False\n",
    "v1/worker/ubatching.py": """
def dbo_enabled(): return False
def dbo_current_ubatch_id(): return 1
""",
}

DRIVER = """
import importlib.metadata, sys
import a2a.integrations.vllm as adapter
adapter.register(); adapter.register()
assert not [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")], "imports nothing of vLLM"
import torch
from a2a.comm.protocol import SingleComm
import vllm.model_executor.layers.fused_moe.all2all_utils as layers
from vllm.distributed.device_communicators import all2all
from vllm import distributed
adapter.register()
manager = all2all.FlashInferNVLinkOneSidedManager(SingleComm())
assert isinstance(manager, adapter.Manager) and isinstance(manager, all2all.All2AllManagerBase), type(manager)
distributed.COMMUNICATOR.all2all_manager = manager
layer = layers.made(max_num_tokens=4, top_k=2, num_experts=4, hidden_size=64, num_dispatchers=1)
assert isinstance(layer, adapter.PrepareAndFinalize), type(layer)
assert isinstance(layer, layers.FlashInferNVLinkOneSidedPrepareAndFinalize.__mro__[2])
assert manager.moe_alltoall.config.num_contexts == 2 and layer.supports_async()
rows, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [2, -1], [-1, -1]], dtype=torch.int32)
got, scales, _, got_ids, got_weights = layer.prepare(rows, torch.ones(3, 2), ids, 4, None, False, None)
output = torch.empty_like(rows)
layer.finalize(output, got.clone(), got_weights, got_ids, False, None)
assert torch.equal(output, torch.cat([rows[:2], torch.zeros_like(rows[2:])]))
manager.destroy()
print("served")
"""


def test_the_plugin_replaces_what_vllm_builds(tmp_path: Path) -> None:
    root = tmp_path / "vllm"
    for name, text in FAKE_VLLM.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in {
        root,
        *(path.parent for path in root.rglob("*.py")),
        root / "model_executor",
        root / "v1",
        root / "model_executor/layers",
    }:
        (folder / "__init__.py").touch()
    (root / "distributed/__init__.py").write_text(
        "import types\nCOMMUNICATOR = types.SimpleNamespace()\n"
        "def get_ep_group():\n    return types.SimpleNamespace(device_communicator=COMMUNICATOR)\n"
    )
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    path = [str(tmp_path), *map(str, Path(__file__).resolve().parents[1:3])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; exec(open({str(driver)!r}).read())"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "served" in done.stdout, done.stdout + done.stderr


def test_a_release_of_another_shape_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    other = ModuleType("other")
    other.__dict__["FlashInferNVLinkOneSidedPrepareAndFinalize"] = dict
    before = dict(other.__dict__)
    vllm._replace_manager(other)
    vllm._replace_layer(other)
    assert other.__dict__ == before
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 and "left alone" in caplog.text


def test_the_entry_points_are_declared() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        module, _, name = points[group]["a2a"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))

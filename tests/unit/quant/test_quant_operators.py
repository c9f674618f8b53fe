"""The torch.library operators: opcheck, fakes with symbolic rows, torch.compile, import cost in modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from a2a.errors import ShapeError
from a2a.quant import WIRE_FORMATS, ScaleLayout, pack_topk, swizzle_scales, unpack_topk, unswizzle_scales

WIDTH = {"bf16": 40, "fp16": 40, "fp8_block": 256, "mxfp8": 80, "nvfp4": 48, "mxfp4": 96}
ROWS = (0, 1, 5)


def samples(rows: int) -> list[tuple[str, tuple]]:
    """(operator, arguments) of every operator, in `rows` rows."""
    torch.manual_seed(rows)
    found: list[tuple[str, tuple]] = []
    g = torch.tensor(3.5)
    for name, width in WIDTH.items():
        form, x = WIRE_FORMATS[name], torch.randn(rows, width)
        data, scales = form.quantize(x)
        found += [(f"quantize_{name}", (x,)), (f"quantize_{name}", (x.bfloat16(),))]
        if scales is None:
            found += [("dequantize_plain", (data,)), ("dequantize_plain", (data, 7, torch.float16))]
        elif name == "nvfp4":
            found += [("quantize_nvfp4", (x.half(), g)), ("dequantize_nvfp4", (data, scales)),
                      ("dequantize_nvfp4", (data, scales, g, 33, torch.bfloat16))]  # fmt: skip
        else:
            found += [(f"dequantize_{name}", (data, scales)),
                      (f"dequantize_{name}", (data, scales, 33, torch.bfloat16))]  # fmt: skip
    found.append(("quantize_mxfp8", (torch.randn(rows, 160), 128)))
    found.append(("quantize_fp8_block", (torch.randn(rows, 33), 16)))
    linear = torch.randint(0, 256, (rows, 6), dtype=torch.uint8)
    for layout in ScaleLayout:
        swizzled = swizzle_scales(linear, layout)
        found += [("swizzle_scales", (linear, layout.value)), ("swizzle_scales", (linear[None], layout.value)),
                  ("unswizzle_scales", (swizzled, layout.value, rows, 6)),
                  ("unswizzle_scales", (swizzled.flatten(), layout.value, rows, 6))]  # fmt: skip
    ids, weights = torch.randint(-1, 64, (rows, 4)), torch.rand(rows, 4)
    found += [("pack_topk", (ids, weights)), ("pack_topk", (ids.int(), weights.bfloat16())),
              ("unpack_topk", (pack_topk(ids, weights),))]  # fmt: skip
    return found


def operator(name: str):
    return getattr(torch.ops.a2a, name).default


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.dim() else t.view(1).view(torch.uint8)


def outputs(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def test_samples_cover_every_operator_of_the_room():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("a2a::")]
    defined = {name.split("::")[1].split(".")[0] for name in names}
    verbs = ("quantize", "dequantize", "swizzle", "unswizzle", "pack", "unpack")
    mine = {name for name in defined if name.split("_")[0] in verbs}
    assert mine == {name for name, _ in samples(1)} and len(mine) == 15


@pytest.mark.parametrize("rows", ROWS)
def test_opcheck(rows):
    for name, args in samples(rows):
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args):
            # torch's schema test compares inputs with allclose, which has no float8 kernel: it gets the bytes.
            torch.library.opcheck(operator(name), args, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
            args = tuple(raw(a) if isinstance(a, torch.Tensor) and a.dtype.itemsize == 1 else a for a in args)
        torch.library.opcheck(operator(name), args)


@pytest.mark.parametrize("rows", ROWS)
def test_inputs_are_unchanged_and_not_returned(rows):
    for name, args in samples(rows):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        before = [raw(a).clone() for a in tensors]
        results = outputs(operator(name)(*args))
        assert all(torch.equal(raw(a), b) for a, b in zip(tensors, before, strict=True)), name
        memory = [t.untyped_storage().data_ptr() for t in (*tensors, *results) if t.numel()]
        assert len(set(memory)) == len(memory), name


def test_opcheck_of_inputs_that_require_gradients():
    for name, args in samples(2):
        if name.startswith(("quantize", "pack")):
            args = tuple(
                a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
            )
            torch.library.opcheck(operator(name), args)


@pytest.mark.parametrize("rows", ROWS)
def test_real_and_meta_shapes_are_equal(rows):
    for name, args in samples(rows):
        real = outputs(operator(name)(*args))
        meta = outputs(operator(name)(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)))
        for r, m in zip(real, meta, strict=True):
            assert (r.shape, r.dtype, r.stride()) == (m.shape, m.dtype, m.stride()), name


def test_symbolic_rows_describe_every_number_of_rows():
    """The sizes that one fake call gives for an unknown number of rows are the real sizes for 0, 1 and more of them."""
    many = 1000
    real = {rows: samples(rows) for rows in (0, 1, 2, 129, many)}
    for place, (name, args) in enumerate(real[many]):
        if name == "unswizzle_scales":
            continue  # its rows are an argument: compiled below
        shape_env = ShapeEnv()
        with FakeTensorMode(shape_env=shape_env) as mode:
            fakes = [symbolic(mode, shape_env, a, many) if isinstance(a, torch.Tensor) else a for a in args]
            fake_results = outputs(operator(name)(*fakes))
        # Two inputs may be held to equal rows; nothing may be held to a number.
        assert all(len(guard.expr.free_symbols) == 2 for guard in shape_env.guards), (name, shape_env.guards)
        for rows, others in real.items():
            for fake, result in zip(fake_results, outputs(operator(name)(*others[place][1])), strict=True):
                assert tuple(at(size, rows) for size in fake.shape) == result.shape, (name, rows)
                assert fake.dtype == result.dtype


def at(size: int | torch.SymInt, rows: int) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, rows)))


def symbolic(mode: FakeTensorMode, shape_env: ShapeEnv, x: torch.Tensor, rows: int) -> torch.Tensor:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DYNAMIC if size == rows else DimDynamic.STATIC for size in x.shape]
    return mode.from_tensor(x, source=ConstantSource(f"x{id(x)}"), symbolic_context=StatelessSymbolicContext(kinds))


@pytest.mark.parametrize("name", list(WIDTH))
def test_compiled_with_changing_rows(name):
    form, width = WIRE_FORMATS[name], WIDTH[name]

    def round_trip(x):
        data, scales = form.quantize(x)
        return form.dequantize(data, scales, hidden_size=width, dtype=torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 1, 0, 130):
        x = torch.randn(rows, width)
        assert torch.equal(compiled(x), round_trip(x))


def test_layouts_and_packing_compiled():
    def both(scales, ids, weights):
        rows, cols = scales.shape
        swizzled = swizzle_scales(scales, ScaleLayout.SWIZZLED_128X4)
        back = unswizzle_scales(swizzled, ScaleLayout.SWIZZLED_128X4, rows, cols)
        return swizzled, back, *unpack_topk(pack_topk(ids, weights))

    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 1, 0, 130):
        scales = torch.randint(0, 256, (rows, 9), dtype=torch.uint8)
        args = scales, torch.arange(rows * 2).view(rows, 2), torch.rand(rows, 2)
        for got, want in zip(compiled(*args), both(*args), strict=True):
            assert torch.equal(got, want)


def test_fakes_refuse_what_kernels_refuse():
    for x in (torch.randn(2, 33), torch.randn(2, 33, device="meta")):
        for name in ("quantize_nvfp4", "quantize_mxfp4"):
            with pytest.raises(ShapeError):
                operator(name)(x)
        with pytest.raises(ShapeError):
            operator("quantize_mxfp8")(x[0])


def test_importing_and_quantising_load_no_compiler():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from a2a.quant import WIRE_FORMATS, pack_topk\n"
        "[f.dequantize(*f.quantize(torch.ones(2, 128))) for f in WIRE_FORMATS.values()]\n"
        "pack_topk(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))\n"
        "new = {m for m in set(sys.modules) - before if m.split('.')[0] != 'a2a'}\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'numba', 'mpi4py'} & new\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

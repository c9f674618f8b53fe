"""torch.compile over dispatch, experts and combine on ranks: equals eager, in the program's order, in place."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exchange_case import assert_equal
from ranks import Ranks
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import a2a
from a2a import ops
from a2a.comm import Comm
from a2a.errors import MismatchError, StateError

MOST, HIDDEN, TOP_K, NUM_EXPERTS = 128, 64, 2, 4
TOKENS = (7, 128, 0, 1, 5, 100)
"""Tokens of rank 0 by round; other ranks start further on in the list."""

VERBS = ("dispatch", "combine_area", "combine")


class Compiler:
    """A backend of torch.compile that counts its graphs and notes in which order they name this package's operators."""

    def __init__(self, name: str) -> None:
        self._compile: Callable[..., Any] = lookup_backend(name)
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.graphs.append([name.split(".")[1] for name in names if name.startswith("a2a.")])
        return self._compile(graph, inputs)


def built(comm: Comm, transport: str, **more: Any) -> a2a.MoeAlltoAll:
    return a2a.MoeAlltoAll(max_num_tokens=MOST, top_k=TOP_K, num_experts=NUM_EXPERTS, hidden_size=HIDDEN, comm=comm,
                           transport=transport, scrub="all", **more)  # fmt: skip


def draw(moe: a2a.MoeAlltoAll, number: int) -> tuple[Tensor, Tensor]:
    n = TOKENS[(number + moe.ep_rank) % len(TOKENS)]
    generator = torch.Generator().manual_seed(100 * number + moe.ep_rank)
    rows = torch.randn((n, HIDDEN), generator=generator).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, (n, TOP_K), generator=generator, dtype=torch.int32)
    return rows.to(moe.workspace.device), ids.to(moe.workspace.device)


def two_layers(handle: ops.Handle) -> Callable[..., tuple[Tensor, ...]]:
    """Two rounds with experts between, of whose received rows some are wanted after the next round, and fresh memory.

    However late a compiler reads them, the rows must be those of their round, and memory that it takes once nobody
    reads a block any more must not lie in the workspace, to which the next round writes.
    """

    def layer(rows: Tensor, ids: Tensor, most: int) -> tuple[Tensor, ...]:
        views, recv_counts = ops.dispatch(handle, ids, [rows, ids], most, expert_id_payload_index=1)
        shares = (views[0].float() * 2 + (views[1] >= 0).sum(-1, keepdim=True)).to(rows.dtype)
        seen = views[0].float().sum(-1) + recv_counts[:, None]
        kept = views[0].float() * 3
        sums = ops.combine(handle, shares, most, rows.shape[0])
        later = rows.new_full(views[0].shape, 7.0) + sums.sum()
        return sums, kept, seen, later, later * 2

    def both(rows: Tensor, ids: Tensor, most: int) -> tuple[Tensor, ...]:
        sums, kept, *first = layer(rows, ids, most)
        second = layer(sums * 0.5, ids, most)
        # torch.compile reads the first round's rows here, where they are needed.
        return sums, kept + second[0].sum(), *first, *second

    return both


def compiled_equals_eager(comm: Comm, transport: str, backend: str) -> tuple[int, list[list[str]]]:
    with built(comm, transport) as moe:
        handle, compiler = ops.bind(moe), Compiler(backend)
        eager = two_layers(handle)
        program = torch.compile(eager, fullgraph=True, dynamic=True, backend=compiler)
        for number in range(len(TOKENS)):
            rows, ids = draw(moe, number)
            wanted = [each.clone() for each in eager(rows, ids, MOST)]
            for place, (got, want) in enumerate(zip(program(rows, ids, MOST), wanted, strict=True)):
                assert_equal(f"result {place} of round {number}", got, want)
            assert moe.state == "idle"
        assert int(handle.turn[2]) == 2 * 4 * len(TOKENS), "every verb ran once"
        return len(compiler.graphs), compiler.graphs


def test_the_graph(run_ranks: Ranks, transport: str) -> None:
    for num_graphs, graphs in run_ranks(compiled_equals_eager, 2, transport, "aot_eager"):
        # One for 0 tokens and one for 1, which torch never makes symbols of, and one for every other number.
        assert num_graphs <= 3
        assert all([name for name in each if name in VERBS] == ["dispatch", "combine"] * 2 for each in graphs)


def unused(comm: Comm, transport: str) -> None:
    """Two equal rounds whose results nobody wants: peers wait for both all the same."""
    with built(comm, transport) as moe:
        handle = ops.bind(moe)

        def program(rows: Tensor, ids: Tensor, most: int) -> Tensor:
            for _ in range(2):
                views, _ = ops.dispatch(handle, ids, [rows], most)
                ops.combine(handle, views[0], most, rows.shape[0])
            return rows + 1

        rows, ids = draw(moe, 0)
        compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
        assert_equal("rows", compiled(rows, ids, MOST), rows + 1)
        assert int(handle.turn[2]) == 4 and moe.state == "idle", handle.turn


def test_no_round_is_dropped_or_merged(run_ranks: Ranks, transport: str) -> None:
    run_ranks(unused, 2, transport)


def _write_twice(out: Tensor, rows: Tensor) -> None:
    out.copy_(rows * 2)


LIBRARY = torch.library.Library("a2a_test", "FRAGMENT")
LIBRARY.define("twice(Tensor(a!) out, Tensor rows) -> ()")
LIBRARY.impl("twice", _write_twice, "CompositeExplicitAutograd")
torch.library.register_fake("a2a_test::twice", lambda out, rows: None, lib=LIBRARY)


def in_place(comm: Comm, transport: str) -> list[bool]:
    """Compiled code in which experts write into the combine area: whether combine found them there."""
    with built(comm, transport) as moe, warnings.catch_warnings():
        # An operator whose results share a storage is warned of.
        warnings.filterwarnings("error", message=".*may not alias.*")
        handle, found, verb = ops.bind(moe), [], moe.combine

        def combine(payload: Tensor, most: int, payload_in_workspace: bool, *others: Any, **named: Any) -> Tensor:
            found.append(payload_in_workspace)
            return verb(payload, most, payload_in_workspace, *others, **named)

        moe.combine = combine  # type: ignore[method-assign]
        both = two_layers(handle)

        def layer(rows: Tensor, ids: Tensor, most: int) -> tuple[Tensor, ...]:
            views, _ = ops.dispatch(handle, ids, [rows], most, in_place=True)
            area = ops.combine_area(handle, rows, most, rows.shape[1], rows.dtype)
            torch.ops.a2a_test.twice(area, views[0])
            sums = ops.combine(handle, area, most, rows.shape[0])
            return sums, *both(sums, ids, most)

        compiler = Compiler("inductor")
        program = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
        for number in (0, 4):
            rows, ids = draw(moe, number)
            wanted = [each.clone() for each in layer(rows, ids, MOST)]
            found.clear()
            for place, (got, want) in enumerate(zip(program(rows, ids, MOST), wanted, strict=True)):
                assert_equal(f"result {place} of round {number}", got, want)
        # A second one where generated code for larger rounds differs.
        assert len(compiler.graphs) <= 2
    return found


@pytest.mark.timeout(600)
def test_generated_code_copies_nothing_that_lies_in_place(run_ranks: Ranks, transport: str) -> None:
    if shutil.which("g++") is None or (transport != "host" and importlib.util.find_spec("triton") is None):
        pytest.skip("torch.compile generates C++, and for GPUs Triton: g++ or triton is missing")
    for found in run_ranks(in_place, 2, transport, timeout_s=500):
        assert found == [True, False, False]


def failures(comm: Comm, transport: str) -> None:
    with built(comm, transport) as moe:
        handle = ops.bind(moe)
        program = torch.compile(two_layers(handle), fullgraph=True, dynamic=True, backend="aot_eager")
        rows, ids = draw(moe, 1)
        with pytest.raises(MismatchError) as caught:
            program(rows, ids, MOST - comm.Get_rank())
        assert set(caught.value.values.values()) == {MOST, MOST - 1}
        wanted = [each.clone() for each in two_layers(handle)(rows, ids, MOST)]
        for got, want in zip(program(rows, ids, MOST), wanted, strict=True):
            assert_equal("after a refusal", got, want)
    with pytest.raises(StateError, match="bind a live object"):
        program(rows, ids, MOST)
    with built(comm, transport) as other:
        # One graph serves every object: a handle is data.
        compiler = Compiler("aot_eager")

        @torch.compile(fullgraph=True, dynamic=True, backend=compiler)
        def program_of(turn: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            return two_layers(ops.Handle(turn, comm.Get_size(), 0))(rows, ids, MOST)

        with built(comm, transport, name="another") as another:
            for moe in (other, another):
                got, want = program_of(ops.bind(moe).turn, rows, ids), two_layers(ops.bind(moe))(rows, ids, MOST)
                assert_equal("through a handle given as data", got[0], want[0])
        assert len(compiler.graphs) == 1


def test_errors_and_handles(run_ranks: Ranks, waiting_transport: str) -> None:
    run_ranks(failures, 2, waiting_transport)

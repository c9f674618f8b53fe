"""Tensors whose bytes are not their elements are refused by every argument: every rank raises, and nothing is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import a2a
from a2a.arguments import look
from a2a.comm import Comm
from a2a.errors import ConfigError, ShapeError

BUILT: dict[str, Any] = {
    "max_num_tokens": 4,
    "top_k": 2,
    "num_experts": 8,
    "hidden_size": 32,
    "combine_dtype_bytes_per_elem": 4,
    # Room for complex rows.
    "extra_payload_bytes_per_token": 512,
    "eplb_stats_num_experts": 2,
    "enable_rank_mask": True,
}
MOST = 4


def _conjugated_part(tensor: Tensor) -> Tensor:
    # torch negates it only when it is read.
    part = tensor.to(torch.complex64).conj().imag
    return part.as_strided(tensor.shape, tensor.stride())


def _memory_given_back(tensor: Tensor) -> Tensor:
    kept = tensor.clone()
    kept.untyped_storage().resize_(0)
    return kept


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "sparse rows": Tensor.to_sparse_csr,
    "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "jagged": lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8),
    "meta": lambda tensor: tensor.to("meta"),
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "negated": _conjugated_part,
    "conjugated": lambda tensor: tensor.to(torch.complex64).conj(),
    "differentiated": lambda tensor: _inside(torch.func.grad, tensor),
    "given back": _memory_given_back,
}


def _inside(transform: Callable[..., Any], tensor: Tensor) -> Tensor:
    seen: list[Tensor] = []
    transform(lambda each: [seen.append(each), each.sum()][1])(tensor.float())
    return seen[0]


def odd_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of every kind that torch makes of such a tensor, one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, make in KINDS.items():
            try:
                made = make(tensor)
            except (RuntimeError, TypeError, IndexError):
                continue
            yield kind, made


def refused_everywhere(comm: Comm, transport: str, verb: str, wire_format: str | None) -> dict[str, list[str]]:
    """One rank passes an odd tensor as each argument of a verb in turn; the others pass what the round before had."""
    rank, ep = comm.Get_rank(), comm.Get_size()
    odd = rank == 1
    stories: dict[str, list[str]] = {}
    with a2a.MoeAlltoAll(**BUILT, wire_format=wire_format, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        ids = torch.tensor([[0, 7]], dtype=torch.int32, device=device)
        rows = torch.ones((1, 32), dtype=torch.bfloat16, device=device)
        payload = torch.ones((ep, MOST, 32), dtype=torch.bfloat16, device=device)
        arguments: dict[str, dict[str, Any]] = {
            "dispatch": {
                "token_selected_experts": ids,
                "input_payloads": torch.ones((1, 32), device=device),
                "eplb_local_stats": torch.ones(2, dtype=torch.int32, device=device),
                "active_rank_mask": torch.tensor([(1 << ep) - 1], dtype=torch.uint64),
            },
            "dispatch_tokens": {
                "hidden_states": rows,
                "topk_ids": ids,
                "topk_weights": torch.ones((1, 2), device=device),
                "global_scale": torch.ones((1, 1), device=device),
            },
            "combine": {
                "payload": payload.float(),
                "output": torch.ones((1, 32), device=device),
                "output_scales": torch.ones((1, 2), device=device).to(torch.float8_e4m3fn),
                "output_scalar_scale": torch.ones((1, 1), device=device),
            },
        }

        def call(**given: Any) -> None:
            if verb == "dispatch":
                good = {"token_selected_experts": ids, "input_payloads": arguments["dispatch"]["input_payloads"]}
                good |= {"eplb_local_stats": arguments["dispatch"]["eplb_local_stats"]}
                every = {**good, **given}
                payloads = [every.pop("input_payloads"), ids]
                moe.dispatch(input_payloads=payloads, runtime_max_tokens_per_rank=MOST, **every)
            elif verb == "dispatch_tokens":
                good = {"hidden_states": rows, "topk_ids": ids, "topk_weights": arguments[verb]["topk_weights"]}
                moe.dispatch_tokens(**{**good, **given}, runtime_max_tokens_per_rank=MOST)
            else:
                good = {"payload": arguments[verb]["payload"]}
                if not given.keys().isdisjoint({"output_scales", "output_scalar_scale"}):
                    good |= {name: arguments[verb][name] for name in ("output_scales", "output_scalar_scale")}
                    good |= {"output_dtype": torch.uint8}
                moe.combine(**{**good, **given}, runtime_max_tokens_per_rank=MOST)

        def finish() -> None:
            if moe.state == "dispatched":
                assert moe.combine(payload, MOST).eq(2).all()

        for name, tensor in arguments[verb].items():
            for kind, each in odd_tensors(tensor):
                if verb == "combine":
                    moe.dispatch(ids, [rows], MOST)
                else:
                    # What was found good of its like must not let it in.
                    call()
                    finish()
                with pytest.raises((ShapeError, ConfigError)) as caught:
                    call(**({name: each} if odd else {}))
                assert caught.value.reporter == (None if odd else 1), (name, kind)
                finish()
                stories.setdefault(name, []).append(f"{kind}: {caught.value.story()}")
    return stories


@pytest.mark.parametrize(("verb", "wire_format"), [("dispatch", None), ("dispatch_tokens", "nvfp4"), ("combine", None)])
def test_odd_tensors_are_refused_on_every_rank(
    run_ranks: Ranks, waiting_transport: str, verb: str, wire_format: str | None
) -> None:
    mine, *others = run_ranks(refused_everywhere, 3, waiting_transport, verb, wire_format)
    assert all(each == mine for each in others)
    assert all(len(stories) >= 5 for stories in mine.values()), mine


def test_odd_tensors_look_like_nothing() -> None:
    """What is kept for calls that look alike never serves one with such a tensor that has the same shape and dtype."""
    for plain in (torch.ones((2, 2)), torch.ones((2, 1), dtype=torch.complex64), torch.ones((2, 2)).bfloat16()):
        for kind, each in odd_tensors(plain):
            assert look(each) is None or look(each) != look(plain), kind

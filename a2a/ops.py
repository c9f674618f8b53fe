"""ops: dispatch and combine as torch.library operators, for graphs that torch.compile makes.

Owns how a graph names a live exchange, and what its operators promise about order and memory. Refuses to know how a
round works, which is the object's own business, and what experts do.

What a compiler must be told, and how:

* The verbs of one exchange happen in the order of the program, each exactly once: every operator changes `Handle.turn`,
  a small tensor, so that none can be moved past another, dropped or merged.
* Peers write to the workspace, which no schema can say: a compiler reads what an operator returned as late as it likes,
  and again if it likes. So received rows leave the workspace by a copy, unless the caller vouches for their readers
  (`in_place`). What does lie in the workspace comes from operators that change an argument, which is memory that
  torch.compile does not use again for other values.

The workspace itself is no argument: a compiler may give an operator a copy of what it changes (torch.compile's own
`aot_eager` does), and a copy of the workspace is not where peers write. A copy of `turn` names the same exchange.
"""

from __future__ import annotations

import dataclasses
import secrets
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from a2a.alltoall import MoeAlltoAll, plain_tensors
from a2a.arguments import SUM_DTYPES
from a2a.config import MAX_PAYLOADS
from a2a.errors import ConfigError, ShapeError, StateError
from a2a.quant.ops import register

_BOUND: Final[weakref.WeakValueDictionary[int, MoeAlltoAll]] = weakref.WeakValueDictionary()
_TURNS: Final[weakref.WeakKeyDictionary[MoeAlltoAll, Tensor]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Handle:
    """A live exchange as operators take it; made by `bind`, not by hand.

    Attributes:
        turn: int64 `[3]` on the CPU: which object, its EP rank, and how many operators it has run. One per object: its
            contexts share it, so that a program's verbs keep their order on every rank.
        ep_size: ranks of its group.
        context: index of the context whose rounds are meant.
    """

    turn: Tensor
    ep_size: int
    context: int


@plain_tensors()
def bind(moe: MoeAlltoAll, context: int = 0) -> Handle:
    """Makes an exchange known to the operators of this process, until `moe.close()`.

    Not for compiled code: call it before. Binding again gives a handle of the same turn. A handle whose object was
    closed or collected is refused by every operator with StateError.

    Raises:
        StateError: the object is closed.
        ConfigError: no such context.
    """
    if moe.state == "closed":
        raise StateError(rank=moe.ep_rank, call="bind", state=moe.state, change="build a new object")
    if not 0 <= context < moe.config.num_contexts:
        raise ConfigError(
            what="context",
            got=context,
            wanted=f"an index below num_contexts = {moe.config.num_contexts}",
            change="raise num_contexts with moe.ensure on all ranks",
            rank=moe.ep_rank,
        )
    if moe not in _TURNS:
        # Not id(moe), which another object may have once this one is collected without having been closed.
        number = secrets.randbits(62)
        _BOUND[number] = moe
        _TURNS[moe] = torch.tensor([number, moe.ep_rank, 0], dtype=torch.int64)
        moe.on_close(lambda: _release(number))
    return Handle(_TURNS[moe], moe.ep_size, context)


def _release(number: int) -> None:
    moe = _BOUND.pop(number, None)
    if moe is not None:
        del _TURNS[moe]


def dispatch(
    handle: Handle,
    topk_ids: Tensor,
    payloads: Sequence[Tensor],
    runtime_max_tokens_per_rank: int,
    *,
    in_place: bool = False,
    invalid_token_expert_id: int | None = None,
    expert_id_payload_index: int | None = None,
) -> tuple[list[Tensor], Tensor]:
    """`MoeAlltoAll.dispatch` as an operator.

    Args:
        handle: of the exchange.
        topk_ids: int32 or int64 `[n, k]`, contiguous, global expert ids; n may be symbolic.
        payloads: 1 to 8 contiguous tensors `[n, *]`.
        runtime_max_tokens_per_rank: R, equal on all ranks and at least n of each; an argument, since it does not
            follow from this rank's n.
        in_place: return views into the workspace, which end with combine, instead of copies of their own. Only for rows
            that nobody reads but operators, opaque to the compiler, whose results go into combine's payload: reads by
            torch's own operations may be moved behind combine.
        invalid_token_expert_id: as in the verb.
        expert_id_payload_index: which payload holds ids to scrub; None for none, since a graph does not know which
            tensors are one object.

    Returns:
        (received, recv_counts): for each payload `[ep, R, *]` of its dtype; int32 `[ep]`.

    Raises:
        As the verb, and StateError for a handle of a closed exchange.
    """
    made = _DISPATCH(
        handle.turn,
        topk_ids,
        list(payloads),
        handle.ep_size,
        runtime_max_tokens_per_rank,
        handle.context,
        in_place,
        invalid_token_expert_id,
        expert_id_payload_index,
    )
    return list(made[1 : 1 + len(payloads)]), made[0]


def combine_area(
    handle: Handle, like: Tensor, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
) -> Tensor:
    """`MoeAlltoAll.get_combine_payload_tensor_in_workspace` as an operator: `[ep, R, hidden_size]` for experts' output.

    An operator that is given it as the tensor to change saves `combine` a copy wherever the compiler leaves it in
    place; where not, the result is the same.

    Args:
        like: any tensor on the exchange's device.
        runtime_max_tokens_per_rank, hidden_size, dtype: as in the verb.
    """
    area: Tensor = _AREA(
        handle.turn, like, handle.ep_size, runtime_max_tokens_per_rank, hidden_size, dtype, handle.context
    )
    return area


def combine(
    handle: Handle,
    payload: Tensor,
    runtime_max_tokens_per_rank: int,
    num_tokens: int,
    *,
    output_dtype: torch.dtype | None = None,
    use_low_precision: bool = False,
) -> Tensor:
    """`MoeAlltoAll.combine` as an operator.

    Args:
        handle: of the exchange.
        payload: `[ep, R, H']` or `[ep*R, H']`, as in the verb. Rows that lie in the combine area already, as
            `combine_area` gives it, are not copied.
        runtime_max_tokens_per_rank: R of the dispatch.
        num_tokens: n of the dispatch, rows of the result; a number, which may be symbolic, that shapes are known by.
        output_dtype: fp16, bf16, fp32; None for the payload's (bf16 with `use_low_precision`).
        use_low_precision: as in the verb.

    Returns:
        `[n, H']`, memory of its own.

    Raises:
        As the verb, and StateError for a handle of a closed exchange.
    """
    made: Tensor = _COMBINE(
        handle.turn,
        payload,
        runtime_max_tokens_per_rank,
        num_tokens,
        handle.context,
        output_dtype,
        use_low_precision,
    )
    return made


def _take_turn(turn: Tensor, call: str) -> MoeAlltoAll:
    number, rank, _ = turn.tolist()
    moe = _BOUND.get(number)
    if moe is None:
        raise StateError(rank=rank, call=call, state="closed", change="bind a live object")
    turn[2] += 1
    return moe


def _lent(view: Tensor) -> Tensor:
    """The same memory under a storage of its own: no two results of an operator may share one."""
    # By capsules: the tensor's own protocol may make one stream wait for another. As bytes: not all carry 8-bit floats.
    return from_dlpack(to_dlpack(view.view(torch.uint8))).view(view.dtype)


def _is_combine_area(moe: MoeAlltoAll, context: int, payload: Tensor) -> bool:
    mine = moe.workspace.data_ptr() + moe.ep_rank * moe.workspace.stride(0)
    row_bytes = payload.shape[-1] * payload.dtype.itemsize
    return payload.data_ptr() == mine + moe.layout.combine_offset(row_bytes, context)


def _dispatch(
    turn: Tensor,
    topk_ids: Tensor,
    payloads: Sequence[Tensor],
    ep_size: int,
    most: int,
    context: int = 0,
    in_place: bool = False,
    invalid_id: int | None = None,
    ids_payload: int | None = None,
) -> tuple[Tensor, ...]:
    rounds = _take_turn(turn, "dispatch").contexts[context]
    views = rounds.dispatch(topk_ids, list(payloads), most, invalid_id, ids_payload)
    given = [_lent(view) if in_place else view.clone() for view in views]
    return rounds.recv_counts.clone(), *given, *_absent(topk_ids, len(views))


def _dispatch_fake(
    turn: Tensor,
    topk_ids: Tensor,
    payloads: Sequence[Tensor],
    ep_size: int,
    most: int,
    context: int = 0,
    in_place: bool = False,
    invalid_id: int | None = None,
    ids_payload: int | None = None,
) -> tuple[Tensor, ...]:
    views = [rows.new_empty((ep_size, most, *rows.shape[1:])) for rows in payloads]
    return topk_ids.new_empty((ep_size,), dtype=torch.int32), *views, *_absent(topk_ids, len(views))


def _absent(like: Tensor, num_payloads: int) -> list[Tensor]:
    """What stands for payloads that were not sent: an operator that changes an argument cannot return a list."""
    return [like.new_empty((0,)) for _ in range(MAX_PAYLOADS - num_payloads)]


def _area(
    turn: Tensor, like: Tensor, ep_size: int, most: int, hidden_size: int, dtype: torch.dtype, context: int = 0
) -> Tensor:
    rounds = _take_turn(turn, "get_combine_payload_tensor_in_workspace").contexts[context]
    return _lent(rounds.get_combine_payload_tensor_in_workspace(most, hidden_size, dtype))


def _area_fake(
    turn: Tensor, like: Tensor, ep_size: int, most: int, hidden_size: int, dtype: torch.dtype, context: int = 0
) -> Tensor:
    return like.new_empty((ep_size, most, hidden_size), dtype=dtype)


def _combine(
    turn: Tensor,
    payload: Tensor,
    most: int,
    num_tokens: int,
    context: int = 0,
    output_dtype: torch.dtype | None = None,
    low_precision: bool = False,
) -> Tensor:
    moe = _take_turn(turn, "combine")
    in_place = _is_combine_area(moe, context, payload)
    output = _combine_fake(turn, payload, most, num_tokens, context, output_dtype, low_precision)
    rounds = moe.contexts[context]
    return rounds.combine(payload, most, in_place, output_dtype, output=output, use_low_precision=low_precision)


def _combine_fake(
    turn: Tensor,
    payload: Tensor,
    most: int,
    num_tokens: int,
    context: int = 0,
    output_dtype: torch.dtype | None = None,
    low_precision: bool = False,
) -> Tensor:
    if payload.dim() not in (2, 3):
        raise ShapeError(what="payload", got=f"{payload.dim()} dimensions", wanted="[ep, R, H'] or [ep*R, H']")
    dtype = output_dtype or (torch.bfloat16 if low_precision else payload.dtype)
    if dtype not in SUM_DTYPES:
        raise ConfigError(what="output_dtype", got=str(dtype), wanted="float16, bfloat16 or float32 in a graph")
    return payload.new_empty((num_tokens, payload.shape[-1]), dtype=dtype)


_DISPATCH = register(
    "dispatch(Tensor(a!) turn, Tensor topk_ids, Tensor[] payloads, SymInt ep_size, SymInt runtime_max_tokens_per_rank, "
    "int context=0, bool in_place=False, int? invalid_token_expert_id=None, int? expert_id_payload_index=None) -> ("
    + ", ".join(["Tensor"] * (1 + MAX_PAYLOADS))
    + ")",
    _dispatch,
    _dispatch_fake,
)
_AREA = register(
    "combine_area(Tensor(a!) turn, Tensor like, SymInt ep_size, SymInt runtime_max_tokens_per_rank, "
    "SymInt hidden_size, ScalarType dtype, int context=0) -> Tensor",
    _area,
    _area_fake,
)
_COMBINE = register(
    "combine(Tensor(a!) turn, Tensor payload, SymInt runtime_max_tokens_per_rank, SymInt num_tokens, int context=0, "
    "ScalarType? output_dtype=None, bool use_low_precision=False) -> Tensor",
    _combine,
    _combine_fake,
)

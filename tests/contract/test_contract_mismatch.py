"""What must be equal on all ranks is compared before a byte moves: every rank raises, with every rank's value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

import a2a
from a2a.comm import Comm
from a2a.errors import A2AError, ConfigError, MismatchError, ShapeError, Unsupported

BUILT: dict[str, Any] = {"max_num_tokens": 8, "top_k": 2, "num_experts": 8, "hidden_size": 32}


def built_otherwise(comm: Comm, transport: str, name: str, value: Any) -> str:
    odd = comm.Get_rank() == comm.Get_size() - 1
    arguments = {**BUILT, name: value} if odd else BUILT
    with pytest.raises(MismatchError) as caught:
        a2a.MoeAlltoAll(**arguments, comm=comm, transport=transport)
    assert set(caught.value.values) == set(range(comm.Get_size()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 64),
        ("max_num_tokens", 9),
        ("top_k", 3),
        ("num_experts", 9),
        ("name", "draft"),
        ("row_order", "token"),
        ("scrub", None),
        ("wire_format", "mxfp8"),
        ("dispatch_dtype_bytes_per_elem", 1),
        ("extra_payload_bytes_per_token", 4),
        ("combine_dtype_bytes_per_elem", 4),
        ("placement", [3, 2, 1, 0, 0, 1, 2, 3]),
        ("eplb_stats_num_experts", 4),
        ("enable_rank_mask", True),
        ("num_contexts", 2),
    ],
)
def test_mismatch_at_build(run_ranks: Ranks, transport: str, name: str, value: Any) -> None:
    messages = run_ranks(built_otherwise, 4, transport, name, value)
    assert len(set(messages)) == 1, messages
    assert name in messages[0] and "rank 0: " in messages[0] and "rank 3: " in messages[0]


def refused_on_one(comm: Comm, transport: str, arguments: dict[str, Any]) -> str:
    odd = comm.Get_rank() == 1
    with pytest.raises(ConfigError) as caught:
        a2a.MoeAlltoAll(**{**BUILT, **(arguments if odd else {})}, comm=comm, transport=transport)
    assert caught.value.reporter == (None if odd else 1)
    # The group is unharmed: the next build works.
    with a2a.MoeAlltoAll(**BUILT, comm=comm, transport=transport):
        return caught.value.story()


@pytest.mark.parametrize(
    "arguments",
    [
        {"hidden_size": 0},
        {"top_k": 65},
        {"num_experts": 3},
        {"wire_format": "fp3"},
        {"wire_format": "fp8_block"},
        {"row_order": "sorted"},
        {"timeout_s": -1},
        {"startup_timeout_s": float("nan")},
        {"startup_timeout_s": 10**400},
        {"placement": [0, 1, 2, 4, 0, 1, 2, 3]},
        {"placement": [0, 1]},
        {"max_num_tokens": True},
        {"num_contexts": 257},
    ],
)
def test_mismatch_of_a_refused_value(run_ranks: Ranks, transport: str, arguments: dict[str, Any]) -> None:
    messages = run_ranks(refused_on_one, 4, transport, arguments)
    assert len(set(messages)) == 1 and next(iter(arguments)).split("_")[0] in messages[0], messages


class Incomparable:
    """What raises whatever is asked of it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("planted")

    def __repr__(self) -> str:
        raise RuntimeError("planted")


def strange_on_one(comm: Comm, transport: str) -> dict[str, str]:
    """For each word of the constructor one rank has values of no use: while building, and for an object to grow."""
    odd = comm.Get_rank() == 1
    stories = {}
    words = [*BUILT, "dispatch_dtype_bytes_per_elem", "dispatch_scale_bytes_per_token", "wire_format", "mx_alignment",
             "combine_dtype_bytes_per_elem", "extra_payload_bytes_per_token", "placement", "name", "row_order", "scrub",
             "eplb_stats_num_experts", "enable_rank_mask", "num_contexts"]  # fmt: skip
    values = (Incomparable(), torch.zeros(2), torch.zeros(2, device="meta"), [Incomparable()], {}, 1j)
    with a2a.MoeAlltoAll(**BUILT, comm=comm, transport=transport) as moe:
        for word in [*words, "transport", "startup_timeout_s", "timeout_s"]:
            for number, value in enumerate(values):
                given = {**BUILT, "comm": comm, "transport": transport, **({word: value} if odd else {})}
                with pytest.raises(ConfigError) as caught:
                    a2a.MoeAlltoAll(**given)
                assert caught.value.reporter == (None if odd else 1), word
                stories[f"{word} {number}"] = caught.value.story()
                if word in words:
                    with pytest.raises(ConfigError):
                        moe.ensure(**({word: value} if odd else {}))
        # More than any machine has, asked for by all: an error as well, and nothing is lost.
        for word in ("max_num_tokens", "hidden_size", "extra_payload_bytes_per_token") if transport == "host" else ():
            with pytest.raises(Unsupported):
                moe.ensure(**{word: 2**70})
        ids = torch.zeros((1, 2), dtype=torch.int32, device=moe.workspace.device)
        moe.dispatch(ids, [ids], 1)
    return stories


def test_mismatch_of_a_value_of_no_use(run_ranks: Ranks, transport: str) -> None:
    mine, *others = run_ranks(strange_on_one, 3, transport)
    for each in others:
        assert each == mine


def round_otherwise(comm: Comm, transport: str, what: str) -> str:
    """One rank says something else than the others in a round; afterwards the same object does a good round."""
    rank, ep = comm.Get_rank(), comm.Get_size()
    odd = rank == 2
    built = {**BUILT, "extra_payload_bytes_per_token": 16, "eplb_stats_num_experts": 3, "enable_rank_mask": True}
    with a2a.MoeAlltoAll(**built, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        ids = torch.tensor([[0, 7], [rank, 3]], dtype=torch.int32, device=device)
        rows = torch.full((2, 32), rank + 1, dtype=torch.bfloat16, device=device)
        before = moe.workspace[rank].clone()
        payloads, most, stats = [rows, ids], 4, None
        if odd and what == "runtime_max_tokens_per_rank":
            most = 5
        elif odd and what == "payload_row_bytes":
            payloads = [rows[:, :16].contiguous(), ids]
        elif odd and what == "number of payloads":
            payloads = [rows]
        elif odd and what == "eplb_local_stats":
            stats = torch.zeros(3, dtype=torch.int32, device=device)
        at_combine = what.startswith("combine")
        if not at_combine:
            with pytest.raises(MismatchError) as caught:
                moe.dispatch(ids, payloads, most, eplb_local_stats=stats)
            assert torch.equal(moe.workspace[rank][_dispatch_area(moe)], before[_dispatch_area(moe)])
        views = moe.dispatch(ids, [rows, ids], 4)
        payload = views[0].clone()
        if at_combine:
            other = payload[..., :8].contiguous() if what == "combine columns" else payload.half()
            with pytest.raises(MismatchError) as caught:
                moe.combine(other if odd else payload, 4)
            assert moe.state == "dispatched"
        combined = moe.combine(payload, 4)
        owners = moe.placement.owners(ids.cpu())
        times = torch.tensor([len(set(row.tolist())) for row in owners], dtype=torch.bfloat16)
        assert torch.equal(combined.cpu(), rows.cpu() * times[:, None])
        assert set(caught.value.values) == set(range(ep))
        return str(caught.value)


def _dispatch_area(moe: a2a.MoeAlltoAll) -> slice:
    region = moe.layout.region("dispatch")
    return slice(region.offset_bytes, region.end_bytes)


@pytest.mark.parametrize(
    "what",
    [
        "runtime_max_tokens_per_rank",
        "payload_row_bytes",
        "number of payloads",
        "eplb_local_stats",
        "combine columns",
        "combine dtype",
    ],
)
def test_mismatch_in_a_round(run_ranks: Ranks, waiting_transport: str, what: str) -> None:
    messages = run_ranks(round_otherwise, 4, waiting_transport, what)
    assert len(set(messages)) == 1, messages
    assert "rank 0: " in messages[0] and "rank 3: " in messages[0]


def bad_on_one(comm: Comm, transport: str, what: str) -> str:
    """One rank passes what does not fit: all raise its error, and the next call of the same round works."""
    rank = comm.Get_rank()
    odd = rank == 1
    with a2a.MoeAlltoAll(**BUILT, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        ids = torch.tensor([[0, 7]], dtype=torch.int32, device=device)
        rows = torch.ones((1, 32), dtype=torch.bfloat16, device=device)
        bad_dispatch: dict[str, Any] = {
            "ids dtype": (ids.float(), [rows], 4),
            "ids columns": (ids.repeat(1, 2), [rows], 4),
            "ids transposed": (torch.zeros(2, 4, dtype=torch.int32, device=device).t()[:1], [rows], 4),
            "ids are a list": ([[0, 7]], [rows], 4),
            "row count": (ids, [rows.repeat(2, 1)], 4),
            "too wide": (ids, [rows.repeat(1, 2)], 4),
            "no payloads": (ids, [], 4),
            "nine payloads": (ids, [rows[:, :1].contiguous()] * 9, 4),
            "R too big": (ids, [rows], 9),
            "R too small": (ids.repeat(3, 1), [rows.repeat(3, 1)], 2),
            "R is a float": (ids, [rows], 4.0),
            "R is a tensor": (ids, [rows], torch.tensor(4)),
            "ids payload index": (ids, [rows, ids], 4, None, 2),
            "ids payload is rows": (ids, [rows, ids], 4, None, 0),
            "invalid id": (ids, [rows, ids], 4, 2**31),
            "statistics": (ids, [rows, ids], 4, None, None, torch.zeros(1, dtype=torch.int32, device=device)),
            "mask": (ids, [rows, ids], 4, None, None, None, torch.tensor([7], dtype=torch.uint64)),
        }
        if what in bad_dispatch:
            with pytest.raises((ShapeError, ConfigError)) as caught:
                moe.dispatch(*(bad_dispatch[what] if odd else (ids, [rows, ids], 4)))
        views = moe.dispatch(ids, [rows, ids], 4)
        payload = views[0].clone()
        scales = torch.empty((1, 2), dtype=torch.uint8, device=device)
        bad_combine: dict[str, Any] = {
            "payload dtype": (payload.int(), 4),
            "payload shape": (payload[:, :3].contiguous(), 4),
            "payload too wide": (payload.repeat(1, 1, 2), 4),
            "other R": (payload, 3),
            "not the workspace": (payload, 4, True),
            "output dtype": (payload, 4, False, torch.int32),
            "output scales": (payload, 4, False, torch.float8_e4m3fn),
            "scale for bf16": (payload, 4, False, None, None, 2.0),
            "layout by name": (payload, 4, False, torch.float8_e4m3fn, scales, 1.0, "linear"),
            "two scalar scales": (payload, 4, False, torch.uint8, scales.view(torch.float8_e4m3fn), torch.ones(2)),
            "no columns": (payload[..., :0].contiguous(), 4),
            "output dtype is none": (payload, 4, False, torch.zeros(2)),
            "neither yes nor no": (payload, 4, torch.zeros(2)),
            "no precision": {"use_low_precision": torch.zeros(2)},
            "output shape": {"output": torch.empty(2, 32, dtype=torch.bfloat16, device=device)},
            "output kind": {"output": torch.empty(1, 32, dtype=torch.float16, device=device)},
            "output stride": {"output": torch.empty(32, 1, dtype=torch.bfloat16, device=device).t()[:, ::2]},
        }
        if what in bad_combine:
            bad = bad_combine[what]
            with pytest.raises((ShapeError, ConfigError)) as caught:
                if odd and isinstance(bad, dict):
                    moe.combine(payload, 4, **bad)
                else:
                    moe.combine(*(bad if odd else (payload, 4)))
            assert moe.state == "dispatched"
        combined = moe.combine(payload, 4)
        assert torch.equal(combined.cpu(), torch.full((1, 32), 2.0, dtype=torch.bfloat16))
        error: A2AError = caught.value
        assert error.reporter == (None if odd else 1), error
        return f"{type(error).__name__}: {error.story()}"


def low_precision_retried(comm: Comm, transport: str) -> None:
    """A refused combine leaves the rows that it had made ready to travel as the experts wrote them."""
    rank, ep = comm.Get_rank(), comm.Get_size()
    with a2a.MoeAlltoAll(**{**BUILT, "hidden_size": 256}, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        ids = torch.tensor([[0, 7], [3, 5]], dtype=torch.int32, device=device)
        moe.dispatch(ids, [ids], 2)
        view = moe.get_combine_payload_tensor_in_workspace(2, 256, torch.bfloat16)
        written = torch.randn((ep, 2, 256), generator=torch.Generator().manual_seed(rank)).bfloat16()
        view.copy_(written)
        with pytest.raises(MismatchError, match="use_low_precision"):
            moe.combine(view, 2, payload_in_workspace=True, use_low_precision=rank != 1)
        received = moe.recv_counts.tolist()
        for source in range(ep):
            got, wanted = view[source, : received[source]].cpu(), written[source, : received[source]]
            assert torch.equal(got, wanted), source
        moe.combine(view, 2, payload_in_workspace=True)


def test_mismatch_of_precision_loses_no_row(run_ranks: Ranks, waiting_transport: str) -> None:
    run_ranks(low_precision_retried, 3, waiting_transport)


def strided_column(comm: Comm, transport: str) -> None:
    """One column counts as contiguous whatever its stride: it is an ordinary payload."""
    ep = comm.Get_size()
    # Room for the e4m3 wire, whose scales take more than such a row.
    built = {**BUILT, "hidden_size": 1, "combine_dtype_bytes_per_elem": 1}
    with a2a.MoeAlltoAll(**built, comm=comm, transport=transport) as moe:
        device = moe.workspace.device
        ids = torch.tensor([[0, 7]], dtype=torch.int32, device=device)
        for low_precision in (False, True):
            moe.dispatch(ids, [ids], 4)
            column = torch.ones((1, ep * 4), dtype=torch.bfloat16, device=device).t()
            assert moe.combine(column, 4, use_low_precision=low_precision).eq(2).all()


def test_one_column_of_any_stride(run_ranks: Ranks, transport: str) -> None:
    run_ranks(strided_column, 3, transport)


DISPATCH_FAULTS = (
    "ids dtype",
    "ids columns",
    "ids transposed",
    "ids are a list",
    "row count",
    "too wide",
    "no payloads",
    "nine payloads",
    "R too big",
    "R too small",
    "R is a float",
    "R is a tensor",
    "ids payload index",
    "ids payload is rows",
    "invalid id",
    "statistics",
    "mask",
)
COMBINE_FAULTS = (
    "payload dtype",
    "payload shape",
    "payload too wide",
    "other R",
    "not the workspace",
    "output dtype",
    "output scales",
    "scale for bf16",
    "layout by name",
    "two scalar scales",
    "no columns",
    "output dtype is none",
    "neither yes nor no",
    "no precision",
    "output shape",
    "output kind",
    "output stride",
)


def all_bad_on_one(comm: Comm, transport: str, faults: tuple[str, ...]) -> list[str]:
    return [bad_on_one(comm, transport, what) for what in faults]


@pytest.mark.parametrize("faults", [DISPATCH_FAULTS[:9], DISPATCH_FAULTS[9:], COMBINE_FAULTS], ids=str)
def test_mismatch_of_an_argument_that_does_not_fit(
    run_ranks: Ranks, waiting_transport: str, faults: tuple[str, ...]
) -> None:
    for what, *messages in zip(faults, *run_ranks(all_bad_on_one, 3, waiting_transport, faults), strict=True):
        assert len(set(messages)) == 1, (what, messages)

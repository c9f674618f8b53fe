"""experts/gated_mlp: SwiGLU experts of one rank in plain torch, and the weighted sum over a token's picks.

Owns the weights of a set of experts and their arithmetic. Refuses to know global expert ids, ranks and the exchange.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from a2a.errors import ConfigError, ShapeError

_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GatedMlp:
    """Experts that compute `w2 @ (silu(gate) * up)`, where `gate, up = w13 @ x`.

    The activation is that of https://arxiv.org/abs/2002.05202 (SwiGLU), without biases.

    Args:
        w13: bf16, fp16 or fp32 `[E, 2I, H]`, of each expert first the I rows of the gate, then the I rows of up.
        w2: `[E, H, I]`, same dtype and device. E may be 0, for a rank that holds no expert.
        compute_dtype: of products and sums whatever the weights' dtype: fp32, or fp64 for results that hardly depend on
            the order of summation. The activation is always formed in fp64.

    Raises:
        ShapeError: the two do not fit each other.
        ConfigError: another compute_dtype.
    """

    def __init__(self, w13: Tensor, w2: Tensor, *, compute_dtype: torch.dtype = torch.float32) -> None:
        fits = (
            w13.dim() == 3
            and w2.dim() == 3
            and w13.shape == (w2.shape[0], 2 * w2.shape[2], w2.shape[1])
            and w13.dtype in _WEIGHT_DTYPES
            and (w13.dtype, w13.device) == (w2.dtype, w2.device)
        )
        if not fits:
            raise ShapeError(
                what="w13, w2",
                got=f"{w13.dtype} {list(w13.shape)} on {w13.device}, {w2.dtype} {list(w2.shape)} on {w2.device}",
                wanted="[E, 2I, H] and [E, H, I], both bf16, fp16 or fp32 on one device",
            )
        if compute_dtype not in (torch.float32, torch.float64):
            raise ConfigError(what="compute_dtype", got=str(compute_dtype), wanted="torch.float32 or torch.float64")
        self.w13 = w13
        self.w2 = w2
        self.compute_dtype = compute_dtype

    @classmethod
    def random(
        cls,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
        compute_dtype: torch.dtype = torch.float32,
    ) -> GatedMlp:
        """Normal weights of variance 1 / fan-in on the CPU; the same on every rank that draws with the same seed."""
        for what, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size < 1:
                raise ConfigError(what=what, got=size, wanted="an integer >= 1")
        generator = torch.Generator().manual_seed(seed)
        w13 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, generator=generator) / hidden_size**0.5
        w2 = torch.randn(num_experts, hidden_size, intermediate_size, generator=generator) / intermediate_size**0.5
        return cls(w13.to(dtype), w2.to(dtype), compute_dtype=compute_dtype)

    def select(self, expert_ids: Tensor) -> GatedMlp:
        """The experts of these int64 ids, in their order: with `Placement.experts_of(rank)` the share of a rank."""
        ids = expert_ids.to(self.w13.device)
        return GatedMlp(self.w13[ids], self.w2[ids], compute_dtype=self.compute_dtype)

    def to(self, device: torch.device | str) -> GatedMlp:
        """The same experts on a device."""
        return GatedMlp(self.w13.to(device), self.w2.to(device), compute_dtype=self.compute_dtype)

    @property
    def num_experts(self) -> int:
        """E, the experts held here."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H, elements of a row in and out."""
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        """I, inner width of an expert."""
        return self.w2.shape[2]

    def forward(self, rows: Tensor, local_experts: Tensor, topk_weights: Tensor) -> Tensor:
        """For each row the sum over its picks of routing weight times expert output.

        Rows are grouped by expert: one pair of matrix products for each expert that has any.

        Args:
            rows: fp32 `[m, H]`.
            local_experts: integer `[m, k]`, index into these experts; negative for a pick that is not here.
            topk_weights: fp32 `[m, k]`.

        Returns:
            fp32 `[m, H]`, summed in ascending expert in the compute dtype, then rounded; zero for a row without a pick
            here.

        Host synchronisation:
            One, for the sizes of the groups.

        Raises:
            ShapeError: a shape, or an index beyond the experts.
        """
        self._check(rows, local_experts, topk_weights)
        picks = local_experts.flatten().long()
        sizes = torch.bincount(picks[picks >= 0], minlength=self.num_experts).tolist()
        if len(sizes) > self.num_experts:
            raise ShapeError(
                what="local_experts", got=f"index {len(sizes) - 1}", wanted=f"indices below {self.num_experts}"
            )
        # Picks that are not here sort first.
        order = picks.argsort(stable=True)[picks.numel() - sum(sizes) :]
        weights = topk_weights.flatten().to(self.compute_dtype)
        total = torch.zeros((rows.shape[0], self.hidden_size), dtype=self.compute_dtype, device=rows.device)
        for expert, group in enumerate(torch.split(order, sizes)):
            if group.numel():
                tokens = group // local_experts.shape[1]
                total.index_add_(0, tokens, self.apply(expert, rows[tokens]) * weights[group, None])
        return total.float()

    def apply(self, expert: int, rows: Tensor) -> Tensor:
        """Output of one expert, `[m, H]` in the compute dtype, for rows `[m, H]`."""
        w13, w2 = self.w13[expert].to(self.compute_dtype), self.w2[expert].to(self.compute_dtype)
        gate, up = (rows.to(self.compute_dtype) @ w13.T).double().chunk(2, dim=1)
        return (silu(gate) * up).to(self.compute_dtype) @ w2.T

    def _check(self, rows: Tensor, local_experts: Tensor, topk_weights: Tensor) -> None:
        for what, tensor, shape, dtypes in (
            ("rows", rows, (rows.shape[0], self.hidden_size), (torch.float32,)),
            ("local_experts", local_experts, (rows.shape[0], local_experts.shape[-1]), (torch.int32, torch.int64)),
            ("topk_weights", topk_weights, tuple(local_experts.shape), (torch.float32,)),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                raise ShapeError(
                    what=what,
                    got=f"{tensor.dtype} {list(tensor.shape)}",
                    wanted=f"{' or '.join(map(str, dtypes))} {list(shape)}",
                )

"""plan: what an exchange will take and cost, without a process.

Owns the prediction and what it rests on. Refuses to measure; sizes come from the layout, figures from configs/clusters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from a2a.bench.byte_count import count_bytes, pair_counts
from a2a.bench.workload import workload
from a2a.config import ExchangeConfig, ModelPreset, cluster_figures
from a2a.errors import ConfigError
from a2a.layout import WorkspaceLayout
from a2a.placement import Placement
from a2a.transport import TRANSPORTS, transport_class

MIB: Final = 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `a2a plan` was asked for.

    Attributes:
        preset: shape of the layer.
        ep_size: ranks.
        max_tokens: capacity, tokens per rank.
        tokens: tokens per rank of the round that is predicted.
        wire_format: dispatch wire.
        transport: a transport's name.
        routing: of the round that is predicted.
        row_order: of the receive blocks.
        seed: of a generated routing.
    """

    preset: ModelPreset
    ep_size: int
    max_tokens: int
    tokens: int
    wire_format: str
    transport: str
    routing: str
    row_order: str = "compact"
    seed: int = 0


def config_of(plan: Plan) -> ExchangeConfig:
    """The exchange that a plan is about."""
    return ExchangeConfig(
        ep_size=plan.ep_size,
        max_num_tokens=plan.max_tokens,
        top_k=plan.preset.top_k,
        num_experts=plan.preset.num_experts,
        hidden_size=plan.preset.hidden_size,
        wire_format=plan.wire_format,
        mx_alignment=plan.preset.mx_alignment if plan.wire_format == "mxfp8" else 0,
        row_order=plan.row_order,
    )


def predict(plan: Plan) -> Mapping[str, Any]:
    """Sizes, bytes and a predicted time of a pair, as the contract's JSON names them.

    Bytes are those of the rank that sends most. The predicted time of a phase is `fixed + bytes / bandwidth` with the
    figures of configs/clusters; None where no figures of the transport are shipped.
    """
    if not 0 <= plan.tokens <= plan.max_tokens:
        raise ConfigError(what="tokens", got=plan.tokens, wanted=f"an integer in 0..max_tokens = {plan.max_tokens}")
    if plan.transport not in TRANSPORTS:
        raise ConfigError(what="transport", got=plan.transport, wanted="one of " + ", ".join(TRANSPORTS))
    config = config_of(plan)
    layout = WorkspaceLayout(config, transport_class(plan.transport).control_regions(config))
    routed = workload(
        plan.routing,
        ep_size=plan.ep_size,
        tokens=plan.tokens,
        num_experts=config.num_experts,
        top_k=config.top_k,
        seed=plan.seed,
    )
    counts = pair_counts(routed.topk_ids, Placement.contiguous(config.num_experts, config.ep_size))
    moved = count_bytes(
        counts,
        dispatch_row_bytes=config.dispatch_bytes_per_token,
        combine_row_bytes=config.combine_bytes_per_token,
    )
    figures = cluster_figures(plan.transport)
    predicted: dict[str, float] | None = None
    rests_on: list[str] = [f"routing {plan.routing!r}, seed {plan.seed}, {plan.tokens} tokens per rank"]
    if figures is None:
        rests_on.append(f"no figures of transport {plan.transport!r} are shipped: no time is predicted")
    else:
        crowd = plan.ep_size if figures.bandwidth_of == "machine" else 1
        predicted = {
            phase: figures.fixed_us_per_phase
            + crowd * getattr(moved[phase], f"{figures.bytes_counted}_bytes") / (gbps * 1e3)
            for phase, gbps in (("dispatch", figures.dispatch_gbps), ("combine", figures.combine_gbps))
        }
        predicted["pair"] = predicted["dispatch"] + predicted["combine"]
        rests_on.append(f"configs/clusters/{figures.name}.toml: {figures.source}")
        if plan.ep_size > figures.max_ep_size_measured:
            rests_on.append(f"measured up to {figures.max_ep_size_measured} ranks; beyond that extrapolated")
    return {
        "workspace_bytes_per_rank": layout.num_bytes,
        "regions": [
            {"name": region.name, "offset_bytes": region.offset_bytes, "num_bytes": region.num_bytes}
            for region in layout.regions
        ],
        "link_bytes_per_rank": moved["pair"].link_bytes,
        "logical_bytes_per_rank": moved["pair"].logical_bytes,
        "predicted_us": None if predicted is None else predicted["pair"],
        "by_phase": {
            phase: {
                "link_bytes": moved[phase].link_bytes,
                "logical_bytes": moved[phase].logical_bytes,
                "predicted_us": None if predicted is None else predicted[phase],
            }
            for phase in ("dispatch", "combine")
        },
        "rests_on": rests_on,
    }

#!/usr/bin/env bash
# Runs the command line with one rank per process under torchrun.
#
#   launch/torchrun.sh 4 check --rounds 20
#
# On several machines, on each of them (NNODES and MASTER_ADDR equal, NODE_RANK its own):
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh 4 check --rounds 20
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 RANKS_PER_MACHINE COMMAND [OPTION...]" >&2
    exit 2
fi
ranks=$1
shift

python=${PYTHON:-python}
nodes=${NNODES:-1}
if [[ $nodes -eq 1 ]]; then
    # torchrun chooses a free port by itself.
    meeting=(--standalone)
else
    : "${NODE_RANK:?set NODE_RANK, 0 to NNODES-1}" "${MASTER_ADDR:?set MASTER_ADDR, the machine with NODE_RANK 0}"
    meeting=(--nnodes "$nodes" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
exec "$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$ranks" -m a2a "$@"

#!/bin/sh
# All tests, the ways ranks are started: under mpiexec, under torchrun, and as processes that pytest starts itself.
# Fails at the first way that fails; what a way cannot run is listed with its reason.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
PATH="$scripts:$PATH"
# One thread per rank: the ranks are the parallelism.
export OMP_NUM_THREADS=1

echo "== 3 ranks under mpiexec"
mpiexec -n 3 "$python" -m pytest --with-mpi -q -x tests/contract
echo "== 4 ranks under torchrun"
"$python" -m torch.distributed.run --nproc-per-node 4 -m pytest -q -x tests/contract
echo "== pytest"
exec "$python" -m pytest -q tests

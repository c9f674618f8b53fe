#!/usr/bin/env bash
# Runs the command line with one rank per process under an MPI's mpiexec.
#
#   launch/mpirun.sh 5 check --rounds 20
#
# Takes the mpiexec beside the Python in use, which the extra a2a[mpi] installs, else the first on PATH. It must belong
# to the MPI that mpi4py loads, or every process would think itself alone (the package says so and stops).
# Options for mpiexec itself (host lists, binding) go into MPIEXEC_OPTIONS.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 RANKS COMMAND [OPTION...]" >&2
    exit 2
fi
ranks=$1
shift

python=${PYTHON:-python}
beside=$(dirname "$(command -v "$python")")/mpiexec
if [[ -x $beside ]]; then
    mpiexec=$beside
elif ! mpiexec=$(command -v mpiexec); then
    echo "$0: no mpiexec found; install the extra: pip install 'a2a[mpi]'" >&2
    exit 2
fi
read -r -a options <<< "${MPIEXEC_OPTIONS:-}"
exec "$mpiexec" -n "$ranks" "${options[@]}" "$python" -m a2a "$@"

#!/bin/bash
# One process of a run under Slurm; slurm.sh and slurm_servers.sh have their launchers start it, with the arguments of `alignment`.
#
# A run that a signal has stopped ends here with 0: neither a launcher nor srun then ends the processes that still write,
# and no launcher reports a failure. Rank 0 leaves the file ALIGNMENT_STOPPED, by which the script knows.
export TORCH_CPP_LOG_LEVEL=${ALIGNMENT_LOG_LEVEL:-${TORCH_CPP_LOG_LEVEL:-WARNING}}
python -m alignment "$@"
code=$?
[ "$code" = 143 ] || exit "$code"
[ "$RANK" != 0 ] || touch "$ALIGNMENT_STOPPED"

#!/bin/bash
# A run on several nodes under Slurm: one Accelerate launcher a node, one process a GPU.
#
#   sbatch --nodes 2 --gpus-per-node 8 configs/launch/slurm.sh sft sft/llama3.1_8b_8x80gb
#   LAUNCH=launch/fsdp2_hybrid sbatch --nodes 4 --gpus-per-node 8 configs/launch/slurm.sh sft sft/llama3.1_8b_8x80gb
#
# The arguments are those of `alignment`. LAUNCH is a launch file or the name of a packaged one (fsdp2 unless set), PORT the
# first node's port. Code, config and data must be visible under the same paths on every node; the run compares them at its
# start and refuses to train on nodes that differ. Slurm's SIGTERM before the time limit (--signal=TERM@300) makes the run
# write a checkpoint and stop; the job then requeues itself and goes on from it. A run that fails is not requeued.
#SBATCH --job-name=alignment
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: sbatch --nodes N --gpus-per-node G $0 VERB CONFIG [key=value ...]" >&2; exit 2; }
: "${SLURM_JOB_NODELIST:?start this with sbatch}" "${SLURM_NNODES:?start this with sbatch}"
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?ask for GPUs with --gpus-per-node}}
gpus=${gpus##*:} # "h100:8" -> 8
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*} # the first line; `head -n 1` may end scontrol by SIGPIPE, and with it the script
find='import sys; from alignment.config.load import find_packaged, packaged_folder
print(find_packaged(sys.argv[1], "launch"), packaged_folder("configs") / "launch/rank.sh", sep="\n")'
paths=$(python -c "$find" "${LAUNCH:-launch/fsdp2}")
file=${paths%%$'\n'*} rank=${paths#*$'\n'}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap : TERM # of a canceled job; the run's end is waited for

# Slurm signals every process of a step at once. The launcher lets the signal pass: it would signal its processes again.
export ALIGNMENT_STOPPED=$folder/stopped PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT
# A launcher logs a traceback where that of the first node, which holds their store, ends before it, although the run has gone
# well. What a launcher raises is still shown, and rank.sh gives the processes the user's level.
export LOGLEVEL=CRITICAL ALIGNMENT_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-WARNING} TORCH_CPP_LOG_LEVEL=ERROR
# Each node's own SLURM_NODEID is read there, so the inner shell expands it.
export ALIGNMENT_FILE=$file ALIGNMENT_RANK=$rank
export ALIGNMENT_HEAD=$head ALIGNMENT_PORT=${PORT:-29500} ALIGNMENT_PROCESSES=$((SLURM_NNODES * gpus))
code=0
srun --kill-on-bad-exit=1 bash -c 'trap "" TERM; exec python -m accelerate.commands.launch \
  --config_file "$ALIGNMENT_FILE" --num_machines "$SLURM_NNODES" --num_processes "$ALIGNMENT_PROCESSES" \
  --machine_rank "$SLURM_NODEID" --main_process_ip "$ALIGNMENT_HEAD" --main_process_port "$ALIGNMENT_PORT" \
  --no_python bash "$ALIGNMENT_RANK" "$@"' launch "$@" || code=$?

# Stopped before the time limit: the job requeues itself. A canceled job, whose processes get the same signal, does not.
[ -e "$ALIGNMENT_STOPPED" ] || exit "$code"
state=$(squeue --noheader --job "$SLURM_JOB_ID" --format %T) || state=unknown
[ "$state" = RUNNING ] || { echo "the job ends ($state); the same command goes on from its checkpoint" >&2; exit 143; }
trap 'echo "the job is requeued, and goes on from its checkpoint" >&2; exit 0' TERM # Slurm ends what it requeues
scontrol requeue "$SLURM_JOB_ID" || { echo "the job is not requeued; the same command goes on from its checkpoint" >&2; exit 143; }
sleep 60 > /dev/null 2>&1 &
wait

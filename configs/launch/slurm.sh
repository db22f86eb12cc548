#!/bin/bash
# A run on several nodes under Slurm: one Accelerate launcher a node, one process a GPU.
#
#   sbatch --nodes 2 --gpus-per-node 8 configs/launch/slurm.sh sft sft/llama3.1_8b_8x80gb
#   LAUNCH=launch/fsdp2_hybrid sbatch --nodes 4 --gpus-per-node 8 configs/launch/slurm.sh sft sft/llama3.1_8b_8x80gb
#
# The arguments are those of `alignment`. LAUNCH is a launch file or the name of a packaged one (fsdp2 unless set), PORT the
# first node's port. Code, config and data must be visible under the same paths on every node; the run compares them at its
# start and refuses to train on nodes that differ. Slurm's SIGTERM before the time limit (--signal=TERM@300) makes the run
# write a checkpoint and stop; the same command goes on from it.
#SBATCH --job-name=alignment
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: sbatch --nodes N --gpus-per-node G $0 VERB CONFIG [key=value ...]" >&2; exit 2; }
: "${SLURM_JOB_NODELIST:?start this with sbatch}" "${SLURM_NNODES:?start this with sbatch}"
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?ask for GPUs with --gpus-per-node}}
gpus=${gpus##*:} # "h100:8" -> 8
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*} # the first line; `head -n 1` may end scontrol by SIGPIPE, and with it the script
file=$(python -c 'import sys; from alignment.config.load import find_packaged; print(find_packaged(sys.argv[1], "launch"))' "${LAUNCH:-launch/fsdp2}")

# Each node's own SLURM_NODEID is read there, so the inner shell expands it.
export ALIGNMENT_FILE=$file ALIGNMENT_HEAD=$head ALIGNMENT_PORT=${PORT:-29500} ALIGNMENT_PROCESSES=$((SLURM_NNODES * gpus))
exec srun --kill-on-bad-exit=1 bash -c 'exec python -m accelerate.commands.launch \
  --config_file "$ALIGNMENT_FILE" --num_machines "$SLURM_NNODES" --num_processes "$ALIGNMENT_PROCESSES" \
  --machine_rank "$SLURM_NODEID" --main_process_ip "$ALIGNMENT_HEAD" --main_process_port "$ALIGNMENT_PORT" \
  -m alignment "$@"' launch "$@"

#!/bin/bash
# PPO under Slurm with vLLM: training on the first node, one process a GPU, and on the others one server a GPU.
#
#   sbatch --nodes 2 --gpus-per-node 8 configs/launch/slurm_servers.sh runs/mine/sft/model ppo ppo.yaml
#
# The first argument is the config's policy, which the servers load; the others are those of `alignment`. Of a LoRA, say its
# rank: LORA_RANK=32. WEIGHTS (runs/weights unless set) is the folder through which the servers get new weights: all nodes must
# see it under the same path, like config, data and code. SHARD is that of torchrun.sh, PORT the first server's port, VLLM the
# program `vllm`, VLLM_OPTIONS are further options of it. Slurm's SIGTERM before the time limit goes to this script alone, which
# stops the training: the servers answer until it has written its checkpoint. The job then requeues itself and goes on from
# it. A run that fails is not requeued.
#SBATCH --job-name=alignment
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

[ $# -ge 3 ] || { echo "usage: sbatch --nodes N --gpus-per-node G $0 POLICY VERB CONFIG [key=value ...]" >&2; exit 2; }
: "${SLURM_JOB_NODELIST:?start this with sbatch}" "${SLURM_NNODES:?start this with sbatch}"
[ "$SLURM_NNODES" -ge 2 ] || { echo "ask for two nodes or more; servers.sh is for one machine" >&2; exit 2; }
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?ask for GPUs with --gpus-per-node}}
gpus=${gpus##*:} # "h100:8" -> 8
policy=$1
shift
read -ra options <<< "${VLLM_OPTIONS:-}"
if [ -n "${LORA_RANK:-}" ]; then
  export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
  options+=(--enable-lora --max-lora-rank "$LORA_RANK")
else
  export VLLM_SERVER_DEV_MODE=1
fi
launch=$(python -c 'from alignment.config.load import packaged_folder; print(packaged_folder("configs") / "launch")')
folder=$(mktemp -d)
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

urls=()
for host in "${hosts[@]:1}"; do
  for ((gpu = 0; gpu < gpus; gpu++)); do urls+=("http://$host:$((${PORT:-8000} + gpu))"); done
done
export ALIGNMENT_GPUS=$gpus ALIGNMENT_PORT=${PORT:-8000}
# The inner shell runs on each node of servers; where one server ends, all do.
srun --relative=1 --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --kill-on-bad-exit=1 bash -c '
  for ((gpu = 0; gpu < ALIGNMENT_GPUS; gpu++)); do
    CUDA_VISIBLE_DEVICES=$gpu "$@" --port $((ALIGNMENT_PORT + gpu)) &
  done
  wait -n
  exit 1' serve "${VLLM:-vllm}" serve "$policy" --enable-scale-out --logprobs-mode processed_logprobs "${options[@]}" &
servers=$!
trap 'kill "$servers" 2>/dev/null || true; rm -rf "$folder"' EXIT
for url in "${urls[@]}"; do
  until curl --silent --fail --output /dev/null "$url/health"; do
    kill -0 "$servers" 2>/dev/null || { echo "a server has ended before $url answered" >&2; exit 1; }
    sleep 2
  done
done

# Slurm signals every process of a step at once. The launcher lets the signal pass: it would signal its processes again.
export ALIGNMENT_STOPPED=$folder/stopped PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT
export NODES=1 NODE_RANK=0 HEAD=127.0.0.1 GPUS=$gpus PORT=29500
srun --relative=0 --nodes=1 --ntasks=1 bash -c 'trap "" TERM; echo "$SLURM_STEP_ID" > "$ALIGNMENT_STOPPED.step"; exec "$@"' train \
  "$launch/torchrun.sh" "$@" "servers.urls=[$(IFS=,; echo "${urls[*]}")]" "servers.weights_folder=${WEIGHTS:-runs/weights}" &
trainers=$!
job_state() { squeue --noheader --job "$SLURM_JOB_ID" --format %T || echo unknown; }
# A canceled job, which no longer runs, has had all its processes signaled; a second signal would end them at once.
stop() {
  [ "$(job_state)" = RUNNING ] || return 0
  until [ -s "$ALIGNMENT_STOPPED.step" ]; do sleep 1; done
  # By the controller: otherwise every node of the job is asked, and those that do not have the step answer with an error.
  scancel --ctld --signal=TERM "$SLURM_JOB_ID.$(< "$ALIGNMENT_STOPPED.step")" || true
}
trap stop TERM
code=0
wait "$trainers" || code=$?
while kill -0 "$trainers" 2>/dev/null; do # the wait was ended by the signal
  code=0
  wait "$trainers" || code=$?
done
kill "$servers" 2>/dev/null || true
wait "$servers" 2>/dev/null || true

# Stopped before the time limit: the job requeues itself. A canceled job, whose processes get the same signal, does not.
[ -e "$ALIGNMENT_STOPPED" ] || exit "$code"
state=$(job_state)
[ "$state" = RUNNING ] || { echo "the job ends ($state); the same command goes on from its checkpoint" >&2; exit 143; }
trap 'echo "the job is requeued, and goes on from its checkpoint" >&2; exit 0' TERM # Slurm ends what it requeues
scontrol requeue "$SLURM_JOB_ID" || { echo "the job is not requeued; the same command goes on from its checkpoint" >&2; exit 143; }
sleep 60 > /dev/null 2>&1 &
wait

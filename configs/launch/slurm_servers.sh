#!/bin/bash
# PPO under Slurm with vLLM: training on the first node, one process a GPU, and on the others one server a GPU.
#
#   sbatch --nodes 2 --gpus-per-node 8 configs/launch/slurm_servers.sh runs/mine/sft/model ppo ppo.yaml
#
# The first argument is the config's policy, which the servers load; the others are those of `alignment`. Of a LoRA, say its
# rank: LORA_RANK=32. WEIGHTS (runs/weights unless set) is the folder through which the servers get new weights: all nodes must
# see it under the same path, like config, data and code. SHARD is that of torchrun.sh, PORT the first server's port, VLLM the
# program `vllm`, VLLM_OPTIONS are further options of it. Slurm's SIGTERM before the time limit goes to this script alone, which
# stops the training: the servers answer until it has written its checkpoint. The same command goes on from it.
#SBATCH --job-name=alignment
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
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
folder=$(python -c 'from alignment.config.load import packaged_folder; print(packaged_folder("configs") / "launch")')
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

urls=()
for host in "${hosts[@]:1}"; do
  for ((gpu = 0; gpu < gpus; gpu++)); do urls+=("http://$host:$((${PORT:-8000} + gpu))"); done
done
export ALIGNMENT_GPUS=$gpus ALIGNMENT_PORT=${PORT:-8000}
# The inner shell runs on each node of servers; where one server ends, all do.
srun --relative=1 --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
  for ((gpu = 0; gpu < ALIGNMENT_GPUS; gpu++)); do
    CUDA_VISIBLE_DEVICES=$gpu "$@" --port $((ALIGNMENT_PORT + gpu)) &
  done
  wait -n
  exit 1' serve "${VLLM:-vllm}" serve "$policy" --enable-scale-out --logprobs-mode processed_logprobs "${options[@]}" &
servers=$!
trap 'kill "$servers" 2>/dev/null || true' EXIT
for url in "${urls[@]}"; do
  until curl --silent --fail --output /dev/null "$url/health"; do
    kill -0 "$servers" 2>/dev/null || { echo "a server has ended before $url answered" >&2; exit 1; }
    sleep 2
  done
done

# torchrun ends processes that have not stopped in this time after a signal; the update and the checkpoint need it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280
NODES=1 NODE_RANK=0 HEAD=127.0.0.1 GPUS=$gpus PORT=29500 "$folder/torchrun.sh" "$@" \
  "servers.urls=[$(IFS=,; echo "${urls[*]}")]" "servers.weights_folder=${WEIGHTS:-runs/weights}" &
trainers=$!
trap 'kill -TERM "$trainers" 2>/dev/null || true' TERM
code=0
wait "$trainers" || code=$?
while kill -0 "$trainers" 2>/dev/null; do # the wait was ended by the signal
  code=0
  wait "$trainers" || code=$?
done
exit "$code"

"""The table of `alignment plan` for an 8B base: what each stage needs on one device, as Markdown.

    python scripts/plan_table.py [--base qwen3_8b]           # Llama 3.1 8B, some minutes

Each row is the plan of a packaged config: LoRA on the base in NF4 (made for one GPU of 24 GB), LoRA on the base in
bfloat16 (one of 80 GB), and training of all weights, sharded by FSDP2 (eight of 80 GB). Everything is computed by running
one micro-batch on tensors without memory; nothing is measured.
"""

import argparse

from alignment.commands.plan import plan_config
from alignment.planning.layout import GB, Device

KINDS = {"24gb": "LoRA, NF4", "80gb": "LoRA, bf16", "8x80gb": "full"}  # end of the config's name -> what it trains
COLUMNS = "stage, trained, weights, gradients, optimizer, activations and logits, KV cache, needed with reserve, 24 GB, 80 GB, 8 x 80 GB"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="llama3.1_8b", help="as in the names of the packaged configs")
    base = parser.parse_args().base
    print(f"Computed, not measured: `alignment plan` of STAGE/{base}_*, GB (10^9 bytes) on one device.\n")
    print(f"| {COLUMNS.replace(',', ' |')} |\n|{'---|' * 11}", flush=True)
    for stage in ("sft", "reward", "dpo", "ppo"):
        for end, trained in KINDS.items():
            print(row(stage, f"{base}_{end}", trained, gpus=8 if end.startswith("8x") else 1), flush=True)


def row(stage: str, name: str, trained: str, *, gpus: int) -> str:
    """A line of the table; sharded training needs its eight devices."""
    launch, memory = ("launch/fsdp2", 80) if gpus > 1 else (None, 10**6)  # PPO's sampling with shards depends on it
    plan = plan_config(f"{stage}/{name}", [], gpus=gpus, launch=launch, gpu_memory=memory, stage=stage, tflops=1.0)
    peak = plan.peak
    parts = [peak.of_kind(kind) for kind in ("weights", "gradients", "optimizer")]
    parts += [sum(map(peak.of_kind, ("activations", "logits", "unsharded blocks and buckets")))]
    parts += [peak.of_kind("key-value cache"), plan.needed]
    verdicts = []
    for size, devices in ((24, 1), (80, 1), (80, 8)):
        device = Device(True, size * GB, "", 1.0)
        needed = plan.needed + device.reserve(0, devices) - device.reserve(0, gpus)
        verdicts.append("-" if devices < gpus else "yes" if needed <= size * GB else "no")
    cells = [stage, f"{trained} ({peak.phase})", *(f"{part / GB:.1f}" for part in parts), *verdicts]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

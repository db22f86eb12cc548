"""The table of `alignment plan` for an 8B base: what each stage needs on one device, as Markdown.

    python scripts/plan_table.py                             # Llama 3.1 8B, some minutes
    python scripts/plan_table.py --base qwen3_8b --only sft

Each row is the plan of a packaged config: LoRA on the base in NF4 (made for one GPU of 24 GB), LoRA on the base in
bfloat16 (one of 80 GB), and training of all weights, sharded by FSDP2 (eight of 80 GB). Everything is computed by running
one micro-batch on tensors without memory; nothing is measured.
"""

import argparse

from alignment.commands.plan import plan_config
from alignment.planning.layout import GB, Device
from alignment.planning.plan import Plan

STAGES = ("sft", "reward", "dpo", "ppo")
KINDS = {"24gb": "LoRA, NF4", "80gb": "LoRA, bf16", "8x80gb": "full"}  # end of the config's name -> what it trains
COLUMNS = (
    "stage", "trained", "weights", "gradients", "optimizer", "activations and logits", "KV cache", "needed, with reserve",
    "24 GB", "80 GB", "8 x 80 GB",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="llama3.1_8b", help="as in the names of the packaged configs")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    print(f"Computed, not measured: `alignment plan` of STAGE/{arguments.base}_*, GB (10^9 bytes) on one device.\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for stage in arguments.only:
        for end, trained in KINDS.items():
            print(row(f"{stage}/{arguments.base}_{end}", stage, trained, sharded=end.startswith("8x")), flush=True)


def row(name: str, stage: str, trained: str, *, sharded: bool) -> str:
    """A line of the table."""
    gpus, launch = (8, "launch/fsdp2") if sharded else (1, None)
    memory = 80 if sharded else 10**6  # PPO's way of sampling with shards depends on it
    plan = plan_config(name, [], gpus=gpus, launch=launch, gpu_memory=memory, stage=stage, tflops=1.0)
    peak = plan.peak
    parts = [peak.of_kind(kind) for kind in ("weights", "gradients", "optimizer")]
    parts += [peak.of_kind("activations") + peak.of_kind("logits") + peak.of_kind("unsharded blocks and buckets")]
    parts += [peak.of_kind("key-value cache"), plan.needed]
    verdicts = [fits(plan, 24, alone=True), fits(plan, 80, alone=True), fits(plan, 80, alone=False)]
    cells = [stage, f"{trained} ({peak.phase})", *(f"{size / GB:.1f}" for size in parts), *verdicts]
    return f"| {' | '.join(cells)} |"


def fits(plan: Plan, memory: int, *, alone: bool) -> str:
    """Whether a device of so many GB is enough; sharded training needs its eight devices."""
    if alone and plan.layout.gpus > 1:
        return "-"
    device = Device(True, memory * GB, "", 1.0)
    extra = device.reserve(0, 8) - device.reserve(0, plan.layout.gpus) if not alone else 0
    return "yes" if plan.needed + extra <= memory * GB else "no"


if __name__ == "__main__":
    main()

"""Random models as transformers saves them, their inputs, and our model beside peft's."""

from pathlib import Path

import torch

from alignment.ragged import Ragged, Seq2Seq

IDS = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GATED = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_GROUPS = {k: v for k, v in GATED.items() if k not in ("num_key_value_heads", "head_dim")}
MODELS = {  # from stablelm on they run as transformers' own class
    "llama": (CAUSAL, GATED),
    "qwen3": (CAUSAL, {**GATED, "tie_word_embeddings": True}),
    "gemma3_text": (CAUSAL, {**GATED, "sliding_window": 8, "num_hidden_layers": 3, "layer_types": LAYERS}),
    "gpt2": (CAUSAL, OLD),
    "bert": (MASKED, NO_GROUPS),
    "t5": (SEQ2SEQ, {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}),
    "gpt_neox": (CAUSAL, NO_GROUPS),
    "phi3": (CAUSAL, {k: v for k, v in GATED.items() if k != "head_dim"}),
    "stablelm": (CAUSAL, GATED),
    "gptj": (CAUSAL, {**OLD, "rotary_dim": 4}),
    "pegasus": (SEQ2SEQ, {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
        "decoder_start_token_id": 0,
    }),
}  # fmt: skip
ISSUE = ("llama", "qwen3", "gemma3_text", "gpt2", "bert", "t5", "stablelm")
TIGHT = {"atol": 1e-5, "rtol": 0}


def write(name: str, directory: Path, **changes):
    """A random model of transformers, saved by it; returns it."""
    import transformers

    door, config = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, door).from_config(
        transformers.AutoConfig.for_model(name, **{**IDS, **config, **changes})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model.eval()


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Arguments of both models' forward."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 101, (2, 19), generator=generator)
    target = {"decoder_input_ids": torch.randint(3, 101, (2, 7), generator=generator)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **(target if MODELS[name][0] == SEQ2SEQ else {})}


def training_batch(name: str) -> Ragged | Seq2Seq:
    """Documents of different lengths to learn by heart."""
    documents = [[5, 9, 44, 3, 8, 61, 99, 7], [17, 3, 90, 21], [6, 6, 7, 12, 80]]
    masks = [[i % 3 == 1 for i in range(len(document))] for document in documents] if name == "bert" else None
    batch = Ragged.build(documents, masks)
    return (
        Seq2Seq(batch, Ragged.build([[0, *document[:4]] for document in documents]))
        if name in ("t5", "pegasus")
        else batch
    )


@torch.no_grad()
def disturb(model, seed: int = 3, size: float = 0.3):
    """The model with every trainable weight moved, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter += size * torch.randn(parameter.shape, generator=generator)
    return model

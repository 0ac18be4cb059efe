"""A Llama of a few megabytes, made here: its greedy tokens depend on all of the context, so wrong keys and values show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD = 4, 256, 4, 2, 64
INNER = 512
SPREAD = 0.2
"""Standard deviation of the weights: large enough that attention decides."""


def make(directory: Path, seed: int = 0, **other: object) -> Path:
    """Writes it; `other` replaces entries of its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
        **other,
    }
    (directory / "config.json").write_text(json.dumps(config))
    _weights(directory / "model.safetensors", seed, config)
    _tokenizer(directory)
    return directory


def make_hybrid(directory: Path, window: int = 64) -> Path:
    """A Gemma 3: layers that see a window beside layers that see everything, so two groups of blocks."""
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return make(
        directory,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        layer_types=kinds,
        sliding_window=window,
        query_pre_attn_scalar=HEAD,
        rope_local_base_freq=10000.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )


def _weights(path: Path, seed: int, config: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    gemma = config["model_type"] == "gemma3_text"
    hidden, inner, head = (config[it] for it in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * SPREAD).to(torch.bfloat16)

    def scale(size: int = hidden) -> torch.Tensor:
        # Gemma's are one more than what is stored.
        return (torch.zeros if gemma else torch.ones)(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": scale()}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": scale(),
            f"{name}.post_attention_layernorm.weight": scale(),
            f"{name}.self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * head),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
        if gemma:
            norms = {f"{it}_feedforward_layernorm": hidden for it in ("pre", "post")}
            norms |= {f"self_attn.{it}_norm": head for it in "qk"}
            tensors |= {f"{name}.{it}.weight": scale(size) for it, size in norms.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _tokenizer(directory: Path) -> None:
    """One token a byte, and fillers up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{n}>" for n in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))

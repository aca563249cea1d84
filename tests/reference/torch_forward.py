"""The same weights in transformers' own model of the family, float32 on the CPU: what right means to others.

Import it where torch and transformers are (the extra `reference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from reference.tiny_architectures import DIM, FFN, HEADS, VOCAB, Arrays, Tiny

_FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma3": "Gemma3",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
    "granite": "Granite",
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PERMUTED = ("llama", "smollm3", "granite")  # converters put the pairs of q and k side by side


def logits_of(model: Tiny, arrays: Arrays, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """f32 [tokens, vocabulary]."""
    family = _FAMILIES[model.architecture]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**_arguments(model))
    config._attn_implementation = "eager"
    network = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    state = {name: torch.from_numpy(values) for name, values in _state(model, arrays).items()}
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    network.tie_weights()
    with torch.no_grad():
        found: npt.NDArray[np.float32] = network(torch.tensor([list(tokens)])).logits[0].numpy()
    return found


def _arguments(model: Tiny) -> dict[str, Any]:
    keys = model.keys
    return {
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **_own_arguments(model, keys),
    }


def _own_arguments(model: Tiny, keys: dict[str, object]) -> dict[str, Any]:
    rope = _rope(model, keys)
    match model.architecture:
        case "gemma3":
            kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(model.n_layers)]
            local = {"rope_type": "default", "rope_theta": 10000.0}
            return {
                "layer_types": kinds,
                "sliding_window": keys["attention.sliding_window"],
                "query_pre_attn_scalar": model.head_dim,
                "final_logit_softcapping": keys.get("final_logit_softcapping"),
                "rope_parameters": {"full_attention": rope, "sliding_attention": local},
            }
        case "granite":
            return {
                "attention_multiplier": keys["attention.scale"],
                "embedding_multiplier": keys["embedding_scale"],
                "residual_multiplier": keys["residual_scale"],
                "logits_scaling": keys["logit_scale"],
                "rope_parameters": rope,
            }
        case "smollm3":
            turned = [int((i + 1) % 4 != 0) for i in range(model.n_layers)]
            return {"no_rope_layers": turned, "rope_parameters": rope, "use_sliding_window": False}
        case "phi3":
            own = {"sliding_window": keys.get("attention.sliding_window"), "rope_parameters": rope}
            return own | {"original_max_position_embeddings": keys.get("rope.scaling.original_context_length", 512)}
    return {"rope_parameters": rope}


def _rope(model: Tiny, keys: dict[str, object]) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "longrope" if "rope_factors_short.weight" in model.factors else "default")
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": keys.get("rope.freq_base", 10000.0)}
    if isinstance(turned := keys.get("rope.dimension_count"), int):
        found["partial_rotary_factor"] = turned / model.head_dim
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
    }
    found |= {theirs: keys[f"rope.scaling.{ours}"] for ours, theirs in names.items() if f"rope.scaling.{ours}" in keys}
    for name in ("short", "long"):
        if (factors := model.factors.get(f"rope_factors_{name}.weight")) is not None:
            found[f"{name}_factor"] = list(factors)
    return found


def _state(model: Tiny, arrays: Arrays) -> Arrays:
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    whole["output.weight"] = "lm_head.weight"
    gemma = model.architecture == "gemma3"
    names = _NAMES | (_GEMMA_NAMES if gemma else {})
    names |= {"ffn_up": "mlp.gate_up_proj"} if model.architecture == "phi3" else {}
    state = {}
    for name, values in arrays.items():
        if name in model.factors:
            continue
        value = values - 1 if gemma and "norm" in name else values
        if name in whole:
            state[whole[name]] = value
            continue
        _, layer, part, kind = name.split(".")
        if model.architecture in _PERMUTED and part in ("attn_q", "attn_k"):
            value = value.reshape(-1, model.head_dim // 2, 2, DIM).swapaxes(1, 2).reshape(-1, DIM).copy()
        state[f"model.layers.{layer}.{names[part]}.{kind}"] = value
    return state

"""Small random models built with transformers: written to a folder for us to load, and run by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def config_class(kind: str) -> Any:
    """The class of the text model's config: for some kinds a name of its own, beside that of text and images."""
    return getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Gemma4") else f"{kind}Config")


def model_class(kind: str) -> Any:
    """Return the class of the model with a head."""
    return getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")


def build(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random `kind` ("Llama", "Mistral", "Qwen2", "Qwen3", …), saved to `folder`; returns transformers' model.

    The weights are large, so that distributions are peaky and positions matter; norms and biases are random too.
    """
    config = config_class(kind)(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(kind)(config).eval()
    randomize_vectors(model, kind)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomize_vectors(model: Any, kind: str) -> None:
    """Give norms and biases random numbers, where transformers starts with ones and zeros."""
    for name, parameter in model.named_parameters():
        if "norm" in name or ".ln_" in name:
            stored = 1.0 if kind.startswith(("Gemma", "Nemotron")) and kind != "Gemma4" else 0.0  # less 1
            parameter.uniform_(0.5 - stored, 1.5 - stored)
            if kind == "Gemma4" and "q_norm" in name:
                parameter.mul_(0.3)  # scores have no factor 1 / sqrt(head_dim) there; trained weights make up for it
        elif name.endswith(("bias", "sinks")):
            parameter.normal_(0, 0.5)
        elif name.endswith(("router.scale", "per_expert_scale")):
            parameter.uniform_(0.5, 1.5)
        elif "alpha" in name:
            parameter.uniform_(-1.0, 1.0)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)


@torch.no_grad()
def logits(model: Any, token_ids: list[int]) -> Tensor:
    """Logits of every position, computed without a cache. [num_tokens, vocab_size]"""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def layer_outputs(model: Any, token_ids: list[int]) -> list[Tensor]:
    """Return transformers' hidden states of one pass without a cache.

    Returns:
        The input of the first layer, the output of each layer before any later norm, and the final-normed hidden
        states: num_layers + 2 tensors [num_tokens, hidden_size].
    """
    found: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0].float())

    def keep_input(_module: Any, inputs: Any) -> None:
        found.append(inputs[0][0].float())

    layers, norm = _layers(model)
    hooks = [part.register_forward_hook(keep) for part in (*layers, norm)]
    hooks.append(layers[0].register_forward_pre_hook(keep_input))
    try:
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _layers(model: Any) -> tuple[Any, Any]:
    """Return the layers of a transformers model, and its final norm."""
    base = getattr(model.base_model, "decoder", model.base_model)
    norms = (getattr(base, name, None) for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"))
    return (base.layers if hasattr(base, "layers") else base.h), next(norm for norm in norms if norm is not None)

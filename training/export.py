"""Write a trained model in the format of Hugging Face: bfloat16 safetensors, configuration and tokenizer."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.model import LlamaModel, ModelConfig

EXPORTED: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Return the contents of config.json; rope_theta is in the old place and in the one that transformers 5 reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 3,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "early_exit_layers": list(config.exit_layers),
    }


def export_model(model: LlamaModel, folder: Path, tokenizer_folder: Path) -> None:
    """Write the five files of :data:`EXPORTED` to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model.config), indent=2) + "\n")
    generation = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "eos_token_id": 0, "pad_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)


def load_exported(folder: Path) -> LlamaModel:
    """Return the plain torch model of an exported folder; its weights are the bfloat16 values, held in float32."""
    values = json.loads((folder / "config.json").read_text())
    values["exit_layers"] = values["early_exit_layers"]
    model = LlamaModel(ModelConfig.from_dict(values))
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    model.load_state_dict(weights)
    return model.eval()


def main() -> None:
    """Export the checkpoint of a run, finished or not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path.home() / ".cache" / "twostroke" / "training")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    checkpoint = torch.load(args.run / "checkpoint.pt", map_location="cpu", weights_only=True)
    model = LlamaModel(ModelConfig.from_dict(checkpoint["config"]["model"]))
    model.load_state_dict(checkpoint["model"])
    export_model(model, args.output, args.run)
    print(f"exported to {args.output}")


if __name__ == "__main__":
    main()

"""A Hugging Face folder with the weights of a GGUF file in bf16, for engines that read no GGUF.

It has no tokenizer: engines under comparison are given token ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from numpy.typing import NDArray

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # transformers has them by the same names
ROPE_FREQS = "rope_freqs.weight"  # divisors of RoPE's frequencies [head_dim / 2]
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFModel:
    """Raises ValueError for what is missing, and for what would be left out."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self._value("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"{path}: {self.architecture} is none of {', '.join(ARCHITECTURES)}")
        self.num_heads = int(self._value(f"{self.architecture}.attention.head_count"))
        self.num_kv_heads = int(self._value(f"{self.architecture}.attention.head_count_kv", self.num_heads))

    def config(self) -> dict[str, object]:
        """Fields of config.json."""
        arch, hidden_size = self.architecture, int(self._value(f"{self.architecture}.embedding_length"))
        head_dim = int(self._value(f"{arch}.attention.key_length", hidden_size // self.num_heads))
        if self._value(f"{arch}.rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.path}: RoPE of a part of each head would be left out")
        if self._value(f"{arch}.rope.scaling.type", "none") != "none":
            raise ValueError(f"{self.path}: {arch}.rope.scaling would be left out")
        rope: dict[str, object] = {
            "rope_type": "default",
            "rope_theta": float(self._value(f"{arch}.rope.freq_base", 10000.0)),
        }
        if ROPE_FREQS in self.tensors:
            rope |= {
                "rope_type": "llama3",
                "factor": float(self.tensors[ROPE_FREQS].data.max()),
                **LLAMA3_ROPE,
            }
        return {
            "hidden_size": hidden_size,
            "intermediate_size": int(self._value(f"{arch}.feed_forward_length")),
            "num_hidden_layers": int(self._value(f"{arch}.block_count")),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": int(self._value(f"{arch}.context_length")),
            "rms_norm_eps": float(self._value(f"{arch}.attention.layer_norm_rms_epsilon")),
            "rope_parameters": rope,
            "vocab_size": len(self.tensors["token_embd.weight"].data),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
        }

    def take(self, name: str) -> NDArray[np.float32]:
        """A tensor as Hugging Face has it, in float32; it is there only once."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"{self.path}: {name} is missing")
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        if self.architecture == "llama" and ".attn_q." in name:
            return halves_apart(values, self.num_heads)
        if self.architecture == "llama" and ".attn_k." in name:
            return halves_apart(values, self.num_kv_heads)
        return values

    def _value(self, key: str, default: object = None) -> object:
        field = self._reader.get_field(key)
        if field is None and default is None:
            raise ValueError(f"{self.path}: {key} is missing")
        return default if field is None else field.contents()


def halves_apart(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undoes llama.cpp's order of the rows of a head: its RoPE turns neighbours, Hugging Face's the two halves."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def write_hf_model(path: str, folder: Path) -> None:
    """Writes config.json and model.safetensors. Raises ValueError for what it cannot write exactly so."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = GGUFModel(path)
    config = AutoConfig.for_model(model.architecture, **model.config())
    if ROPE_FREQS in model.tensors:
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        divided = config.rope_parameters["rope_theta"] ** -(
            np.arange(0, config.head_dim, 2) / config.head_dim
        )
        if not np.allclose(scaled.numpy() * model.take(ROPE_FREQS), divided, rtol=1e-4):
            raise ValueError(f"{path}: {ROPE_FREQS} is not that of Llama 3")
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    state = network.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == model.architecture)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, parameter in state.items():
        values = model.take(names.get_name(name, try_suffixes=(".weight", ".bias")) or name)
        if values.shape != parameter.shape:
            raise ValueError(f"{path}: {name} is {values.shape}, expected {tuple(parameter.shape)}")
        state[name] = torch.tensor(values).to(torch.bfloat16)
    if model.tensors:
        raise ValueError(f"{path}: {', '.join(model.tensors)} would be left out")
    config.architectures = [type(network).__name__]
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

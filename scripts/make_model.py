"""Write a GGUF model with the shape of a real one and random weights, in any quantization.

Speed depends on the shape, not on the values: such files serve benchmarks of models that are not at hand. Weights
are seeded random blocks, written as they are made, so memory stays small whatever the model.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from gguf_writer import encode_header, encode_key, encode_tensor_info
from random_weights import BLOCK_FIELDS, random_weights
from tiny_gguf import UNUSED_TOKEN, byte_level_tokenizer

ALIGNMENT = 32
CHUNK_BYTES = 16 << 20  # of weights made at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, by their Hugging Face names, and what else its architecture's files say."""

    arch: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    sliding_window: int = 0
    llama3_rope: bool = False  # carries rope_freqs.weight
    num_experts: int = 0  # each of intermediate_size
    experts_per_token: int = 0


SHAPES = {
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5),
    "smollm2-360m": Shape("llama", 32, 960, 2560, 15, 5, 64, 49152, 8192, 1e5, 1e-5),
    "smollm2-1.7b": Shape("llama", 24, 2048, 8192, 32, 32, 64, 49152, 8192, 1.3e5, 1e-5),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5, llama3_rope=True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, llama3_rope=True),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6),
    "moe-1b": Shape(
        "qwen3moe", 18, 1024, 512, 16, 8, 64, 49152, 8192, 1e5, 1e-6, num_experts=32, experts_per_token=4
    ),
    "gemma-3-270m": Shape("gemma3", 18, 640, 2048, 4, 1, 256, 262144, 32768, 1e6, 1e-6, sliding_window=512),
    "gemma-3-1b": Shape("gemma3", 26, 1152, 6912, 4, 1, 256, 262144, 32768, 1e6, 1e-6, sliding_window=512),
}

# Types of the matrices: most of them, and those that llama.cpp's mixtures keep more exact.
MIXTURES = {"Q4_K_M": (GGMLType.Q4_K, GGMLType.Q6_K), "Q5_K_M": (GGMLType.Q5_K, GGMLType.Q6_K)}
UNIFORM = ("F32", "F16", "BF16", *(kind.name for kind in BLOCK_FIELDS))
# What takes the place of a type whose block of 256 does not divide K, as llama.cpp does.
SMALL_BLOCKS = {
    **{kind: GGMLType.IQ4_NL for kind in BLOCK_FIELDS if kind.name.startswith(("IQ", "Q2", "Q3"))},
    GGMLType.TQ1_0: GGMLType.Q4_0,
    GGMLType.TQ2_0: GGMLType.Q4_0,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
}


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # NumPy order: (N,), (N, K) or (experts, N, K)
    type: GGMLType
    values: NDArray[np.float32] | None = None  # of a vector that is not random

    def row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes()

    def chunks(self, seed: int, index: int) -> Iterator[bytes]:
        """The tensor's bytes, a few rows at a time."""
        rng = np.random.default_rng([seed, index])
        if len(self.shape) == 1:
            values = 1 + 0.1 * rng.standard_normal(self.shape[0]) if self.values is None else self.values
            yield values.astype("<f4").tobytes()
            return
        n, k = math.prod(self.shape[:-1]), self.shape[-1]
        step = max(1, CHUNK_BYTES // self.row_bytes())
        for row in range(0, n, step):
            yield random_weights(self.type, min(step, n - row), k, k**-0.5, rng).tobytes()


def is_kept_more_exact(layer: int, num_layers: int) -> bool:
    """llama.cpp's rule for attn_v and ffn_down in the mixtures: the ends of the model, and every third layer."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def tensor_types(quant: str, num_layers: int) -> Callable[[str, int], GGMLType]:
    """The type of a matrix by its name, and by K."""
    base, more = MIXTURES[quant] if quant in MIXTURES else (GGMLType[quant],) * 2
    coarse = base in BLOCK_FIELDS and base not in (GGMLType.Q6_K, GGMLType.Q8_0)

    def choose(name: str, k: int) -> GGMLType:
        kind = base
        if name == "token_embd.weight":
            kind = GGMLType.Q6_K if coarse else base
        elif name.endswith("ffn_gate_inp.weight"):
            kind = GGMLType.F32
        elif name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
            kind = more if is_kept_more_exact(int(name.split(".")[1]), num_layers) else base
        return kind if k % gguf.GGML_QUANT_SIZES[kind][0] == 0 else SMALL_BLOCKS[kind]

    return choose


def model_tensors(shape: Shape, quant: str) -> list[Tensor]:
    """All tensors in the order of the file; the output matrix is tied, as in every shape of SHAPES."""
    choose = tensor_types(quant, shape.num_layers)
    gemma, qk_norm = shape.arch == "gemma3", shape.arch in ("gemma3", "qwen3", "qwen3moe")
    hidden, ff, q_size = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    tensors = []

    def matrix(name: str, *sizes: int) -> None:
        tensors.append(Tensor(name, sizes, choose(name, sizes[-1])))

    def vector(name: str, n: int) -> None:
        tensors.append(Tensor(name, (n,), GGMLType.F32))

    matrix("token_embd.weight", shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        blk = f"blk.{layer}"
        vector(f"{blk}.attn_norm.weight", hidden)
        matrix(f"{blk}.attn_q.weight", q_size, hidden)
        matrix(f"{blk}.attn_k.weight", kv_size, hidden)
        matrix(f"{blk}.attn_v.weight", kv_size, hidden)
        if qk_norm:
            vector(f"{blk}.attn_q_norm.weight", shape.head_dim)
            vector(f"{blk}.attn_k_norm.weight", shape.head_dim)
        matrix(f"{blk}.attn_output.weight", hidden, q_size)
        vector(f"{blk}.ffn_norm.weight", hidden)
        if shape.num_experts:
            matrix(f"{blk}.ffn_gate_inp.weight", shape.num_experts, hidden)
            matrix(f"{blk}.ffn_gate_exps.weight", shape.num_experts, ff, hidden)
            matrix(f"{blk}.ffn_up_exps.weight", shape.num_experts, ff, hidden)
            matrix(f"{blk}.ffn_down_exps.weight", shape.num_experts, hidden, ff)
        else:
            matrix(f"{blk}.ffn_gate.weight", ff, hidden)
            matrix(f"{blk}.ffn_up.weight", ff, hidden)
            matrix(f"{blk}.ffn_down.weight", hidden, ff)
        if gemma:
            vector(f"{blk}.post_attention_norm.weight", hidden)
            vector(f"{blk}.post_ffw_norm.weight", hidden)
    vector("output_norm.weight", hidden)
    if shape.llama3_rope:
        factors = llama3_rope_factors(shape)
        tensors.append(Tensor("rope_freqs.weight", factors.shape, GGMLType.F32, factors))
    return tensors


def llama3_rope_factors(shape: Shape) -> NDArray[np.float32]:
    """Divisors of the RoPE frequencies [head_dim / 2] that Llama 3.2 files carry: long waves are stretched 32 times."""
    stretch, low, high, context = 32.0, 1.0, 4.0, 8192
    turns = context * shape.rope_theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / stretch + smooth)).astype(np.float32)


def model_metadata(name: str, shape: Shape) -> dict[str, object]:
    arch = shape.arch
    keys: dict[str, object] = {
        "general.architecture": arch,
        "general.name": f"{name} with random weights",
        f"{arch}.block_count": shape.num_layers,
        f"{arch}.context_length": shape.context_length,
        f"{arch}.embedding_length": shape.hidden_size,
        f"{arch}.feed_forward_length": shape.intermediate_size,
        f"{arch}.attention.head_count": shape.num_heads,
        f"{arch}.attention.head_count_kv": shape.num_kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        f"{arch}.rope.freq_base": shape.rope_theta,
        f"{arch}.rope.dimension_count": shape.head_dim,
        f"{arch}.vocab_size": shape.vocab_size,
    }
    if shape.num_experts:
        keys[f"{arch}.expert_count"] = shape.num_experts
        keys[f"{arch}.expert_used_count"] = shape.experts_per_token
        keys[f"{arch}.expert_feed_forward_length"] = shape.intermediate_size
    if shape.sliding_window:
        keys[f"{arch}.attention.sliding_window"] = shape.sliding_window
    return keys


def file_type(quant: str) -> int:
    """The number that files with most matrices in this type carry: OpenVINO reads none without it."""
    named = gguf.LlamaFileType.__members__
    return int(named.get("ALL_F32" if quant == "F32" else f"MOSTLY_{quant}", gguf.LlamaFileType.GUESSED))


def tokenizer_of(path: Path, vocab_size: int) -> dict[str, object]:
    """The tokenizer.* metadata of another model, its vocabulary filled up with unused tokens.

    Raises ValueError when that vocabulary is larger than vocab_size.
    """
    from rvllm.gguf_file import GGUFFile  # without this option the script needs no compiled module

    with GGUFFile(path) as file:
        keys = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokens = list(keys["tokenizer.ggml.tokens"])
    missing = vocab_size - len(tokens)
    if missing < 0:
        raise ValueError(f"{path} has {len(tokens)} tokens, more than the {vocab_size} of the shape")
    keys["tokenizer.ggml.tokens"] = tokens + [f"<|unused_{i}|>" for i in range(missing)]
    for key, fill in (("tokenizer.ggml.token_type", UNUSED_TOKEN), ("tokenizer.ggml.scores", -1000.0)):
        if key in keys:
            keys[key] = np.append(keys[key], np.full(missing, fill, keys[key].dtype))
    return keys


def write_model(path: Path, metadata: dict[str, object], tensors: list[Tensor], seed: int) -> int:
    """Write the file under another name first, so that `path` is never half a model. Returns its size in bytes."""
    header = bytearray(encode_header(len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += encode_key(key, value)
    offset = 0
    for tensor in tensors:
        header += encode_tensor_info(tensor.name, tensor.shape[::-1], tensor.type, offset)
        offset += tensor.num_bytes() + -tensor.num_bytes() % ALIGNMENT
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for index, tensor in enumerate(tensors):
            for chunk in tensor.chunks(seed, index):
                file.write(chunk)
            file.write(bytes(-tensor.num_bytes() % ALIGNMENT))
        size = file.tell()
    os.replace(part, path)
    return size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        epilog="example: make_model.py llama-3.2-1b llama.gguf --quant Q4_K_M",
    )
    parser.add_argument("shape", choices=SHAPES, help="model whose sizes to take")
    parser.add_argument("output", type=Path, help="GGUF file to write")
    parser.add_argument(
        "--quant",
        choices=(*MIXTURES, *UNIFORM),
        default="Q4_1",
        help="type of the matrices (default: %(default)s); embeddings are Q6_K with a smaller type, and where a "
        "block of 256 does not fit, the nearest type with blocks of 32 is taken",
    )
    parser.add_argument(
        "--tokenizer-from",
        type=Path,
        metavar="GGUF",
        help="copy the tokenizer of this model (default: one token a byte)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    args = parser.parse_args(argv)
    shape: Shape = SHAPES[args.shape]
    metadata = model_metadata(args.shape, shape)
    metadata["general.file_type"] = file_type(args.quant)
    try:
        if args.tokenizer_from:
            metadata |= tokenizer_of(args.tokenizer_from, shape.vocab_size)
        else:
            metadata |= byte_level_tokenizer(shape.vocab_size)
    except ValueError as error:
        parser.error(str(error))
    tensors = model_tensors(shape, args.quant)
    size = write_model(args.output, metadata, tensors, args.seed)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    print(f"{args.output}: {parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

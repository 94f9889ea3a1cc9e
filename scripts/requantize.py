"""Write a GGUF model anew with its matrices in another type.

Weights are dequantized to float32 and quantized by the gguf package, or by llama.cpp where that alone knows the type
(K-quants and IQ), through llama-cpp-python, if it is installed. From a model that is quantized already, the result is
coarser than the type can do, but it is a real model to compare programs with.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from gguf_writer import encode_header, encode_key, encode_tensor_info
from make_model import ALIGNMENT, SMALL_BLOCKS

from rvllm import _core
from rvllm.gguf_file import GGUFFile, TensorInfo

GGUF_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
LLAMA_CPP_TYPES = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M"),
    *("IQ4_NL", "IQ4_XS"),
)
CHUNK_WEIGHTS = 4 << 20  # quantized at a time


def target_type(tensor: TensorInfo, kind: GGMLType) -> GGMLType:
    """The type a tensor gets: vectors are F32, and where the blocks do not fit, the one with smaller blocks."""
    if len(tensor.shape) == 1:
        return GGMLType.F32
    fits = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if fits else SMALL_BLOCKS[kind]


def requantized(tensor: TensorInfo, kind: GGMLType) -> Iterator[bytes]:
    """The tensor's bytes in another type, some rows at a time."""
    if tensor.type_id == kind:
        yield tensor.data.tobytes()
        return
    rows = tensor.data.reshape(-1, tensor.data.size // math.prod(tensor.shape[:-1]))
    step = max(1, CHUNK_WEIGHTS // tensor.shape[-1])
    for start in range(0, len(rows), step):
        values = _core.dequantize(tensor.type_id, rows[start : start + step])
        yield gguf.quants.quantize(values.reshape(-1, tensor.shape[-1]), kind).tobytes()


def quantize_with_gguf(source: Path, output: Path, kind: GGMLType) -> None:
    """Written under another name first, so that `output` is never half a model."""
    with GGUFFile(source) as model, output.with_name(output.name + ".part").open("wb") as file:
        header = bytearray(encode_header(len(model.tensors), len(model.metadata)))
        for key, value in model.metadata.items():
            header += encode_key(key, value)
        kinds = {name: target_type(tensor, kind) for name, tensor in model.tensors.items()}
        sizes = []
        for name, tensor in model.tensors.items():
            block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
            header += encode_tensor_info(name, tensor.shape[::-1], kinds[name], sum(sizes))
            size = math.prod(tensor.shape) // block * block_bytes
            sizes.append(size + -size % ALIGNMENT)
        file.write(header + bytes(-len(header) % ALIGNMENT))
        for size, tensor in zip(sizes, model.tensors.values(), strict=True):
            end = file.tell() + size
            for chunk in requantized(tensor, kinds[tensor.name]):
                file.write(chunk)
            file.write(bytes(end - file.tell()))
    os.replace(file.name, output)


def quantize_with_llama_cpp(source: Path, output: Path, name: str) -> None:
    """Give all columns the same importance, as llama.cpp refuses its coarsest types without any. Raises ValueError."""
    try:
        import llama_cpp.llama_cpp as llama
    except ImportError:
        raise ValueError(f"{name} takes llama.cpp: pip install llama-cpp-python") from None
    with GGUFFile(source) as model:
        matrices = {t.name: t.shape[-1] for t in model.tensors.values() if len(t.shape) == 2}
    ones = np.ones(max(matrices.values()), np.float32)
    pointer = ones.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    importance = (llama.llama_model_imatrix_data * (len(matrices) + 1))()  # the last is empty
    for entry, (matrix, columns) in zip(importance, matrices.items(), strict=False):
        entry.name, entry.data, entry.size = matrix.encode(), pointer, columns
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    if name.startswith(("IQ1", "IQ2", "IQ3")):
        params.imatrix = importance
    if llama.llama_model_quantize(os.fsencode(source), os.fsencode(output), ctypes.byref(params)) != 0:
        raise ValueError(f"llama.cpp cannot write {source} as {name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="example: requantize.py model.gguf small.gguf Q4_0"
    )
    parser.add_argument("source", type=Path, help="GGUF file to read")
    parser.add_argument("output", type=Path, help="GGUF file to write")
    parser.add_argument(
        "type",
        choices=(*GGUF_TYPES, *LLAMA_CPP_TYPES),
        metavar="TYPE",
        help=f"{', '.join(GGUF_TYPES)}, or one of llama.cpp's mixtures: {', '.join(LLAMA_CPP_TYPES)}",
    )
    args = parser.parse_args(argv)
    try:
        if args.type in GGUF_TYPES:
            quantize_with_gguf(args.source, args.output, GGMLType[args.type])
        else:
            quantize_with_llama_cpp(args.source, args.output, args.type)
    except (OSError, ValueError) as error:
        print(f"requantize.py: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Record llama.cpp's logits of the tests' tiny models, as tests/data/llama_cpp_logits/NAME.npz.

Needs llama-cpp-python. It computes in float32 with a float32 KV cache, so that what differs from other engines is the
order of additions, and gelu, which its CPU code takes from a table of float16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))
from tiny_architectures import (  # noqa: E402
    ARCHITECTURES,
    LONG,
    LONG_CONTEXT,
    LONG_POSITIONS,
    MAX_MODEL_LEN,
    PROMPT,
    long_prompt,
    write,
)

OUTPUT = TESTS / "data" / "llama_cpp_logits"
VOCAB_STEP = 4  # of the logits, every fourth is kept: an error does not hide from that many
BATCH = 512


def llama_cpp_logits(
    path: Path, token_ids: Sequence[int], positions: Sequence[int], context: int
) -> NDArray[np.float32]:
    """Logits [positions, vocab / VOCAB_STEP] of a model after each of those positions of a prompt."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=context,
        n_batch=BATCH,
        n_ubatch=BATCH,
        n_threads=2,
        n_threads_batch=2,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    vocab = model.n_vocab()
    rows = []
    for first in range(0, len(token_ids), BATCH):
        count = min(BATCH, len(token_ids) - first)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = token_ids[first + i], first + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = first + i in positions
        if llama_cpp.llama_decode(model.ctx, batch) != 0:
            raise RuntimeError(f"{path}: llama.cpp cannot decode it")
        for position in positions:
            if first <= position < first + count:
                row = llama_cpp.llama_get_logits_ith(model.ctx, position - first)
                rows.append(np.ctypeslib.as_array(row, (vocab,))[::VOCAB_STEP].copy())
    llama_cpp.llama_batch_free(batch)
    model.close()
    return np.stack(rows)


def model_logits(name: str, path: Path) -> NDArray[np.float32]:
    """What is recorded of a model of tests/tiny_architectures.py."""
    if name in LONG:
        return llama_cpp_logits(path, long_prompt(), LONG_POSITIONS, LONG_CONTEXT)
    return llama_cpp_logits(path, PROMPT, range(len(PROMPT)), MAX_MODEL_LEN)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to record (default: all)")
    args = parser.parse_args(argv)
    models = {**ARCHITECTURES, **LONG}
    for name in args.names:
        if name not in models:
            parser.error(f"{name!r} is not one of {', '.join(models)}")
    OUTPUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for name in args.names or models:
            logits = model_logits(name, write(name, Path(directory)))
            np.savez_compressed(OUTPUT / f"{name}.npz", logits=logits)
            print(f"{name}: {logits.shape}, standard deviation {logits.std():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

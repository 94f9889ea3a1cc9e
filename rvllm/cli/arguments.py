"""Arguments of every command that loads a model."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rvllm.cli.errors import CommandError, user_errors
from rvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rvllm.llm import LLM

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes, as in 1000000, 512M, 1.5G or 2GiB; the units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def read_text(path: str) -> str:
    """Text of a file, or of standard input for -, without its last newline. Raises CommandError."""
    name = "standard input" if path == "-" else path
    with user_errors():
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"{name}: byte {error.start} is not UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")


# fmt: off
def add_sampling_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("-n", "--max-tokens", "--n-predict", "--predict", type=int, default=128, metavar="N",
        help="most tokens of a completion; -1 is no limit (default: %(default)s)")
    add("--temperature", "--temp", type=float, default=0.0, metavar="T",
        help="0 takes the best token every time (default: %(default)g)")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the best tokens that sum up to probability P")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K best tokens; 0 keeps all")
    add("--min-p", type=float, default=0.0, metavar="P", help="keep tokens at least P times as likely as the best")
    add("-s", "--seed", type=int, metavar="N", help="of each prompt's random numbers (default: a new one)")
    add("--repetition-penalty", "--repeat-penalty", type=float, default=1.0, metavar="X",
        help="above 1, against tokens of the prompt and the completion so far")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="against tokens of the completion so far")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, for each time they occur")
    add("--stop", action="append", metavar="TEXT", help="end the completion before TEXT; may be repeated")
    return group
# fmt: on


def sampling_params(args: argparse.Namespace, **others: Any) -> SamplingParams:
    """Of the arguments above, and of others that a command has. Raises CommandError."""
    with user_errors():
        return SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            seed=args.seed,
            stop=args.stop,
            max_tokens=None if args.max_tokens == -1 else args.max_tokens,
            presence_penalty=args.presence_penalty,
            frequency_penalty=args.frequency_penalty,
            repetition_penalty=args.repetition_penalty,
            **others,
        )


MAX_MODEL_LEN = (
    "most tokens of one prompt and its answer together (default, or 0: what the model was trained for)"
)


# fmt: off
def add_engine_arguments(parser: argparse.ArgumentParser, max_model_len: str = MAX_MODEL_LEN) -> None:
    """max_model_len: what that argument means to the command."""
    add = parser.add_argument_group("model and engine").add_argument
    add("-m", "--model", help="a GGUF file, or what `rvllm pull` takes (default: SmolLM2 135M, fetched once)")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of the one in the model file")
    add("--device", default="cpu", help="where to compute: cpu, metal, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="auto", help="auto, or float32: dequantize the weights (default: %(default)s)")
    add("--isa", help="scalar, avx2, avx_vnni, avx512_vnni, amx, neon or neon_i8mm (default: the machine's best)")
    add("-t", "--threads", type=int, metavar="N", help="threads (default: the processors at hand)")
    add("-c", "--max-model-len", "--ctx-size", type=int, metavar="N", help=max_model_len)
    add("-np", "--max-num-seqs", "--parallel", type=int, default=64, metavar="N",
        help="prompts that run at a time (default: %(default)s)")
    add("-b", "--max-num-batched-tokens", "--batch-size", type=int, default=512, metavar="N",
        help="tokens computed in one step (default: %(default)s)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens in a KV-cache block (default: %(default)s)")
    add("--num-blocks", type=int, metavar="N", help="KV-cache blocks (default: from the free memory)")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="size of the KV cache, such as 512M or 2G")
    add("--kv-cache-dtype", default="f16", metavar="TYPE",
        help="of keys and values: f16, f32, bf16 or q8_0 (default: %(default)s)")
    add("--gpu-memory-utilization", type=float, metavar="X",
        help="share of a GPU's memory for weights and KV cache (default: 0.9)")
    add("--prefill-compute", default="auto", metavar="TYPE",
        help="auto, int8, or on a GPU f16: faster, but what runs beside changes numbers (default: %(default)s)")
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its beginning")
# fmt: on


def model_name(args: argparse.Namespace) -> str | None:
    """Of the commands that take MODEL as well as --model. Raises CommandError for both."""
    if args.model_argument is not None and args.model is not None:
        raise CommandError("MODEL and --model are the same: give one of them")
    name: str | None = args.model if args.model_argument is None else args.model_argument
    return name


def load_chat_llm(args: argparse.Namespace, seed: int | None = None, **settings: Any) -> LLM:
    """load_llm() with the chat template that --chat-template names. Raises CommandError."""
    from rvllm.chat_template import ChatTemplate
    from rvllm.chat_templates import read_template

    with user_errors():
        source = None if args.chat_template is None else read_template(args.chat_template)
    llm = load_llm(args, seed, **settings)
    if source is not None:
        with user_errors():
            llm.chat_template = ChatTemplate.from_source(source, llm.tokenizer)
    return llm


def load_llm(args: argparse.Namespace, seed: int | None = None, **settings: Any) -> LLM:
    """Loads the model that args ask for; seed: the engine's; settings: more of LLM's. Raises CommandError."""
    logging.basicConfig(format="rvllm: warning: %(message)s", level=logging.WARNING)
    with user_errors():
        from rvllm import LLM

        return LLM(
            model=args.model,
            tokenizer=args.tokenizer,
            device=args.device,
            dtype=args.dtype,
            max_model_len=args.max_model_len or None,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            kv_cache_memory=args.kv_cache_memory,
            kv_cache_dtype=args.kv_cache_dtype,
            gpu_memory_utilization=args.gpu_memory_utilization,
            prefill_compute=args.prefill_compute,
            enable_prefix_caching=not args.no_prefix_caching,
            num_threads=args.threads,
            isa=args.isa,
            seed=seed,
            **settings,
        )

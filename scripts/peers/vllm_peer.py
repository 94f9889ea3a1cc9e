"""vLLM on CPUs, in one process, compiled, with the weights of the GGUF file in bf16: it reads no GGUF.

Only the newest tokens are asked of it: neither tokenizer nor detokenizer work, which costs less than any real use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path
from tempfile import TemporaryDirectory

from batching_peer import BatchingPeer
from hf_model import write_hf_model
from peer import Options

BLOCK_SIZE = 128  # vLLM's default on CPUs


def preloaded_libraries() -> list[str]:
    """Those that vLLM is faster with, of what is here: tcmalloc of the system, Intel's OpenMP of the environment."""
    tcmalloc = find_library("tcmalloc_minimal") or find_library("tcmalloc")
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    return [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.exists() else [])]


class VllmPeer(BatchingPeer):
    @classmethod
    def environment(cls, options: Options) -> dict[str, str]:
        # In one process, vLLM leaves OpenMP's settings to its user: these are those of its own workers.
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))
        return {
            "LD_PRELOAD": ":".join(preloaded_libraries()),
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "OMP_NUM_THREADS": str(options.threads),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            **{
                f"KMP_{barrier}_BARRIER_PATTERN": "dist,dist"
                for barrier in ("FORKJOIN", "PLAIN", "REDUCTION")
            },
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._folder = TemporaryDirectory(prefix="vllm-peer-")
        # Compiled code of another model or version must not be found, nor this one's stay behind.
        os.environ["VLLM_CACHE_ROOT"] = f"{self._folder.name}/cache"
        model = Path(options.model)
        if not model.is_dir():
            model = Path(self._folder.name, "model")
            write_hf_model(options.model, model)
        import vllm  # reads its environment when it is imported

        self._vllm = vllm
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=str(model),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                seed=options.seed,
                block_size=BLOCK_SIZE,
                num_gpu_blocks_override=self.num_blocks(BLOCK_SIZE) + 1,  # one is never used
                max_model_len=self.max_length,
                max_num_seqs=options.load.batch_size,
                max_num_batched_tokens=options.step_tokens,
                enable_prefix_caching=self.prefix_caching,
                disable_log_stats=True,
            )
        )
        self._num_requests = 0
        self._token_ids: dict[str, list[int]] = {}

    def version(self) -> str:
        preloaded = [Path(path).name for path in os.environ["LD_PRELOAD"].split(":") if path]
        return (
            f"vLLM {self._vllm.__version__}, weights in bf16, preloaded: {', '.join(preloaded) or 'nothing'}"
        )

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self._token_ids = {}
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            self._num_requests += 1
            request_id = str(self._num_requests)
            self._token_ids[request_id] = []
            self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> None:
        for output in self._engine.step():
            self._token_ids[output.request_id] = output.outputs[0].token_ids

    def token_ids(self) -> Sequence[Sequence[int]]:
        return list(self._token_ids.values())

    def stop(self) -> None:
        self._engine.abort_request(list(self._token_ids))
        while self._engine.has_unfinished_requests():
            self._engine.step()

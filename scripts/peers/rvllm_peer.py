"""rvllm, measured as `rvllm bench` does."""

from __future__ import annotations

from peer import Load, Options, Peer, Setting

from rvllm import LLM, __version__
from rvllm.benchmark import Benchmark, Workload


class RvllmPeer(Peer):
    settings = ({},)

    def __init__(self, options: Options) -> None:
        llm = LLM(
            options.model,
            max_num_seqs=options.max_batch_size,
            max_num_batched_tokens=options.step_tokens,
            num_threads=options.threads,
            isa=options.isa,
        )
        self._benchmark = Benchmark(llm.engine, options.seed)

    def version(self) -> str:
        return f"rvllm {__version__}"

    def measure(self, load: Load, setting: Setting) -> tuple[float, float]:
        workload = Workload(load.batch_size, load.prompt_len, load.gen_len, load.depth, load.shared_prefix)
        measurement = self._benchmark.measure(workload)
        return measurement.prefill_seconds, measurement.decode_seconds

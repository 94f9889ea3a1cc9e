"""rvllm, measured as `rvllm bench` does."""

from __future__ import annotations

from collections.abc import Sequence

from peer import Load, Options, Peer, Setting

from rvllm import LLM, SamplingParams, __version__
from rvllm.benchmark import Benchmark, Workload


class RvllmPeer(Peer):
    def __init__(self, options: Options) -> None:
        self._llm = LLM(
            options.model,
            max_num_seqs=options.load.batch_size,
            max_num_batched_tokens=options.step_tokens,
            num_threads=options.threads,
            isa=options.isa,
        )
        self._benchmark = Benchmark(self._llm.engine, options.seed)

    def version(self) -> str:
        return f"rvllm {__version__}"

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        (output,) = self._llm.generate([list(prompt)], params)
        return output.outputs[0].token_ids

    def measure(self, load: Load, setting: Setting) -> tuple[float, float]:
        workload = Workload(load.batch_size, load.prompt_len, load.gen_len, load.depth, load.shared_prefix)
        measurement = self._benchmark.measure(workload)
        return measurement.prefill_seconds, measurement.decode_seconds

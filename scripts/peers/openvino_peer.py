"""OpenVINO GenAI's continuous batching, on the GGUF file itself or on a folder that was exported for it.

Its KV cache and its arithmetic are those it chooses for the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from batching_peer import BatchingPeer
from peer import Options

BLOCK_SIZE = 32  # OpenVINO's on CPUs


class OpenVinoPeer(BatchingPeer):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options.load.batch_size
        scheduler.max_num_batched_tokens = options.step_tokens
        scheduler.num_kv_blocks = self.num_blocks(BLOCK_SIZE)
        scheduler.enable_prefix_caching = self.prefix_caching
        properties = {"INFERENCE_NUM_THREADS": options.threads, "sampler_num_threads": options.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )
        self._num_requests = 0
        self._handles: list[openvino_genai.GenerationHandle] = []
        self._token_ids: list[list[int]] = []

    def version(self) -> str:
        source = "folder" if Path(self.options.model).is_dir() else "file"
        return f"OpenVINO GenAI {openvino_genai.__version__}, weights as in the {source}"

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.set_eos_token_id(0)  # a folder need not have a tokenizer that tells it
        config.do_sample = False
        self._handles = []
        self._token_ids = [[] for _ in prompts]
        for prompt in prompts:
            self._num_requests += 1
            tensor = openvino.Tensor(np.array([prompt], np.int64))
            self._handles.append(self._pipeline.add_request(self._num_requests, tensor, config))

    def step(self) -> None:
        self._pipeline.step()
        for token_ids, handle in zip(self._token_ids, self._handles, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids

    def token_ids(self) -> Sequence[Sequence[int]]:
        return self._token_ids

    def stop(self) -> None:
        for handle in self._handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

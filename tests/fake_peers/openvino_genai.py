"""As much of OpenVINO GenAI as scripts/peers/openvino_peer.py uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from batch_engine import BatchEngine, Request
from openvino import Tensor

__version__ = "fake"
SchedulerConfig = SimpleNamespace


class GenerationConfig(SimpleNamespace):
    def set_eos_token_id(self, token_id: int) -> None:
        self.eos_token_id = token_id


class GenerationHandle:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_read = 0

    def can_read(self) -> bool:
        return self.num_read < len(self.request.token_ids)

    def read(self) -> dict[int, SimpleNamespace]:
        new = self.request.token_ids[self.num_read :]
        self.num_read += len(new)
        return {0: SimpleNamespace(generated_ids=new)}

    def stop(self) -> None:
        self.request.max_tokens = len(self.request.token_ids)


class ContinuousBatchingPipeline:
    def __init__(
        self, model: str, scheduler: SimpleNamespace, device: str, properties: Mapping[str, int]
    ) -> None:
        assert device == "CPU" and properties["INFERENCE_NUM_THREADS"] == 1 and scheduler.num_kv_blocks > 0
        self.engine = BatchEngine(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)

    def add_request(self, request_id: int, input_ids: Tensor, config: GenerationConfig) -> GenerationHandle:
        assert config.ignore_eos and not config.do_sample
        self.engine.add(request_id, input_ids.data[0].tolist(), config.max_new_tokens)
        return GenerationHandle(self.engine.requests[request_id])

    def step(self) -> None:
        self.engine.step()

    def has_non_finished_requests(self) -> bool:
        return self.engine.has_unfinished

"""As much of vLLM as scripts/peers/vllm_peer.py uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from batch_engine import BatchEngine

# What the process was started with, not what was set in it later.
STARTED_WITH = Path("/proc/self/environ").read_text().split("\0")
__version__ = "of " + " ".join(v for v in STARTED_WITH if v.startswith(("OMP_NUM_THREADS", "VLLM_ENABLE_V1")))

EngineArgs = SamplingParams = SimpleNamespace


class LLMEngine:
    def __init__(self, args: SimpleNamespace) -> None:
        assert (
            Path(args.model).is_dir() and args.num_gpu_blocks_override * args.block_size > args.max_model_len
        )
        self.args = args
        self.engine = BatchEngine(args.max_num_batched_tokens, args.max_num_seqs)

    @classmethod
    def from_engine_args(cls, args: SimpleNamespace) -> LLMEngine:
        return cls(args)

    def add_request(
        self, request_id: str, prompt: Mapping[str, Sequence[int]], params: SimpleNamespace
    ) -> None:
        token_ids = prompt["prompt_token_ids"]
        assert params.ignore_eos and len(token_ids) + params.max_tokens <= self.args.max_model_len
        self.engine.add(request_id, token_ids, params.max_tokens)

    def step(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                request_id=key, outputs=[SimpleNamespace(token_ids=list(self.engine.requests[key].token_ids))]
            )
            for key in self.engine.step()
        ]

    def abort_request(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self.engine.requests[request_id]

    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished

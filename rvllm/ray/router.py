"""Routing by prompts: to the replica that has computed the beginning of one already."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rvllm.server.routing import prompt_pieces

_MAX_PIECES = 2**18  # that are remembered: 16 MiB of prompts


@dataclass(frozen=True)
class Call:
    """An HTTP request on its way to a replica. scope: ASGI's, of plain values."""

    scope: dict[str, Any]
    body: bytes

    @cached_property
    def prefixes(self) -> list[int]:
        return prompt_pieces(self.body)


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """The replica that has had the longest beginning of a prompt, else, or when it is too busy, the least busy one.

    Ray's own PrefixCacheAffinityRouter needs vLLM or SGLang to be installed.
    """

    def initialize_state(self, slack: int) -> None:
        """slack: requests that the replica with the prefix may have more than the least busy one."""
        self._slack = slack
        self._owners: OrderedDict[int, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas; in each, Ray takes the one with the shortest queue that accepts."""
        anyone = random.sample(candidate_replicas, len(candidate_replicas))
        if pending_request is None:
            return [anyone]
        pending_request.routing_context.should_backoff = True  # before all are asked again
        lengths = {
            replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for replica in anyone
        }
        call: Call = pending_request.args[0]
        owners = (self._owners.get(prefix) for prefix in reversed(call.prefixes))
        owner = next((owner for owner in owners if owner in lengths), None)
        if owner is None or lengths[owner] - min(lengths.values()) > self._slack:
            return [anyone]
        return [[replica for replica in anyone if replica.replica_id == owner], anyone]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        for prefix in pending_request.args[0].prefixes:
            self._owners[prefix] = replica_id
            self._owners.move_to_end(prefix)
        while len(self._owners) > _MAX_PIECES:
            self._owners.popitem(last=False)

"""Worker: serves one engine as JSON lines, from standard input to standard output.

python worker.py ENGINE OPTIONS      where OPTIONS is Options as a JSON object

First it writes {"version", "settings"}. Then it answers {"load", "setting"} with {"prefill_seconds", "decode_seconds"},
and {"prompt", "num_tokens"} with {"token_ids"}. What goes wrong is {"error"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from peer import Load, Options, Peer

# A further engine is a module with a Peer and a line here.
ENGINES = {
    "rvllm": ("rvllm_peer", "RvllmPeer"),
    "llama.cpp": ("llama_cpp_peer", "LlamaCppPeer"),
    "vllm": ("vllm_peer", "VllmPeer"),
    "openvino": ("openvino_peer", "OpenVinoPeer"),
}


def load_peer(engine: str, options: Options, stdout: int) -> Peer:
    """Starts the process again, with that standard output, if the engine needs variables that are not set."""
    module, name = ENGINES[engine]
    peer_class: type[Peer] = getattr(import_module(module), name)
    missing = {k: v for k, v in peer_class.environment(options).items() if k not in os.environ}
    if missing:
        os.dup2(stdout, 1)
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})
    return peer_class(options)


def respond(peer: Peer, request: Mapping[str, Any]) -> dict[str, object]:
    if "prompt" in request:
        return {"token_ids": peer.generate(request["prompt"], request["num_tokens"])}
    prefill, decode = peer.measure(Load(**request["load"]), request["setting"])
    return {"prefill_seconds": prefill, "decode_seconds": decode}


def main() -> None:
    # Engines print as they like: the answers have a file of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        options = json.loads(sys.argv[2])
        options["load"] = Load(**options["load"])
        peer = load_peer(sys.argv[1], Options(**options), answers.fileno())
        answer({"version": peer.version(), "settings": peer.settings})
        for line in sys.stdin:
            answer(respond(peer, json.loads(line)))
    except (ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
        answer({"error": " ".join(str(error).split())})


if __name__ == "__main__":
    main()

"""Worker: serves measurements of one engine as JSON lines, from standard input to standard output.

python worker.py ENGINE OPTIONS      where OPTIONS is Options as a JSON object

First it writes {"version", "settings"}, then {"prefill_seconds", "decode_seconds"} for each {"load", "setting"} it
reads. What goes wrong is {"error"}.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from peer import Load, Options, Peer

# A further engine is a module with a Peer and a line here.
ENGINES = {"rvllm": ("rvllm_peer", "RvllmPeer"), "llama.cpp": ("llama_cpp_peer", "LlamaCppPeer")}


def main() -> None:
    # Engines print as they like: the answers have a file of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        module, name = ENGINES[sys.argv[1]]
        peer: Peer = getattr(import_module(module), name)(Options(**json.loads(sys.argv[2])))
        answer({"version": peer.version(), "settings": peer.settings})
        for line in sys.stdin:
            request = json.loads(line)
            prefill, decode = peer.measure(Load(**request["load"]), request["setting"])
            answer({"prefill_seconds": prefill, "decode_seconds": decode})
    except (ImportError, RuntimeError, ValueError) as error:
        answer({"error": " ".join(str(error).split())})


if __name__ == "__main__":
    main()

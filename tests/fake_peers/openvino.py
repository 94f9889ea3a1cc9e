"""As much of OpenVINO as scripts/peers/openvino_peer.py uses."""

from __future__ import annotations

from typing import Any


class Tensor:
    def __init__(self, data: Any) -> None:
        assert data.ndim == 2 and data.dtype == "int64"
        self.data = data

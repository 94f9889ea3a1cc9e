"""What an AsyncEngine refuses requests with, or ends them with."""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """Too many requests are in flight. retry_after: seconds until there is likely to be room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(RuntimeError):
    """The engine takes no requests: it has not been started, is draining, or has been shut down."""


class EngineDeadError(RuntimeError):
    """The step that computed the request failed, or so many that the engine thread has ended."""


class EmbeddingError(RuntimeError):
    """A prompt's embedding is not made of finite numbers."""

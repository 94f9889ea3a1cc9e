"""InFlight: the requests that an AsyncEngine has taken in, and the places that they fill."""

from __future__ import annotations

from concurrent.futures import Future

from rvllm.engine_errors import QueueFullError
from rvllm.finishing_rate import FinishingRate
from rvllm.request_stream import RequestStream


class InFlight:
    """A place for each choice of each request. For one thread at a time: whoever calls holds the engine's lock.

    limit: of places. num_places: taken ones. streams: of the requests that the engine has not let go of, by id.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_places = 0
        self.streams: dict[str, RequestStream] = {}
        self.rate = FinishingRate()
        self._emptied: list[Future[None]] = []

    def take(self, count: int) -> None:
        """Fills places; nobody is refused where nothing is in flight. Raises QueueFullError."""
        excess = self.num_places + count - self.limit
        if excess > 0 and self.num_places:
            raise QueueFullError(
                f"{self.num_places} requests are in flight, at most {self.limit} are taken",
                self.rate.retry_after(excess),
            )
        self.num_places += count

    def add(self, stream: RequestStream) -> None:
        """Raises ValueError for an id in use, and QueueFullError."""
        if stream.request_id in self.streams:
            raise ValueError(f"request_id {stream.request_id!r} is in use")
        self.take(stream.num_places)
        self.streams[stream.request_id] = stream

    def give_back(self, stream: RequestStream) -> None:
        """Others can have its places at once."""
        self.num_places -= stream.num_places
        stream.num_places = 0

    def drop(self, stream: RequestStream) -> None:
        """Takes a stream out; what is in it can still be read."""
        stream.is_closed = True
        del self.streams[stream.request_id]
        self.give_back(stream)
        if not self.streams:
            for emptied in self._emptied:
                if emptied.set_running_or_notify_cancel():
                    emptied.set_result(None)
            self._emptied.clear()

    def emptied(self) -> Future[None]:
        """Done when the last of the streams there are now, and of those to come until then, is out."""
        emptied: Future[None] = Future()
        self._emptied.append(emptied)
        return emptied

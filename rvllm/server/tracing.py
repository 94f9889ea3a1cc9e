"""OpenTelemetry: a span for each request, with the attributes of the gen_ai conventions. Needs rvllm[otel]."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rvllm.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from rvllm.server.generation import Generation


class Tracing:
    """Sends spans to a processor; a traceparent header of the client's makes them part of its trace."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=Resource.create({"service.name": "rvllm"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rvllm", __version__)

    @classmethod
    def to_endpoint(cls, endpoint: str) -> Tracing:
        """endpoint: of an OTLP collector over HTTP, as in http://localhost:4318/v1/traces. Raises ImportError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ImportError(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install 'rvllm[otel]'"
            ) from None
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def record(
        self,
        fields: Mapping[str, Any],
        seconds: float,
        headers: Mapping[str, str],
        generation: Generation | None,
    ) -> None:
        """Records a request that has just ended. fields: of its log line."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        end = time.time_ns()
        attributes: dict[str, Any] = {
            "http.request.method": fields["method"],
            "http.response.status_code": fields["status"],
            "url.path": fields["path"],
            "rvllm.request_id": fields["request_id"],
        }
        if generation is not None:
            attributes |= {
                "gen_ai.provider.name": "rvllm",
                "gen_ai.request.model": generation.model.name,
                "gen_ai.response.id": generation.request_id,
                "gen_ai.response.finish_reasons": fields["finish_reason"].split(","),
                "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
                "gen_ai.usage.output_tokens": generation.num_generated_tokens,
                "rvllm.time_to_first_token": generation.seconds_to_first_token,
            }
        span = self._tracer.start_span(
            f"{fields['method']} {fields['path']}",
            context=extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - int(seconds * 1e9),
        )
        if fields["status"] >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def shutdown(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

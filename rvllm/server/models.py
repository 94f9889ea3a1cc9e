"""GET /v1/models, and what tells how the server is: /health, /metrics, /version."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from rvllm.server.metrics import Metrics
from rvllm.server.served_model import ServedModel, get_model
from rvllm.version import __version__

router = APIRouter()


@router.get("/v1/models")
async def list_models(model: Annotated[ServedModel, Depends(get_model)]) -> dict[str, Any]:
    """The model that is served, under each of its names."""
    return {"object": "list", "data": [_card(model, name) for name in model.names]}


@router.get("/v1/models/{name:path}")
async def get_model_card(name: str, model: Annotated[ServedModel, Depends(get_model)]) -> dict[str, Any]:
    model.check_name(name)
    return _card(model, name)


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "rvllm",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are taken; 503 while the model is loaded, while draining, and after a failure."""
    model: ServedModel | None = request.app.state.model
    if model is None:
        return JSONResponse({"status": "loading", "model": request.app.state.config.names[0]}, 503)
    engine, stats = model.engine, model.engine.stats()
    status = "dead" if engine.is_dead else "draining" if engine.is_draining else "ok"
    facts = {
        "status": status,
        "model": model.name,
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "prefill_tokens": stats.prefill_tokens,
        "decode_tokens": stats.decode_tokens,
        "version": __version__,
    }
    if engine.is_dead:
        facts["error"] = str(engine.error)
    return JSONResponse(facts, 200 if status == "ok" else 503, {"Cache-Control": "no-store"})


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    shown: Metrics = request.app.state.metrics
    return Response(shown.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}

"""The web page: static files of the package, read once."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

PAGE_DIR = Path(__file__).parent / "page"
HEADERS = {
    "Cache-Control": "no-cache",  # ask each time; the ETag saves the transfer
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def add_page(app: FastAPI, folder: Path = PAGE_DIR) -> list[str]:
    """Adds a route for every file in folder, index.html at /; returns the paths. None if there is no folder."""
    paths = []
    for file in sorted(folder.glob("**/*")) if folder.is_dir() else ():
        if file.is_file() and not file.name.startswith("."):
            path = "/" + file.relative_to(folder).as_posix()
            path = "/" if path == "/index.html" else path
            app.add_api_route(path, _serve(file), methods=["GET"], include_in_schema=False)
            paths.append(path)
    return paths


def _serve(file: Path) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    content = file.read_bytes()
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return serve

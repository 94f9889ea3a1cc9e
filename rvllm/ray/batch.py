"""A batch of requests answered by Ray Data: workers with an engine each, and this process, which alone writes."""

from __future__ import annotations

import argparse
import signal
from types import FrameType
from typing import Any, NoReturn

import pyarrow as pa
import ray.data
from pydantic_core import from_json, to_json
from ray.exceptions import RayError

from rvllm.cli.batch import Progress, load_app
from rvllm.engine_errors import EngineDeadError
from rvllm.ray.cluster import Placement, connected, remote_arguments, root_cause
from rvllm.server.batch import BatchRunner
from rvllm.server.batch_file import BatchRequest, InputFile, OutputFile
from rvllm.server.served_model import ServerConfig

_ROWS = 16  # requests that a worker takes together, and whose answers come back together


class Worker:
    """An actor of Ray Data: rows of "request", lines of an input, become rows of "entry", lines of the output."""

    def __init__(self, arguments: dict[str, Any], config: ServerConfig) -> None:
        self._app = load_app(argparse.Namespace(**arguments), config)
        self._seed: int | None = arguments["seed"]

    async def __call__(self, rows: pa.Table) -> pa.Table:
        """The answers of those requests whose steps have not failed."""
        requests = [BatchRequest.model_validate(from_json(line)) for line in rows["request"].to_pylist()]
        entries: list[bytes] = []
        runner = BatchRunner(
            self._app, self._seed, lambda entry: entries.append(to_json(entry, inf_nan_mode="null"))
        )
        await runner.run(iter(requests))
        return pa.table({"entry": pa.array(entries, pa.binary())})


class _StoppedError(BaseException):
    """A signal; not an Exception, which Ray would wrap."""


def answer(
    args: argparse.Namespace, config: ServerConfig, source: InputFile, output: OutputFile
) -> int | None:
    """As rvllm.cli.batch.Answer.

    Ray Data runs the requests of a worker that dies again, on another; an answer that comes twice is written once.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _StoppedError(number)

    progress = Progress(source, output)
    try:
        with connected(args) as placement:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop)
            answers = _answers(placement, config, source, output)
            for batch in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
                for line in batch["entry"].to_pylist():
                    entry = from_json(line)
                    if entry["custom_id"] not in output.answered:
                        progress.write(entry)
    except _StoppedError as stopped:
        return int(stopped.args[0])
    except RayError as error:
        raise EngineDeadError(f"the workers have failed: {root_cause(error)}") from error
    finally:
        progress.end()
    return None


def _answers(
    placement: Placement, config: ServerConfig, source: InputFile, output: OutputFile
) -> ray.data.Dataset:
    """Of the requests that are left, lazily."""
    args = placement.args
    requests = [
        {"request": to_json(request, inf_nan_mode="constants")}
        for request in source.requests(without=set(output.answered))
    ]
    num_blocks = -(-len(requests) // _ROWS)
    # Twice as many as run: the next prompts are encoded meanwhile.
    in_flight = 2 + 2 * args.max_num_seqs // _ROWS
    num_workers = min(args.workers or placement.room, num_blocks)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray.data.from_items(requests, override_num_blocks=num_blocks).map_batches(
        Worker,
        fn_constructor_args=(remote_arguments(placement), config),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            min_size=1,
            max_size=num_workers,
            initial_size=num_workers,
            max_tasks_in_flight_per_actor=in_flight,
            max_concurrent_calls_per_actor=in_flight,
        ),
        **placement.resources,
    )

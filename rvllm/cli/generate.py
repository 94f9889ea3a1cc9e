"""Complete one prompt, or many at once.

Standard output holds the completions alone, in the order of the prompts, each followed by a newline. The exit
status is 2 if an option or a prompt was refused; the other prompts still run. It is 1 if an answer failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from rvllm.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    load_llm,
    read_text,
    sampling_params,
)
from rvllm.cli.constraints import add_constraint_arguments, structured_output
from rvllm.cli.errors import CommandError, one_line, user_errors
from rvllm.cli.printer import JSONPrinter, TextPrinter, use_utf8
from rvllm.cli.profiling import add_profile_arguments, print_profile, wants_profile, write_profile_trace
from rvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rvllm.llm import LLM

HELP = "complete prompts"

logger = logging.getLogger("rvllm")


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("-p", "--prompt", dest="sources", action="append", type=lambda text: (text == "-", text), metavar="TEXT",
        help="a prompt, or - to read one from standard input; may be repeated")
    add("-f", "--file", dest="sources", action="append", type=lambda path: (True, path), metavar="FILE",
        help="a file with one prompt, whose last newline does not count; may be repeated")
    add("--chat", action="store_true", help="send each prompt as a message, in the model's chat template")
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add("--chat-template", metavar="FILE",
        help="with --chat: a Jinja template to use instead of the model's own, or the name of a common one, such as "
        "chatml")
    add("--arrival-step", type=int, nargs="+", action="extend", metavar="N",
        help="the step in which the prompts join: one number for all or one for each")

    add = add_sampling_arguments(parser).add_argument
    add("--ignore-eos", action="store_true", help="do not end where the model would")
    add_constraint_arguments(parser)
    add("--logprobs", type=int, metavar="N", help="with --json: log probabilities of each token and the N best")

    group = parser.add_argument_group("output")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--stream", action="store_true", help="print text as it comes")
    form.add_argument("--json", action="store_true", help="print a line of JSON for each prompt")
    group.add_argument("--debug", action="store_true", help="report on standard error what the engine did")
    add_engine_arguments(parser)
    add_profile_arguments(parser)
# fmt: on


def run(args: argparse.Namespace) -> int:
    prompts, steps = _read_prompts(args.sources), args.arrival_step or [0]
    params = sampling_params(
        args, ignore_eos=args.ignore_eos, logprobs=args.logprobs, structured_output=structured_output(args)
    )
    for option, value in (("--system", args.system), ("--chat-template", args.chat_template)):
        if value is not None and not args.chat:
            raise CommandError(f"{option} needs --chat")
    from rvllm.chat_template import ChatTemplate
    from rvllm.chat_templates import read_template

    with user_errors():
        template = None if args.chat_template is None else read_template(args.chat_template)
    if len(steps) not in (1, len(prompts)):
        raise CommandError(f"--arrival-step: {len(steps)} numbers for {len(prompts)} prompts")
    llm = load_llm(args, profile=wants_profile(args))
    _warn_of_idle_options(args, params)
    if template is not None:
        llm.chat_template = ChatTemplate.from_source(template, llm.tokenizer)
    if args.chat and llm.chat_template is None:
        raise CommandError("--chat: the model has no chat template")

    use_utf8()
    printer = JSONPrinter(prompts) if args.json else TextPrinter(len(prompts), args.stream)
    num_refused = 0
    for i, prompt in enumerate(prompts):
        try:
            chat = [{"role": "user", "content": prompt}]
            if args.system is not None:
                chat.insert(0, {"role": "system", "content": args.system})
            ids_or_text = llm.encode_chat(chat) if args.chat else prompt
            llm.engine.add_request(str(i), ids_or_text, params, steps[i % len(steps)])
        except ValueError as error:
            num_refused += 1
            printer.refuse(i, one_line(error))
            print(f"rvllm: error: prompt {i + 1}: {one_line(error)}", file=sys.stderr)
    num_failed = _run_all(llm, printer)
    if args.debug:
        _report(llm, len(prompts), num_refused)
    print_profile(args, llm)
    write_profile_trace(args, llm)
    return 1 if num_failed else 2 if num_refused else 0


def _run_all(llm: LLM, printer: JSONPrinter | TextPrinter) -> int:
    """Prints all answers as they come; returns how many prompts, or whole steps, failed. A failed step is the last."""
    num_failed = 0
    while llm.engine.has_unfinished:
        try:
            outputs = llm.engine.step()
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            print(f"rvllm: error: {one_line(error)}", file=sys.stderr)
            return num_failed + 1
        for output in outputs:
            printer.add(output)
            for completion in output.outputs:
                if completion.error is not None:
                    num_failed += 1
                    prompt = int(output.request_id) + 1
                    print(f"rvllm: error: prompt {prompt}: {completion.error}", file=sys.stderr)
    return num_failed


def _warn_of_idle_options(args: argparse.Namespace, params: SamplingParams) -> None:
    if params.is_greedy:
        for option, value, idle in (
            ("--top-p", args.top_p, 1.0),
            ("--top-k", args.top_k, 0),
            ("--min-p", args.min_p, 0.0),
            ("--seed", args.seed, None),
        ):
            if value != idle:
                logger.warning("%s changes nothing at temperature 0", option)
    if args.logprobs is not None and not args.json:
        logger.warning("--logprobs is only printed with --json")


def _read_prompts(sources: list[tuple[bool, str]] | None) -> list[str]:
    """The prompts of the command line, in its order. A source is (whether it is a file, text or path)."""
    if not sources:
        raise CommandError("no prompt: use -p TEXT, -f FILE, or -p - for standard input")
    if sum(is_file and path == "-" for is_file, path in sources) > 1:
        raise CommandError("standard input can be read once only")
    return [read_text(text) if is_file else text for is_file, text in sources]


def _report(llm: LLM, num_prompts: int, num_refused: int) -> None:
    stats = llm.engine.stats
    hit_rate = 100 * stats.prefix_hits / max(1, stats.prefix_queries)
    prefill_rate = stats.prefill_tokens / max(1e-9, stats.prefill_seconds)
    decode_rate = stats.decode_tokens / max(1e-9, stats.decode_seconds)
    lines = (
        f"prompts: {num_prompts - num_refused} run, {num_refused} refused",
        f"prefix cache: {stats.prefix_hits} of {stats.prefix_queries} prompt tokens found, {hit_rate:.1f} %",
        f"blocks: {stats.allocated_blocks} allocated, {stats.num_blocks} in the pool",
        f"preemptions: {stats.preemptions}",
        f"steps: {stats.steps}",
        f"prefill: {stats.prefill_tokens} tokens, {prefill_rate:.1f} tok/s",
        f"decode: {stats.decode_tokens} tokens, {decode_rate:.1f} tok/s",
    )
    print(*lines, sep="\n", file=sys.stderr)

"""Check a model's log-probabilities, token by token, against reference answers made by another program.

The reference is a JSON list of {"prompt", "prompt_ids", "token_ids", "steps": [{"id", "logprob", "top"}, ...]},
where "top" lists the best tokens of a step as [id, natural logprob], best first. A token that ends within a
character may have no step. The reference's own tokens are fed: one other choice does not spoil what follows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NEAR_TIE = 0.3  # two best logprobs this close may swap places
MAX_DELTA = 0.4  # of the logprob of the reference's best token, at any step
MEAN_DELTA = 0.04  # of the same, over all steps

GetLogits = Callable[[list[int]], Any]
GetPromptIds = Callable[[str], list[int]]


@dataclass
class Result:
    """What one prompt gave; deltas are |logprob - reference| of the reference's best token at each step."""

    deltas: list[float]
    num_near_ties: int = 0  # steps whose best token differs, where the reference was nearly tied
    failures: list[str] = field(default_factory=list)


def check_entry(entry: dict[str, Any], get_logits: GetLogits, get_prompt_ids: GetPromptIds | None) -> Result:
    """Compare one entry of the reference with the logits [T, V] of its own tokens."""
    prompt_ids, token_ids = entry["prompt_ids"], entry["token_ids"]
    result = Result([])
    if get_prompt_ids is not None and (ids := get_prompt_ids(entry["prompt"])) != prompt_ids:
        result.failures.append(f"prompt ids are {ids}, the reference has {prompt_ids}")
    first = len(prompt_ids) - 1  # the row that predicts the first token
    rows = np.asarray(get_logits(prompt_ids + token_ids), np.float64)[first : first + len(token_ids)]
    logprobs = rows - rows.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    positions = enumerate(token_ids)
    for step in entry["steps"]:
        number = next((i for i, token in positions if token == step["id"]), None)
        if number is None:
            raise ValueError(f"{entry['prompt']!r}: token {step['id']} of a step is not in token_ids")
        row = logprobs[number]
        (best, expected), (_, second) = step["top"][:2]
        delta = abs(float(row[best]) - expected)
        result.deltas.append(delta)
        if not delta <= MAX_DELTA:  # NaN fails too
            result.failures.append(
                f"step {number}: token {best} has logprob {row[best]:.4f}, not {expected:.4f}"
            )
        if (ours := int(row.argmax())) == best:
            continue
        if expected - second <= NEAR_TIE:
            result.num_near_ties += 1
        else:
            result.failures.append(
                f"step {number}: best token is {ours}, not {best}, which leads by {expected - second:.4f}"
            )
    return result


def rvllm_functions(model: str) -> tuple[GetLogits, GetPromptIds]:
    from rvllm import LLM, SamplingParams

    llm = LLM(model)
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def get_prompt_ids(prompt: str) -> list[int]:
        return list(llm.generate([prompt], params, use_tqdm=False)[0].prompt_token_ids)

    return llm.get_logits, get_prompt_ids


def oracle_functions(model: str, numerics: str) -> tuple[GetLogits, None]:
    """Logits of the NumPy reference, which has no tokenizer."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from reference import Transformer

    transformer = Transformer(model)
    return lambda ids: transformer.logits(ids, int8=numerics == "int8"), None


def check(
    reference: list[dict[str, Any]], get_logits: GetLogits, get_prompt_ids: GetPromptIds | None
) -> bool:
    """Print a table, one prompt a line, then what failed; True when nothing did."""
    print(f"{'prompt':<40} {'steps':>5} {'near ties':>9} {'max delta':>9} {'mean':>7}  result")
    results = []
    for entry in reference:
        result = check_entry(entry, get_logits, get_prompt_ids)
        results.append(result)
        print(
            f"{entry['prompt'][:40]!r:.40}".ljust(40),
            f"{len(result.deltas):>5} {result.num_near_ties:>9} {max(result.deltas):>9.4f}",
            f"{np.mean(result.deltas):>7.4f}  {'FAIL' if result.failures else 'ok'}",
            flush=True,
        )
    failures = [
        f"{entry['prompt'][:40]!r}: {failure}"
        for entry, result in zip(reference, results, strict=True)
        for failure in result.failures
    ]
    mean = float(np.mean([delta for result in results for delta in result.deltas]))
    if not mean <= MEAN_DELTA:
        failures.append(f"mean delta {mean:.4f} is more than {MEAN_DELTA}")
    prompts = "" if get_prompt_ids else ", prompt ids not checked"
    print(f"{len(results)} prompts, mean delta {mean:.4f}{prompts}: {len(failures)} failures")
    for failure in failures:
        print(f"  {failure}")
    return not failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="GGUF file, or any model name rvllm knows")
    parser.add_argument("reference", type=Path, help="JSON file with the reference answers")
    parser.add_argument(
        "--oracle",
        nargs="?",
        const="float64",
        choices=("float64", "int8"),
        help="check tests/reference.py instead of rvllm; int8: with the engine's matrix products",
    )
    args = parser.parse_args(argv)
    functions = oracle_functions(args.model, args.oracle) if args.oracle else rvllm_functions(args.model)
    return 0 if check(json.loads(args.reference.read_text()), *functions) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Questions that share a long prompt: its keys and values are computed once, and found by all that follow."""

import time

from rvllm import LLM, SamplingParams

RULES = "You are the librarian of a small town. Answer in one short sentence.\n" * 24
QUESTIONS = ["When do you open?", "Who wrote Faust?", "May I bring my dog?", "Where are the maps?"]

llm = LLM()
params = SamplingParams(temperature=0, max_tokens=12)
for name in ("first", "again"):
    start = time.perf_counter()
    outputs = llm.generate([RULES + question for question in QUESTIONS], params)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    print(f"{name}: {cached} of {tokens} prompt tokens from the cache, {seconds:.2f} s")

assert cached > 0.9 * tokens  # all but the ends of the prompts

"""How likely a model finds given answers: multiple choice by log probabilities, without generating."""

from rvllm import LLM, SamplingParams

QUESTION = "The capital of France is"
ANSWERS = [" Paris", " London", " Berlin", " a banana"]

llm = LLM()
num_question_tokens = len(llm.tokenizer.encode(QUESTION))
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)  # of the tokens themselves, no others
scores = {}
for answer, output in zip(ANSWERS, llm.generate([QUESTION + a for a in ANSWERS], params), strict=True):
    entries = output.prompt_logprobs[num_question_tokens:]
    tokens = output.prompt_token_ids[num_question_tokens:]
    scores[answer] = sum(entry[token].logprob for token, entry in zip(tokens, entries, strict=True))
for answer, score in sorted(scores.items(), key=lambda item: -item[1]):
    print(f"{score:8.3f}  {QUESTION}{answer}")
assert max(scores, key=scores.get) == " Paris"

logits = llm.get_logits(llm.tokenizer.encode(QUESTION))  # [tokens, vocab_size] float32: all of them, raw
print("best next token:", repr(llm.tokenizer.decode([int(logits[-1].argmax())])))

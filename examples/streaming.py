"""Text as it comes: a story piece by piece, then two answers that are written at the same time."""

from rvllm import LLM, SamplingParams

llm = LLM()
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=1)
for output in llm.stream("Once upon a time", params):
    print(output.outputs[0].text, end="", flush=True)
print()

answers = ["", ""]
for output in llm.stream(["Cats are", "Dogs are"], params):
    answers[int(output.request_id)] += output.outputs[0].text  # request_id is the index of the prompt
print(answers)

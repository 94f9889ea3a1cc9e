"""Many prompts at once, in this process: the engine batches them, and returns the answers in order."""

from rvllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "The opposite of hot is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
]

llm = LLM()  # the default model; LLM("model.gguf") for a file of your own
for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16)):
    completion = output.outputs[0]
    print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")

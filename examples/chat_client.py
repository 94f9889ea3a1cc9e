"""OpenAI's client talks to `rvllm serve`: an answer in pieces, and what it took."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="-")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    temperature=0,
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")

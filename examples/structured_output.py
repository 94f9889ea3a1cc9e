"""Answers that fit a JSON schema, whatever the model: tokens that would break it are never sampled."""

import json

from rvllm import LLM, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["good", "bad", "mixed"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "subject": {"type": "string", "maxLength": 30},
    },
    "required": ["sentiment", "stars", "subject"],
    "additionalProperties": False,
}
REVIEWS = [
    "The soup was cold and the waiter rude.",
    "Wonderful little hotel, we will come again!",
    "Great screen, but the battery lasts two hours.",
]

llm = LLM()
params = SamplingParams(temperature=0, max_tokens=64, structured_output=StructuredOutput(json_schema=SCHEMA))
chats = [[{"role": "user", "content": f"Sum up this review as JSON: {review}"}] for review in REVIEWS]
for review, output in zip(REVIEWS, llm.chat(chats, params), strict=True):
    summary = json.loads(output.outputs[0].text)
    assert summary.keys() == {"sentiment", "stars", "subject"}
    print(review, summary)

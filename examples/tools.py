"""A tool call through OpenAI's client: the model names the arguments, Python answers, the model goes on.

The call is forced, so that its JSON fits the schema with any model, however small.
"""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="-")
model = client.models.list().data[0].id
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, unit: str) -> str:
    return f"Sunny in {city}, 21 degrees {unit}."


messages = [{"role": "user", "content": "What is the weather in Paris?"}]
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[weather],
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    temperature=0,
    max_tokens=80,
)
message = answer.choices[0].message
[call] = message.tool_calls
result = get_weather(**json.loads(call.function.arguments))
print(f"{call.function.name}({call.function.arguments}) = {result}")

messages += [
    message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": result},
]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
print(answer.choices[0].message.content)

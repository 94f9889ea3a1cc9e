"""A file of requests in OpenAI's batch format: written, answered by `rvllm batch`, and read in its own order."""

import json
import subprocess
from pathlib import Path

CITIES = ["Paris", "Rome", "Cairo", "Lima"]

with Path("cities.jsonl").open("w") as file:
    for city in CITIES:
        body = {"prompt": f"{city} is a city in", "max_tokens": 8, "temperature": 0}
        request = {"custom_id": city, "method": "POST", "url": "/v1/completions", "body": body}
        print(json.dumps(request), file=file)

# Stopped or killed, the same command goes on where it was.
subprocess.run(["rvllm", "batch", "cities.jsonl", "cities_answers.jsonl"], check=True)

answers = {}
for line in Path("cities_answers.jsonl").read_text().splitlines():
    answer = json.loads(line)
    answers[answer["custom_id"]] = answer["response"]["body"]["choices"][0]["text"]
for city in CITIES:
    print(f"{city} is a city in{answers[city]!r}")

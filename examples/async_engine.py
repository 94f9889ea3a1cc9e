"""AsyncEngine inside a program of your own: coroutines share one engine thread, and may give up at any time."""

import asyncio

from rvllm import LLM, SamplingParams
from rvllm.async_engine import AsyncEngine


async def answer(engine: AsyncEngine, name: str, prompt: str) -> str:
    text = ""
    async for output in engine.generate(name, prompt, SamplingParams(temperature=0, max_tokens=24)):
        text += output.outputs[0].text
    return text


async def give_up(engine: AsyncEngine) -> int:
    """Leaves after three pieces: the request is dropped before the next step."""
    stream = engine.generate("long", "Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
    pieces = 0
    async for _ in stream:
        pieces += 1
        if pieces == 3:
            break
    await stream.aclose()
    return pieces


async def main() -> None:
    engine = AsyncEngine(LLM().engine, max_queue=100)
    engine.start()
    try:
        prompts = ["The capital of France is", "The capital of Italy is", "The capital of Spain is"]
        tasks = [answer(engine, f"request-{i}", prompt) for i, prompt in enumerate(prompts)]
        *texts, pieces = await asyncio.gather(*tasks, give_up(engine))
        for prompt, text in zip(prompts, texts, strict=True):
            print(prompt, text.strip().split("\n")[0])
        print(f"gave up after {pieces} pieces")
        await engine.drain(timeout=10)
    finally:
        engine.shutdown()


asyncio.run(main())

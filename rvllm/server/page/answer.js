// One answer that is coming: reads the stream into a message and keeps its figures.

import { ApiError, streamChat } from "./api.js";

/** While it runs, message grows; finish and error are set at the end. onChange() is called for every chunk. */
export class Answer {
  constructor(message, onChange) {
    this.message = message;
    this.onChange = onChange;
    this.controller = new AbortController();
  }

  stop() {
    this.controller.abort();
  }

  async run(body) {
    const { message } = this;
    const start = performance.now();
    let firstTime = null;
    let counted = 0;
    message.finish = null;
    message.error = null;
    message.stats = null;
    try {
      for await (const chunk of streamChat(body, this.controller.signal)) {
        const choice = chunk.choices?.[0];
        const text = choice?.delta?.content ?? "";
        const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
        if (text || reasoning) counted += 1;
        message.content += text;
        if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
        if (choice?.finish_reason) message.finish = choice.finish_reason;
        // A chunk need not be one token: the server's own count is the better one.
        const tokens = chunk.usage?.completion_tokens ?? counted;
        if (tokens > 0) {
          const now = performance.now();
          firstTime ??= now;
          message.stats = { tokens, seconds: (now - firstTime) / 1000, firstSeconds: (firstTime - start) / 1000, context: chunk.usage?.total_tokens ?? null };
        }
        this.onChange();
      }
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else {
        message.finish = "error";
        const known = error instanceof ApiError ? error : new ApiError(500, `The answer cannot be read: ${error.message}`);
        message.error = known.summary();
      }
    }
    message.finish ??= "interrupted";
  }
}

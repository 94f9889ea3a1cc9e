// The server's API: one place where every failure gets a title and a sentence.

const KEY = "rvllm.key"; // in sessionStorage: gone when the tab is closed

export class ApiError extends Error {
  /** status: of HTTP, or 0 when there was no complete answer. retryAfter: seconds, or null. */
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  get isTooLong() {
    return this.status === 400 && this.code === "context_length_exceeded";
  }

  get title() {
    if (this.isTooLong) return "The conversation is too long for this model";
    switch (this.status) {
      case 0: return "The connection was lost";
      case 401: return "An API key is needed";
      case 403: return "The server does not accept requests from this page";
      case 404: return "The server does not know this model";
      case 413: return "The message is too large";
      case 429: return "The server is busy";
      case 503: return "The server is not ready";
    }
    return this.status < 500 ? "The server refused the request" : "The server failed";
  }

  /** What a message keeps of it: plain data. */
  summary() {
    const wait = this.retryAfter ? ` Try again in ${this.retryAfter} s.` : "";
    return { status: this.status, isTooLong: this.isTooLong, title: this.title, detail: this.message + wait };
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "No answer from the server: is it still running?");
  }
  return response;
}

async function failure(response) {
  let error = {};
  try {
    const body = await response.json();
    error = body.error ?? {};
  } catch {
    // Whatever stands between here and the server may answer in HTML.
  }
  const retryAfter = Number.parseInt(response.headers.get("Retry-After"), 10) || null;
  return new ApiError(response.status, error.message || `HTTP status ${response.status}.`, error.code ?? null, retryAfter);
}

/** [{id, max_model_len}] */
export async function models() {
  const response = await request("v1/models");
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

/** {status, running, waiting, kv_cache_usage, decode_tokens}, also while the server is not ready; null when it is not there. */
export async function health() {
  try {
    const response = await request("health", { signal: AbortSignal.timeout(5000) });
    return await response.json();
  } catch {
    return null;
  }
}

/** Yields the chunks of an answer. Throws ApiError, also for an answer that breaks off; AbortError when aborted. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(Number(chunk.error.code) || 500, chunk.error.message, chunk.error.code);
    yield chunk;
  }
  throw new ApiError(0, "The answer broke off: the server closed the connection.");
}

async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The answer broke off: the server closed the connection.");
      }
      if (part.done) return;
      const lines = (rest + part.value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

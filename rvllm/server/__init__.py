"""The HTTP server: OpenAI's API, and llama.cpp's `/completion`, over one AsyncEngine."""

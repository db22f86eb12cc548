"""A model behind OpenAI's protocol: requests and responses as JSON, the thread that runs the model, the HTTP routes."""

"""The cloud worker: decodes KV chunks into the model's cache as they arrive, and answers."""

"""The edge agent: keeps contexts as encoded KV chunks and answers questions through a cloud worker."""

"""`kvferry demo`: a real model on a real vLLM engine, served from the host cache."""

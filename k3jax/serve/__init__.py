"""Serving: what is cached, who is served when and where, and the model that serves."""

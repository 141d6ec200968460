"""Serving: prefix cache, prefill and decode, scheduling."""

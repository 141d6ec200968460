"""Serving: a paged cache for latents and states, prefill and decode, and the policies that decide what runs where."""

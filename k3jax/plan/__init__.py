"""What a step will be on a cluster: bytes, operations, messages and time, from its traced program; nothing is compiled."""

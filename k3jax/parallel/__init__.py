"""What runs across ranks: pipeline schedules and their executor, context parallelism, experts, gradient ownership."""
